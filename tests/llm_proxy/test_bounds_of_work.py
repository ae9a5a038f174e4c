"""One agent's request cannot delay the others: its shape is bounded before any work, long work leaves the loop."""

from __future__ import annotations

import asyncio
import difflib
import io
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest

from agentlightning.adapter.calls.calls import model_calls
from agentlightning.adapter.calls.refusals import refused_for_good
from agentlightning.llm_proxy import GatewayLimits
from agentlightning.llm_proxy.access import bodies
from agentlightning.llm_proxy.access.limits import (
    LONGEST_COMPARED,
    LONGEST_ERROR,
    LONGEST_NAME,
    MOST_FIELDS,
    MOST_ITEMS,
    REQUEST_JSON,
    JsonBounds,
)
from agentlightning.llm_proxy.dialects import CHAT, DIALECTS, MESSAGES
from agentlightning.llm_proxy.dialects.json_values import TooMuchJsonError, check_depth, check_size
from agentlightning.llm_proxy.dialects.pieces import ToolCallStream
from agentlightning.llm_proxy.off_loop import HUGE_BYTES, LARGE_BYTES, OffLoop
from agentlightning.types import AttemptedRollout
from agentlightning.utils.http.byte_budget import PROCESS
from tests.llm_proxy.harness import HI, REQUESTS, GatewayHarness, arrived, until
from tests.stubs.model_server import ModelServer
from tests.stubs.raw_http import Answer, read_answer, request

Json = dict[str, Any]
LISTS = {
    "chat/completions": "messages",
    "completions": "prompt",
    "embeddings": "input",
    "responses": "input",
    "messages": "messages",
    "messages/count_tokens": "messages",
}
HUGE_NAME = "p" * 30_000_000


def encoded(body: Json, **fields: Any) -> bytes:
    """Return a request; a field of bytes is inserted as it is."""
    raw = json.dumps({**body, **{k: "@" if isinstance(v, bytes) else v for k, v in fields.items()}}).encode()
    return raw.replace(b'"@"', next((value for value in fields.values() if isinstance(value, bytes)), b""))


def listed(entry: bytes, count: int) -> bytes:
    return b"[" + b",".join([entry] * count) + b"]"


