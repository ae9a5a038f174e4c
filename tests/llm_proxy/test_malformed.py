"""Whatever an agent or a model server sends in place of a value, the call ends in a state and an answer of its API.

Valid requests, replies and frames of each dialect, with any one value replaced by a value of any other type.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentlightning.llm_proxy.dialects import DIALECTS, MESSAGES, Dialect, TranslatedDialect
from agentlightning.llm_proxy.replies import CallFailed
from tests.llm_proxy.harness import GatewayHarness
from tests.stubs.faulty_engine import CHUNKED, FaultyEngine, Request, chunked, whole
from tests.stubs.model_replies import REPLIES

Json = dict[str, Any]
OTHERS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**63, 10**400, -0.5, 1e308, float("nan"), float("inf")),
    *("", "str", "\ud83d", "\x00", [], [[]], [None], [1], ["str"], {}, {"type": "x"}, {"a": {"b": []}}),
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
IMAGE = "data:image/png;base64,AAAA"

REQUESTS: dict[str, Json] = {
    "chat/completions": {
        "messages": [
            {"role": "system", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": IMAGE}}],
            },
            {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto",
        "temperature": 0.5,
        "max_tokens": 5,
        "n": 1,
        "stop": ["x"],
        "logprobs": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
        "user": "u",
    },
    "completions": {"prompt": ["hi", "you"], "n": 1, "logprobs": 1, "max_tokens": 5, "stop": "x", "temperature": 0.5},
    "embeddings": {"input": ["hi", "you"], "encoding_format": "float"},
    "responses": {
        "input": [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "hi"}, {"type": "input_image", "image_url": IMAGE}],
            },
            {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "hm"}]},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "yes", "annotations": []}],
            },
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
        ],
        "instructions": "be brief",
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "metadata": {"k": "v"},
        "prompt_cache_options": {"mode": "auto"},
        "max_output_tokens": 9,
        "parallel_tool_calls": False,
        "temperature": 0.5,
    },
    "messages": {
        "max_tokens": 9,
        "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "yes"},
                    {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "content": [{"type": "text", "text": "2"}],
                        "is_error": True,
                    },
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
                ],
            },
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        "metadata": {"user_id": "u"},
        "stop_sequences": ["x"],
        "temperature": 0.5,
    },
}
ANSWER: Json = {"content": "one two", "reasoning_content": "hm", "tool_calls": [CHAT_CALL, {**CHAT_CALL, "id": "c2"}]}
ANSWERS: dict[str, Any] = {"/v1/chat/completions": ANSWER}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the place of every value inside a value, itself included."""
    yield path
    kind = cast(Any, type(value))
    inner: list[tuple[Any, Any]] = list(value.items()) if kind is dict else []
    inner += enumerate(value) if kind is list else ()
    for step, entry in inner:
        yield from places(entry, (*path, step))


def replaced(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    if not path:
        return other
    changed = deepcopy(value)
    inner = changed
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = other
    return changed


def request_of(route: str, streamed: bool = False) -> Json:
    return {"model": "policy", **REQUESTS[route], **({"stream": True} if streamed else {})}


def refused_by_name(failure: CallFailed) -> None:
    assert 400 <= failure.status < 500


def fault_of_the_server(failure: CallFailed, what: Any) -> None:
    assert failure.status == 502, what


# --- every replacement, in the dialects themselves ----------------------------------------------------------------


@pytest.mark.parametrize("route", REQUESTS)
def test_every_wrong_value_of_a_request_is_read_or_refused(route: str) -> None:
    dialect = DIALECTS[route]
    tried = 0
    for path in places(request_of(route)):
        for other in OTHERS:
            raw = json.dumps(replaced(request_of(route), path, other)).encode()
            try:
                request = dialect.read_request(raw)
                dialect.prompt_of(request)
                dialect.wants_stream(request)
                if isinstance(dialect, TranslatedDialect):
                    dialect.to_chat(request)
                if dialect is MESSAGES:
                    MESSAGES.count_to_chat(MESSAGES.read_count(raw))
            except CallFailed as failure:
                refused_by_name(failure)
            tried += 1
    assert tried > 100


def wires() -> list[tuple[Dialect, TranslatedDialect | None, str]]:
    chat = DIALECTS["chat/completions"]
    pairs: list[tuple[Dialect, TranslatedDialect | None, str]] = []
    for route, dialect in DIALECTS.items():
        if isinstance(dialect, TranslatedDialect):
            pairs += [(chat, dialect, "/v1/chat/completions"), (dialect, None, f"/v1/{route}")]
        else:
            pairs.append((dialect, None, f"/v1/{route}"))
    return pairs


def good_reply(path: str, request: Json) -> Json:
    return REPLIES[path][0](request, ANSWERS.get(path, "one two"), "r-1", True)


@pytest.mark.heavy
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "as a stream"])
@pytest.mark.parametrize("number", range(len(wires())))
def test_every_wrong_value_of_a_reply_is_read_or_a_fault_of_the_server(number: int, streamed: bool) -> None:
    from agentlightning.llm_proxy.calls import GatewayCall
    from agentlightning.llm_proxy.forwarding import UpstreamRequest, convert_reply, read_reply
    from agentlightning.llm_proxy.recording.spans import spans_of
    from agentlightning.llm_proxy.upstream.response import UpstreamResponse

    wire, translated, path = wires()[number]
    if streamed and wire.route == "embeddings":
        pytest.skip("embeddings does not support streams")
    agents = (translated or wire).route
    agent_request = request_of(agents)
    request = translated.to_chat(agent_request) if translated is not None else agent_request
    reply = good_reply(path, {**request, "return_token_ids": True, "logprobs": True})
    sent = UpstreamRequest(agent_request, wire, request, wire.prompt_of(request), [], translated)
    for number, place in enumerate(places(reply)):
        for other in OTHERS[number % 4 :: 4]:  # in turns: the same fields come again and again
            raw = json.dumps(replaced(reply, place, other)).encode()
            call = GatewayCall("ro-1", "at-1", 1, dialect=agents)
            call.request, call.prompt = request, sent.prompt
            try:
                upstream_reply = read_reply(wire, UpstreamResponse(200, raw))
                record, answer, _ = convert_reply(sent, upstream_reply, raw, streamed)
                call.answered(record, wire.tokens_of(upstream_reply, request))
                if not streamed:
                    json.loads(answer, parse_constant=_no_constant)
            except CallFailed as failure:
                fault_of_the_server(failure, (place, other))
                call.failed(failure)
            spans_of(call)


