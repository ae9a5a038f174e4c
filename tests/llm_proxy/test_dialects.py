"""Translation as such: every field of both request types has an answer, and streams say what whole replies say."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Required, TypedDict, Union, get_args, get_origin, get_type_hints

import anthropic
import openai
import pytest
from anthropic.types import MessageCreateParams
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.responses.response_create_params import ResponseCreateParams
from typing_extensions import is_typeddict

from agentlightning.llm_proxy.access.limits import GatewayLimits
from agentlightning.llm_proxy.dialects import CHAT, DIALECTS, MESSAGES, TranslatedDialect, messages, responses
from agentlightning.llm_proxy.dialects.chat import translated
from agentlightning.llm_proxy.dialects.translation import is_run_by_server
from agentlightning.llm_proxy.replies import CallFailed
from agentlightning.llm_proxy.responses_state import Item, ResponseMemory, StoredResponse, begin
from agentlightning.llm_proxy.sse import Frames, data_of, frame_of
from tests.llm_proxy.harness import REQUESTS, GatewayHarness
from tests.stubs.model_server import Fault, ModelServer

Json = dict[str, Any]
RESPONSES = DIALECTS["responses"]
assert isinstance(RESPONSES, TranslatedDialect)


# --- every field of a request is served, has a documented lack of effect, or is refused by its name ------------------

NONE = type(None)
NEEDED = ("call_id", "image_url")
"""Fields without which an item says nothing that could be passed on, though the library's types let them out."""


class Case(NamedTuple):
    """A field with a value, and the same request without it, or with another value where it is required."""

    path: str
    value: Any
    contrast: Any

    def inside(self, wrap: Callable[[Any], Any]) -> Case:
        return Case(self.path, wrap(self.value), wrap(self.contrast))


def alternatives(hint: Any) -> list[Any]:
    """Return what a type hint allows, one by one; `None` is the same as leaving the field out."""
    origin = get_origin(hint)
    if origin is Required or origin is types.UnionType or origin is Union:
        return [one for part in get_args(hint) for one in alternatives(part) if one is not NONE]
    if origin is not None and str(origin).endswith("Annotated"):
        return alternatives(get_args(hint)[0])
    return [Literal[value] for value in get_args(hint)] if origin is Literal else [hint]


def element(hint: Any) -> Any:
    """Return what a list hint holds; None if it is no list."""
    origin = get_origin(hint)
    is_list = origin is not None and origin not in (dict, Literal) and get_args(hint) and not is_typeddict(hint)
    return get_args(hint)[0] if is_list else None


def sample(hint: Any, path: str) -> Any:
    """Return the smallest value of a type; a text says where it stands. None for what JSON cannot hold."""
    hint = alternatives(hint)[0]
    if get_origin(hint) is Literal:
        return get_args(hint)[0]
    if is_typeddict(hint):
        hints = get_type_hints(hint, include_extras=True)
        needed = [name for name, of in hints.items() if get_origin(of) is Required or name in NEEDED]
        return {name: sample(hints[name], f"{path}.{name}") for name in needed}
    if (of := element(hint)) is not None:
        return [sample(of, f"{path}[0]")]
    if get_origin(hint) is dict or hint is object:
        return {"about": f"<{path}>"}
    return {str: f"<{path}>", int: 3, float: 0.25, bool: True}.get(hint)