TOO_MUCH: dict[str, Callable[[Json, str], bytes]] = {
    "a model name of 30 MB": lambda body, _: encoded(body, model=HUGE_NAME),
    "a model name a little too long": lambda body, _: encoded(body, model="p" * (LONGEST_NAME + 1)),
    "2.4 million empty objects": lambda body, name: encoded(body, **{name: listed(b"{}", 2_400_000)}),
    "three million texts": lambda body, name: encoded(body, **{name: listed(b'"\\""', 3_000_000)}),
    "a few entries too many": lambda body, name: encoded(body, **{name: [*HI] * (MOST_ITEMS + 1)}),
    "too many tools": lambda body, _: encoded(body, tools=[{"type": "function"}] * (MOST_ITEMS + 1)),
    "too many fields": lambda body, _: encoded(body, **{f"f{n}": [] for n in range(REQUEST_JSON.containers + 1)}),
    "two million fields": lambda body, _: encoded(body, x=b"1," + b",".join(b'"k%d":1' % n for n in range(1_900_000))),
    "a million entries in one object": lambda body, _: encoded(body, logit_bias=dict.fromkeys(range(1_500_000), 1)),
    "a million entries in objects in lists": lambda body, name: encoded(
        body, **{name: [{**HI[0], "extra": dict.fromkeys(range(1_000_000), 1)}]}
    ),
    "a few fields too many": lambda body, _: encoded(body, **{f"f{n}": 1 for n in range(MOST_FIELDS)}),
    "a few entries of an object too many": lambda b, _: encoded(b, logit_bias=dict.fromkeys(range(MOST_ITEMS + 1), 1)),
    "a field with a name of 30 MB": lambda body, _: encoded(body, **{HUGE_NAME: 1}),
    "a user of 30 MB": lambda body, _: encoded(body, user=HUGE_NAME),
    "a role of 30 MB": lambda body, name: encoded(body, **{name: [{"role": HUGE_NAME, "content": "x"}]}),
    "lists a million deep": lambda body, name: encoded(body, **{name: b"[" * 1_000_000 + b"]" * 1_000_000}),
    "lists 5,000 deep": lambda body, name: encoded(body, **{name: b"[" * 5_000 + b"]" * 5_000}),
    "objects 250 deep, half a pair": lambda body, name: encoded(
        body, x="\ud83d", **{name: b'{"a":' * 250 + b"1" + b"}" * 250}
    ),
    "UTF-16": lambda body, _: json.dumps(body).encode("utf-16"),
    "a million choices": lambda body, _: encoded(body, n=1_000_000),
    "more choices than a float holds": lambda body, _: encoded(body, n=b"1e300"),
}


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the texts that were compared with others, in order."""
    lengths: list[int] = []
    matcher: Any = difflib.SequenceMatcher
    original = matcher.set_seq2

    def set_seq2(self: Any, b: Any) -> None:
        lengths.append(len(b))
        original(self, b)

    monkeypatch.setattr(matcher, "set_seq2", set_seq2)
    return lengths


LARGE = ("million", "30 MB", "too many fields")
"""Parts of the names of cases that take half a second; all dialects have the same reader, so one is enough."""
CASES = [
    (route, case)
    for route in REQUESTS
    for case in TOO_MUCH
    if route == "chat/completions" or not any(w in case for w in LARGE)
]


@pytest.mark.parametrize(("route", "case"), CASES)
async def test_a_request_that_is_too_much_is_refused_by_its_shape(route: str, case: str, compared: list[int]) -> None:
    body = TOO_MUCH[case](REQUESTS[route], LISTS[route])
    async with GatewayHarness() as harness:
        status, reply = await harness.post(f"/{route}", body)
        assert status == 400, reply
        assert set(reply["error"]) >= {"type", "message"}
        assert len(json.dumps(reply)) < LONGEST_ERROR + 2000
        assert harness.model.calls == []
        states = await harness.states()
        assert states == ([] if "count" in route else ["refused"])
        record = "".join(span.model_dump_json() for span in await harness.spans())
        assert len(record) < 2 * LONGEST_ERROR + 20_000 or "user" in case
        assert (await harness.ask())[0] == 200
    assert max(compared, default=0) <= LONGEST_COMPARED


async def test_a_long_conversation_with_tools_passes() -> None:
    calls = [{"id": "t", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}]
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "a", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t", "content": "b"},
        {"role": "assistant", "content": "c", "name": "d"},
    ]
    schema = {"type": "object", "properties": {f"p{n}": {"type": "string", "description": "x"} for n in range(200)}}
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": schema}} for n in range(100)]
    async with GatewayHarness() as harness:
        body = encoded({"model": "policy", "messages": turns * (MOST_ITEMS // 4), "tools": tools})
        assert (await harness.post("/chat/completions", body))[0] == 200


@pytest.mark.parametrize("length", [6, LONGEST_COMPARED, LONGEST_NAME, 60_000])
async def test_names_in_addresses_are_compared_within_bounds(length: int, compared: list[int]) -> None:
    async with GatewayHarness(
        policies={"main": {"kind": "trained", "models": ["policy"], "roles": ["solver"]}}
    ) as harness:
        url = harness.url("")
        for wrong in (
            url + "/models/" + "p" * length,
            url.replace("/rollout/", f"/role/{'s' * length}/rollout/") + "/models",
        ):
            async with harness.session.get(wrong) as answer:
                assert answer.status in (400, 404, 414, 431)
                assert len(await answer.text()) < LONGEST_ERROR + 2000
        assert (await harness.ask(model="p" * min(length, LONGEST_NAME)))[0] in (400, 404)
    assert max(compared, default=0) <= LONGEST_COMPARED


# --- how much is counted -----------------------------------------------------------------------------------------

VALUES: list[Any] = [
    {"a": [1, 2, {"b": 'x,y[{"}]'}]},
    {"a": "\\", "b": ['"', ",,[["], "\\\\": {}},
    ["\\" * 99_999, [], '"' * 99_998, {"\\": ["\n[,"]}],
    {"a": ['"\\,[{' * 200_000, [], {}]},
    ["x" * (1 << 18), [], "\\" * (1 << 18), [[]], "\u00fc" * (1 << 18), "[" * 9],
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
@pytest.mark.parametrize("ascii_only", [True, False])
def test_the_count_of_values_keys_and_texts_is_that_of_the_parser(value: Any, ascii_only: bool) -> None:
    counts = dict.fromkeys(("containers", "keys", "texts"), 0)

    def count(value: Any) -> None:
        inner: list[Any] = [*value, *value.values()] if isinstance(value, dict) else value
        counts["texts"] += isinstance(value, str)
        counts["keys"] += len(value) if isinstance(value, dict) else 0
        if isinstance(value, (dict, list)):
            counts["containers"] += 1
            for entry in inner:
                count(entry)

    count(value)
    containers, keys, texts = counts.values()
    raw = json.dumps(value, ensure_ascii=ascii_only).encode() + b" " * 5000
    for enough in ((containers,), (1000, keys, texts)):
        check_size(raw, JsonBounds(1000, *enough))
    for less in ((containers - 1,), (1000, keys - 1, texts), (1000, keys, texts - 1)):
        with pytest.raises(TooMuchJsonError):
            check_size(raw, JsonBounds(1000, *less))


async def test_huge_bodies_are_worked_on_one_at_a_time_in_a_process() -> None:
    at_work, most = 0, 0

    def work() -> None:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        time.sleep(0.02)
        at_work -= 1

    gateways = [OffLoop(), OffLoop()]
    await asyncio.gather(*(gateways[n % 2].run(HUGE_BYTES, work) for n in range(8)))
    for gateway in gateways:
        gateway.close()
    assert most == 1


def test_depth_is_counted_without_recursion() -> None:
    value: Any = 1
    for _ in range(110):
        value = {"a": [value]}
    with pytest.raises(TooMuchJsonError):
        check_depth(value)
    for _ in range(12):
        value = value["a"][0]
    check_depth(value)


# --- work grows with the size, not with its square ----------------------------------------------------------------


def calls_made(function: Callable[[], object]) -> int:
    """Return the number of function calls, generators' turns among them."""
    made = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return made