@pytest.mark.heavy
@pytest.mark.parametrize("number", [n for n, (wire, _, _) in enumerate(wires()) if wire.route != "embeddings"])
def test_every_wrong_value_of_a_frame_is_read_or_a_fault_of_the_server(number: int) -> None:
    from agentlightning.llm_proxy.forwarding import UpstreamRequest, convert_frame, end_stream

    wire, translated, path = wires()[number]
    agent_request = request_of((translated or wire).route, streamed=True)
    request = translated.to_chat(agent_request) if translated is not None else agent_request
    reply = good_reply(path, {**request, "return_token_ids": True, "logprobs": True})
    cut = REPLIES[path][1]
    assert cut is not None
    frames = cut(reply, request)
    upstream_request = UpstreamRequest(agent_request, wire, request, [], [], translated)
    for at, frame in enumerate(frames):
        head, _, data = frame.strip().rpartition(b"data: ")
        if not data.startswith(b"{"):
            continue
        value = json.loads(data)
        for number, place in enumerate(places(value)):
            for other in OTHERS[(number + at) % 6 :: 6]:
                wrong = head + b"data: " + json.dumps(replaced(value, place, other)).encode() + b"\n\n"
                reader = wire.read_stream(request)
                writer = None if translated is None else translated.write_stream(agent_request)
                try:
                    for sent in [*frames[:at], wrong, *frames[at + 1 :]]:
                        convert_frame(reader, sent, writer)
                    end_stream(upstream_request, reader, writer, False)
                except CallFailed as failure:
                    fault_of_the_server(failure, (at, place, other))


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


# --- some of them through the gateway -----------------------------------------------------------------------------

JSON_VALUES = st.recursive(
    st.sampled_from(OTHERS) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.heavy
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_every_call_ends_in_a_state_and_an_answer_whatever_is_said(
    data: st.DataObject, caplog: pytest.LogCaptureFixture
) -> None:
    route = data.draw(st.sampled_from(list(REQUESTS)))
    streamed, answers_streamed = data.draw(st.booleans()), data.draw(st.booleans())
    body = request_of(route, streamed)
    if data.draw(st.booleans()):
        body = replaced(body, data.draw(st.sampled_from(list(places(body))[1:])), data.draw(JSON_VALUES))
        if isinstance(body, dict):
            body["model"] = "policy"
    seed = random.Random(data.draw(st.integers(0, 9999)))
    other = data.draw(JSON_VALUES)

    async def way(request: Request) -> None:
        try:
            reply = request.reply()
            cut = REPLIES[request.path][1]
        except Exception:  # the request is what is wrong
            await request.send(whole(400, b'{"error": {"message": "no"}}'))
            return
        if cut is None or not answers_streamed:
            reply = replaced(reply, seed.choice(list(places(reply))), other)
            await request.send(whole(200, json.dumps(reply).encode()))
            return
        frames = cut(reply, request.asked)
        at = seed.randrange(len(frames))
        head, _, text = frames[at].strip().rpartition(b"data: ")
        if text.startswith(b"{"):
            value = json.loads(text)
            changed = json.dumps(replaced(value, seed.choice(list(places(value))), other)).encode()
            frames[at] = head + b"data: " + changed + b"\n\n"
        await request.send(CHUNKED + chunked(frames))

    async def main() -> None:
        with FaultyEngine({"policy": way}) as engine:
            native = {"dialects": [route]} if data.draw(st.booleans()) else {}
            async with GatewayHarness(model_list=[engine.entry("policy", engine="vllm", **native)]) as harness:
                async with harness.session.post(harness.url(f"/{route}"), data=json.dumps(body).encode()) as answer:
                    text = await answer.read()
                    status, kind = answer.status, answer.content_type
                assert status == 200 or 400 <= status < 500 or status in (501, 502), (status, text)
                if kind == "application/json":
                    json.loads(text)
                assert await harness.states()  # one for each choice
                assert len({span.sequence_id for span in await harness.spans()}) == 1
                assert sum(harness.proxy.stats()["calls"].values()) == 1
                assert harness.proxy.stats()["lost"] == harness.proxy.stats()["rejected"] == 0

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    faults = [record.getMessage() for record in caplog.records if record.exc_info]
    assert faults == []