def another(value: Any) -> Any:
    """Return a value of the same kind that says something else; None if there is none."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str) and value.startswith("<"):
        return f"{value} other"
    if isinstance(value, (int, float)):
        return value + 1
    return {**value, "about": "other"} if isinstance(value, dict) and "about" in value else None


def cases(hint: Any, path: str) -> Iterator[Case]:
    """Return one case per field and alternative below a type."""
    for one in alternatives(hint):
        if is_typeddict(one):
            yield from _fields(one, path)
        elif (of := element(one)) is not None:
            for case in cases(of, f"{path}[0]"):
                yield case.inside(lambda value: [value])


def _fields(kind: Any, path: str) -> Iterator[Case]:
    smallest = sample(kind, path)
    for name, hint in get_type_hints(kind, include_extras=True).items():
        where = f"{path}.{name}".lstrip(".")
        for one in alternatives(hint):
            value = sample(one, where)
            required = get_origin(hint) is Required or name in NEEDED
            contrast = another(value) if required else None
            if value is not None and not (required and contrast is None):
                rest = {key: old for key, old in smallest.items() if key != name}
                without = {**rest, name: contrast} if required else rest
                yield Case(where, {**rest, name: value}, without)
        for case in cases(hint, where):
            yield case.inside(lambda value, name=name: {**smallest, name: value})


def answer_to(case: Case, to_chat: Callable[[Json], Json]) -> str:
    """Return what becomes of a field: `served`, `refused`, `refused elsewhere` or `nothing`."""
    try:
        chat = to_chat(case.value)
    except CallFailed as failure:
        param = failure.param or ""
        well_said = failure.status == 400 and f"'{param}'" in failure.message
        named = re.sub(r"\.type$", "", param)
        right = well_said and f"{case.path}.".startswith((f"{named}.", f"{named}["))
        return "refused" if right else f"refused as {param!r}: {failure}"
    try:
        return "served" if chat != to_chat(case.contrast) else "nothing"
    except CallFailed:
        return "served"


WITHOUT_EFFECT_OF_MESSAGES = {
    r"(.*\.)?cache_control(\..*)?": "`cache_control` in any place",
    r"service_tier|speed": "`service_tier`, `speed`",
    r"tools\[0\]\.eager_input_streaming": "`eager_input_streaming` of a tool",
    r".*\.signature": "the `signature` of a thought",
    r"thinking\.(budget_tokens|display)": "A thinking budget is limited only by `max_tokens`, and `display` hides no",
    r".*\.caller=\{'type': 'direct'\}|.*\.allowed_callers=\['direct'\]": "requests the default behaviour",
    r".*\.type='custom'|stream=False|metadata=\{\}|output_config=\{\}": "requests the default behaviour",
    r"messages\[0\]\.content\[0\]\.is_error=False": "requests the default behaviour",
    r"inference_geo|workspace_id|user_profile_id|container(\.id)?": "location and owner of the request",
    r"diagnostics(\..*)?": "`diagnostics`",
    r"tools\[0\]\.defer_loading": "`defer_loading` of a tool: all tools are shown from the start",
    r".*\.citations=\{\}": "without citations",
    r"messages\[0\]\.content\[0\]\.data": "cannot be read and is excluded",
}
WITHOUT_EFFECT_OF_RESPONSES = {
    r"store|service_tier|metadata": "`store`, `service_tier`, `metadata` (returned)",
    r"safety_identifier|prompt_cache_(key|retention|options(\..*)?)": "fields about users and caches",
    r".*prompt_cache_breakpoint(\..*)?": "fields about users and caches",
    r"max_tool_calls": "`max_tool_calls` (of tools that OpenAI runs",
    r"stream_options(\..*)?": "`stream_options`",
    r"include": "additions by `include`",
    r"reasoning\.(generate_)?summary": "a summary of thoughts (they are returned in full)",
    r"input\[0\](\.content\[0\])?\.(id|status|phase|annotations|logprobs)(\[0\].*)?": "`id`, `status`",
    r"input\[0\]\.encrypted_content": "`encrypted_content` is read if",
    r"truncation='auto'|(image|context_management)(\[0\])?(\..*)?": "truncation and compaction of the context",
    r"access_programs(\..*)?": "`access_programs`",
    r"tools\[0\]\.defer_loading": "`defer_loading` of a tool: all tools are shown from the start",
    r"parallel_tool_calls": "a request for parallel calls without tools",
    r"tools\[0\]\.tools\[0\]\.defer_loading": "`defer_loading` of a tool: all tools are shown from the start",
    r"tools\[0\]\.description": "The `description` of a `namespace`",
    r"truncation='disabled'|reasoning\.mode='standard'|stream=False": "requests the default behaviour",
    r"reasoning\.context='(auto|all_turns)'": "requests the default behaviour",
    r".*\.caller=\{'type': 'direct'\}|.*\.allowed_callers=\['direct'\]": "requests the default behaviour",
    r"input\[0\]\.(type='(message|item_reference)'|role='developer')": "requests the default behaviour",
    r"(text|reasoning)=\{\}|(text|.*tools\[0\])\.format=\{'type': 'text'\}": "requests the default behaviour",
    r".*tools\[0\]\.format\.type='text'": "requests the default behaviour",
}


def unanswered(samples: list[Case], to_chat: Callable[[Json], Json], without_effect: Mapping[str, str]) -> list[str]:
    """Return the fields that are dropped without a word; tools that only a vendor's server can run are named."""
    lost: list[str] = []
    for case in samples:
        answer = answer_to(case, to_chat)
        value = repr(_at(case.value, case.path))
        path = re.sub(r"^input\[0\]\.tools\b", "tools", case.path)  # tools that are added have the same fields
        is_known = any(re.fullmatch(pattern, text) for pattern in without_effect for text in (path, f"{path}={value}"))
        tool = _at(case.value, case.path[: -len(path)] + "tools[0]") if path.startswith("tools[0].") else {}
        of_server = is_run_by_server(tool)
        if answer not in ("served", "refused") and not (answer == "nothing" and (is_known or of_server)):
            lost.append(f"{case.path}={value}: {answer}")
    return lost