def messages_of_one_role(role: str) -> Callable[[int], object]:
    return lambda size: MESSAGES.to_chat(
        {"model": "m", "max_tokens": 1, "messages": [*[{"role": role, "content": "x"}] * size, *HI]}
    )


def items(kind: Json) -> Callable[[int], object]:
    dialect: Any = DIALECTS["responses"]
    return lambda size: dialect.to_chat({"model": "m", "input": [kind] * size})


def interleaved_calls(size: int) -> None:
    """A tool call that goes on while the next one has begun: what waits is looked at again at every piece."""
    stream = ToolCallStream()
    for index in (0, 1):
        stream.feed(
            {"tool_calls": [{"index": index, "id": f"c{index}", "function": {"name": "f", "arguments": '{"a":['}}]}
        )
    for _ in range(size):
        stream.feed({"tool_calls": [{"index": 0, "function": {"arguments": '{"b":"}"},'}}]})


def many_calls(size: int) -> None:
    reader = CHAT.read_stream({})
    for index in range(size):
        piece = {"index": index, "function": {"name": "f", "arguments": "{}"}}
        reader.feed(b'data: {"choices":[{"index":0,"delta":{"tool_calls":[%s]}}]}\n\n' % json.dumps(piece).encode())
    reply = reader.reply()
    assert reply is not None
    assert len(reply["choices"][0]["message"]["tool_calls"]) == size