def _at(value: Any, path: str) -> Any:
    for step in re.findall(r"[^.\[\]]+", path):
        value = value[int(step)] if step.isdigit() else value[step]
    return value


def _message_to_chat(request: Json) -> Json:
    """With a turn of the user at the end, so that no case is a prefill."""
    return MESSAGES.to_chat({**request, "messages": [*request["messages"], {"role": "user", "content": "go on"}]})


def _response_to_chat(request: Json) -> Json:
    """With what every request must have, though the library's type does not say so, and with a memory."""
    memory, attempt = ResponseMemory(GatewayLimits()), ("ro-1", "at-1")
    earlier = Item("<input[0].id>", b'{"role": "user", "content": "earlier"}')
    memory.add(StoredResponse(attempt, "<previous_response_id>", b"{}", (earlier,), ()))
    turn = begin(memory, attempt, {"model": "policy", "input": "hi", **request}, 1_000_000)
    return RESPONSES.to_chat(turn.expanded())


FIELDS = {
    "messages": (MessageCreateParams, _message_to_chat, WITHOUT_EFFECT_OF_MESSAGES, messages),
    "responses": (ResponseCreateParams, _response_to_chat, WITHOUT_EFFECT_OF_RESPONSES, responses),
}


@pytest.mark.parametrize("route", FIELDS)
def test_every_field_of_the_librarys_request_type_has_an_answer(route: str) -> None:
    hint, to_chat, without_effect, _ = FIELDS[route]
    samples = [case for kind in get_args(hint) for case in cases(kind, "")]
    assert len(samples) > 500
    assert unanswered(samples, to_chat, without_effect) == []


@pytest.mark.parametrize("route", FIELDS)
def test_what_has_no_effect_is_documented_where_requests_are_read(route: str) -> None:
    _, _, without_effect, module = FIELDS[route]
    text = " ".join((module.__doc__ or "").split())
    assert [phrase for phrase in without_effect.values() if phrase not in text] == []


def test_the_check_finds_a_field_that_is_dropped() -> None:
    class Params(TypedDict, total=False):
        model: Required[str]
        dropped: int

    samples = list(cases(Params, ""))
    assert unanswered(samples, lambda request: {"model": request["model"]}, {}) == ["dropped=3: nothing"]


# --- a stream says what the whole reply says -------------------------------------------------------------------------

ODD = st.sampled_from(
    ["\n", "  ", "```py\n", "\U0001f600", "e\u0301", "\U0001f469\u200d\U0001f52c", '"', "\\", "\u2028"]
)
TEXTS = st.lists(st.one_of(ODD, st.text(max_size=6)), max_size=8).map("".join)
VALUES = st.dictionaries(st.text(max_size=4), st.one_of(st.integers(), TEXTS, st.lists(TEXTS, max_size=2)), max_size=3)
ARGUMENTS = st.one_of(st.just(""), VALUES.map(lambda value: json.dumps(value, ensure_ascii=False)))


class Cut(NamedTuple):
    """A chat reply and the chunks of a stream that says the same."""

    reply: Json
    chunks: list[Json]


@st.composite
def cut_replies(draw: st.DrawFn) -> Cut:
    thought, content = draw(TEXTS), draw(TEXTS)
    named = [
        (f"call-{index}", f"tool_{index}", text) for index, text in enumerate(draw(st.lists(ARGUMENTS, max_size=3)))
    ]
    deltas = [{"reasoning_content": piece} for piece in _cut(draw, thought)]
    deltas += [{"content": piece} for piece in _cut(draw, content)]
    deltas += [{"tool_calls": [piece]} for piece in _tool_pieces(draw, named)]
    message: Json = {"role": "assistant", "content": content or None}
    if thought:
        message["reasoning_content"] = thought
    functions = [{"name": name, "arguments": arguments} for _, name, arguments in named]
    if named:
        calls = zip(named, functions, strict=True)
        message["tool_calls"] = [{"id": name, "type": "function", "function": f} for (name, _, _), f in calls]
    reason = draw(st.sampled_from(["stop", "length", "tool_calls"]))
    head = {"id": "chatcmpl-1", "created": 5, "model": "policy"}
    usage = {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
    reply = {**head, "choices": [{"index": 0, "message": message, "finish_reason": reason}], "usage": usage}
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    return Cut(reply, [*chunks, {**head, "choices": [], "usage": usage}])


def _cut(draw: st.DrawFn, text: str) -> list[str]:
    """Cut a text anywhere; together the pieces, some of them empty, are the text."""
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def _tool_pieces(draw: st.DrawFn, calls: list[tuple[str, str, str]]) -> list[Json]:
    """Cut the arguments of each call and let the calls take turns; they begin in their order."""
    waiting: list[list[Json]] = []
    for index, (name, function, arguments) in enumerate(calls):
        first = {"index": index, "id": name, "type": "function", "function": {"name": function, "arguments": ""}}
        pieces = [{"index": index, "function": {"arguments": piece}} for piece in _cut(draw, arguments)]
        waiting.append([first, *pieces])
    pieces: list[Json] = []
    begun = 0
    while any(waiting):
        candidates = [index for index, rest in enumerate(waiting[: begun + 1]) if rest]
        index = draw(st.sampled_from(candidates))
        begun = max(begun, index + 1)
        pieces.append(waiting[index].pop(0))
    return pieces


class Wire:
    """Both client libraries at a server that says what it was told to."""

    def __init__(self, server: ModelServer) -> None:
        self._server = server
        root = server.base_url.removesuffix("/v1")
        self.anthropic = anthropic.Anthropic(base_url=root, api_key="none", max_retries=0)
        self.openai = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0)

    def says(self, body: bytes, streamed: bool) -> None:
        kind = "text/event-stream" if streamed else "application/json"
        self._server.faults = [Fault(body=body, headers={"Content-Type": kind})]


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    with ModelServer() as server:
        made = Wire(server)
        with made.anthropic, made.openai:
            yield made


def _stream(dialect: TranslatedDialect, chunks: list[Json]) -> bytes:
    writer = dialect.write_stream({"model": "policy"})
    return b"".join([*(writer.feed(chunk) for chunk in chunks), writer.end()])


INTERLEAVED = [
    {"tool_calls": [{"index": 0, "id": "call-0", "function": {"name": "tool_0", "arguments": '{"a"'}}]},
    {"tool_calls": [{"index": 1, "id": "call-1", "function": {"name": "tool_1", "arguments": "{"}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
    {"tool_calls": [{"index": 1, "function": {"arguments": "}"}}]},
]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=cut_replies())
def test_a_message_cut_anywhere_is_the_message_of_the_whole_reply(wire: Wire, cut: Cut) -> None:
    wire.says(json.dumps(translated(cut.reply, MESSAGES, {})[1]).encode(), streamed=False)
    whole = wire.anthropic.messages.create(model="policy", max_tokens=9, messages=[])
    wire.says(_stream(MESSAGES, cut.chunks), streamed=True)
    with wire.anthropic.messages.stream(model="policy", max_tokens=9, messages=[]) as stream:
        streamed = stream.get_final_message()
    blocks = [block.model_dump(exclude={"parsed_output"}) for block in streamed.content]
    assert blocks == [block.model_dump() for block in whole.content]
    assert streamed.model_dump(exclude={"content"}) == whole.model_dump(exclude={"content"})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=cut_replies())
def test_a_response_cut_anywhere_is_the_response_of_the_whole_reply(wire: Wire, cut: Cut) -> None:
    wire.says(json.dumps(translated(cut.reply, RESPONSES, {})[1]).encode(), streamed=False)
    whole = wire.openai.responses.create(model="policy", input="")
    wire.says(_stream(RESPONSES, cut.chunks), streamed=True)
    deltas: dict[str, str] = {}
    last: Any = None
    for event in wire.openai.responses.create(model="policy", input="", stream=True):
        if event.type.endswith(".delta"):
            deltas[event.item_id] = deltas.get(event.item_id, "") + event.delta
        last = event
    assert last.response.model_dump() == whole.model_dump()
    assert deltas == {item["id"]: text for item in whole.to_dict()["output"] if (text := _text_of(item))}


def _text_of(item: Json) -> str:
    return item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]