WORK: dict[str, Callable[[int], object]] = {
    "messages of a user": messages_of_one_role("user"),
    "messages of an assistant": messages_of_one_role("assistant"),
    "items of an assistant": items({"role": "assistant", "content": "x"}),
    "thoughts": items({"type": "reasoning", "content": [{"text": "x"}]}),
    "pieces of tool calls": interleaved_calls,
    "tool calls of a stream": many_calls,
}


@pytest.mark.parametrize("case", WORK)
def test_work_grows_with_the_size(case: str) -> None:
    small, large = (calls_made(partial(WORK[case], size)) for size in (200, 2000))
    assert large < 11 * small


def test_texts_of_a_stream_are_joined_once() -> None:
    reader = CHAT.read_stream({})
    frame = b'data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n' % (b"x" * 1000)
    sizes: list[int] = []
    for _ in range(1000):
        reader.feed(frame)
        sizes.append(max(len(value) for value in _texts(reader.__dict__)))
    assert max(sizes) <= 64 * 1000  # no text that has grown so far, only blocks of pieces
    reply = reader.reply()
    assert reply is not None
    assert len(reply["choices"][0]["message"]["content"]) == 1_000_000


def _texts(value: Any) -> list[str]:
    """Return every text that an object holds, slots included."""
    kind = cast(Any, type(value))
    if kind is str:
        return [value]
    inner: list[Any] = list(value.values()) if kind is dict else list(value) if kind in (list, tuple) else []
    inner += list(getattr(value, "__dict__", {}).values())
    inner += [getattr(value, name) for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
    return [text for entry in inner for text in _texts(entry)] or [""]


# --- the loop keeps turning ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["chat/completions", "messages", "responses"])
@pytest.mark.parametrize("stream", [False, True])
async def test_others_are_served_while_a_large_call_is_worked_on(route: str, stream: bool) -> None:
    words = ('größe"' * 200_000 + " ") * 2
    body = REQUESTS[route] | {LISTS[route]: [{"role": "user", "content": words}], "stream": stream}
    async with GatewayHarness(ModelServer(lambda _: words)) as harness:
        upstream: Any = harness.proxy._upstream  # pyright: ignore[reportPrivateUsage] -- to see what leaves the loop
        served = 0

        async def look() -> None:
            nonlocal served
            while True:
                async with harness.session.get(
                    f"http://127.0.0.1:{harness.proxy.server_launcher.port}/health"
                ) as answer:
                    assert answer.status == 200
                served += 1

        looking = asyncio.create_task(look())
        async with harness.session.post(harness.url(f"/{route}"), data=io.BytesIO(json.dumps(body).encode())) as answer:
            assert answer.status == 200
            got = await answer.read()
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        assert len(got) > LARGE_BYTES
        assert upstream.off_loop.handed_over >= (4 if stream else 6)
        assert served >= 3
        assert await harness.states() == ["ok"]


# --- bytes in hand ---------------------------------------------------------------------------------------------------


MIB = 2**20
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def begun(harness: GatewayHarness, attempt: AttemptedRollout, size: int) -> Connection:
    """Send a part of a body whose rest does not come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", harness.proxy.server_launcher.port)
    path = "/" + harness.url(of=attempt).split("/", 3)[3]
    writer.write(request("POST", path, b" " * size, content_length=str(31 * MIB)))
    return reader, writer


async def test_what_one_attempt_holds_is_bounded_and_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "REST_SECONDS", 0.01)
    async with GatewayHarness(limits=GatewayLimits(bytes_per_attempt=4 * MIB)) as harness:
        greedy, other = await harness.attempt(), await harness.attempt()
        connections = [await begun(harness, greedy, MIB) for _ in range(12)]
        waiting: set[asyncio.Task[Answer]] = {asyncio.create_task(read_answer(reader)) for reader, _ in connections}
        answers: list[Answer] = []
        while len(answers) < 8:
            done, waiting = await asyncio.wait(waiting, timeout=30, return_when=asyncio.FIRST_COMPLETED)
            assert done, "holds more than its share"
            answers += [task.result() for task in done]
        assert {(answer.status, answer.json["error"]["code"]) for answer in answers} == {(429, "too_many_bytes")}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
        assert 0 < PROCESS.held <= 4 * MIB
        status, _ = await harness.ask("x" * (2 * MIB), of=other)
        assert status == 200
        for _, writer in connections:
            writer.transport.abort()
        await asyncio.gather(*waiting, return_exceptions=True)
        await until(lambda: PROCESS.held == 0)
        assert (await harness.ask("x" * (2 * MIB), of=greedy))[0] == 200
        assert await harness.states(greedy) != []


@pytest.mark.parametrize("keep", ["all", "counts"])
async def test_a_call_without_room_for_its_bytes_is_made_up_for_by_the_clients_retry(keep: Any) -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed")
    limits = GatewayLimits(bytes_per_attempt=6 * MIB)
    async with GatewayHarness(limits=limits, keep=keep) as harness:
        client = openai.AsyncOpenAI(base_url=harness.url("/v1"), api_key="none", max_retries=20)
        harness.model.hold()

        async def ask(word: str) -> object:
            messages: Any = [{"role": "user", "content": word + "x" * 2 * MIB}]
            return await client.chat.completions.create(model="policy", messages=messages)

        calls = [asyncio.create_task(ask(word)) for word in ("one", "two", "three", "four")]
        await until(lambda: harness.proxy.stats()["calls"].get("refused"))
        harness.model.release()
        await asyncio.gather(*calls)
        await client.close()
        recorded = model_calls(await harness.spans())
        assert [call.state for call in recorded].count("ok") == 4
        assert "refused" in [call.state for call in recorded]
        assert refused_for_good(recorded) == []


async def test_a_call_without_room_for_its_bytes_is_not_made_up_for_by_another_call() -> None:
    async with GatewayHarness(limits=GatewayLimits(bytes_per_attempt=6 * MIB)) as harness:
        harness.model.hold()
        first = asyncio.create_task(harness.ask("one" + "x" * 4 * MIB))
        await harness.model.until(arrived(1))
        assert (await harness.ask("two" + "x" * 4 * MIB))[0] == 429
        harness.model.release()
        assert (await first)[0] == 200
        assert (await harness.ask("too" + "x" * 4 * MIB))[0] == 200
        assert [call.state for call in refused_for_good(model_calls(await harness.spans()))] == ["refused"]


async def test_a_body_is_held_until_its_call_is_recorded() -> None:
    async with GatewayHarness() as harness:
        harness.model.hold()
        body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "x" * MIB}]}).encode()
        call = asyncio.create_task(harness.post("/chat/completions", body))
        await harness.model.until(arrived(1))
        assert PROCESS.held == len(body)
        harness.model.release()
        assert (await call)[0] == 200
        await until(lambda: PROCESS.held == 0)


async def test_what_a_body_expands_to_is_held_and_one_alone_always_fits() -> None:
    async with GatewayHarness(limits=GatewayLimits(bytes_per_attempt=12 * MIB)) as harness:
        harness.model.hold()
        url = harness.url("/completions")
        body = json.dumps({"model": "policy", "prompt": [1] * 500_000}).encode()  # 1.5 MB, 20 MB as a value
        call = asyncio.create_task(harness.post(url, body))
        await harness.model.until(arrived(1))
        assert PROCESS.held == 12 * MIB
        status, reply = await harness.post(url, body)
        assert (status, reply["error"]["code"]) == (429, "too_many_bytes")
        harness.model.release()
        assert (await call)[0] == 200
        await until(lambda: PROCESS.held == 0)