@settings(max_examples=60, deadline=None)
@given(cut=cut_replies(), size=st.integers(1, 40))
def test_the_record_of_a_stream_is_the_record_of_the_whole_reply(cut: Cut, size: int) -> None:
    raw = b"".join(frame_of(json.dumps(chunk).encode()) for chunk in cut.chunks) + frame_of(b"[DONE]")
    frames, reader = Frames(len(raw) + 1), CHAT.read_stream({})
    for start in range(0, len(raw), size):
        for frame in frames.feed(raw[start : start + size]):
            assert reader.feed(frame) == frame
    record = reader.reply()
    assert record is not None
    message, whole = record["choices"][0]["message"], cut.reply["choices"][0]["message"]
    for call in message.get("tool_calls", ()):
        del call["index"]
    assert {key: value for key, value in message.items() if value} == {k: v for k, v in whole.items() if v}
    assert record["usage"] == cut.reply["usage"]


def test_tool_calls_that_take_turns_are_told_one_after_the_other() -> None:
    chunks = [{"id": "x", "choices": [{"index": 0, "delta": delta}]} for delta in INTERLEAVED]
    events = [json.loads(data_of(frame) or b"") for frame in Frames(10_000).feed(_stream(MESSAGES, chunks))]
    frames = [
        (event["type"].removeprefix("content_block_"), event["index"], event.get("delta", {}).get("partial_json"))
        for event in events
        if "index" in event
    ]
    assert frames == [
        ("start", 0, None),
        ("delta", 0, '{"a"'),
        ("delta", 0, ": 1}"),
        ("stop", 0, None),
        ("start", 1, None),
        ("delta", 1, "{}"),
        ("stop", 1, None),
    ]


def test_a_name_that_a_server_repeats_in_each_piece_is_told_once() -> None:
    pieces = [{"index": 0, "id": "c", "function": {"name": "add", "arguments": piece}} for piece in ('{"a"', ": 1}")]
    chunks = [{"id": "x", "choices": [{"index": 0, "delta": {"tool_calls": [piece]}}]} for piece in pieces]
    reader = CHAT.read_stream({})
    for chunk in chunks:
        reader.feed(frame_of(json.dumps(chunk).encode()))
    (call,) = (reader.reply() or {})["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert _stream(MESSAGES, chunks).count(b'"name":"add"') == 1


def test_words_after_a_tool_call_are_a_block_of_their_own() -> None:
    deltas: list[Json] = [{"content": "a"}, *INTERLEAVED[:1], {"content": "b"}]
    chunks = [{"id": "x", "choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    events = [json.loads(data_of(frame) or b"") for frame in Frames(10_000).feed(_stream(MESSAGES, chunks))]
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["text", "tool_use", "text"]


@pytest.mark.parametrize("dialect", [MESSAGES, RESPONSES], ids=["messages", "responses"])
def test_half_a_surrogate_pair_breaks_no_stream(dialect: TranslatedDialect) -> None:
    half = {"id": "x", "choices": [{"index": 0, "delta": {"content": "\ud83d"}, "finish_reason": None}], "extra": 1}
    assert b"\\ud83d" in _stream(dialect, [half])
    reader = CHAT.read_stream({})
    shown = reader.feed(frame_of(json.dumps({**half, "prompt_token_ids": [1]}).encode()))
    assert b"\\ud83d" in shown


# --- calls on file ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["chat/completions", "completions", "messages", "responses", "embeddings"])
async def test_a_call_of_each_dialect_is_replayed_from_a_file_without_any_model(route: str, tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    async with GatewayHarness(record=path) as harness:
        status, reply = await harness.post(f"/v1/{route}", REQUESTS[route])
        assert status == 200
        (recorded,) = await harness.raw()
    async with GatewayHarness(replay=path, model_list=[]) as harness:
        assert await harness.post(f"/v1/{route}", REQUESTS[route]) == (200, reply)
        (replayed,) = await harness.raw()
        assert harness.model.calls == []
    fields = ("state", "prompt_token_ids", "completion_token_ids", "completion_logprobs", "finish_reason")
    assert {name: replayed.get(name) for name in fields} == {name: recorded.get(name) for name in fields}
