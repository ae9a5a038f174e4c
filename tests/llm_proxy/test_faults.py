"""Whatever an engine does wrong, a call ends in a named state, the agent's library says so, and nothing is invented."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import anthropic
import openai
import pytest

from agentlightning.adapter import LlmProxyTraceToTriplet, TracerTraceToTriplet
from agentlightning.adapter.calls.calls import calls_from_triplets
from agentlightning.adapter.rows.samples import Sample, samples_from_calls
from agentlightning.semconv import CallState
from tests.llm_proxy.agents import AGENTS
from tests.llm_proxy.faults import CALLERS, FAULTS, Outcome, call, outcomes, table
from tests.llm_proxy.harness import GatewayHarness
from tests.stubs.faulty_engine import CHUNKED, UNTIL_CLOSED, FaultyEngine, Request, Way, chunked
from tests.stubs.model_replies import encode, logprobs_of

PAGE = Path(__file__).parents[2] / "docs/deep-dive/gateway.md"
TEXT = "one two three"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def table_rows() -> list[Outcome]:
    """Every call of the table, made once for all tests."""
    return asyncio.run(outcomes())


def rows_of(outcome: Outcome) -> list[Sample]:
    """Return what would have been trained, by either adapter."""
    ids = {"rollout_id": outcome.spans[0].rollout_id, "attempt_id": outcome.spans[0].attempt_id}
    readings = [samples_from_calls(calls_from_triplets(triplets, **ids)) for triplets in outcome.triplets()]
    assert len(readings[0].samples) == len(readings[1].samples)
    return readings[0].samples


def test_every_call_is_recorded_once_in_a_named_state(table_rows: list[Outcome]) -> None:
    tried = {(outcome.fault, outcome.caller, outcome.streamed) for outcome in table_rows}
    assert len(tried) == len(table_rows) == sum(len(CALLERS) * (1 + fault.plain) for fault in FAULTS)
    assert [o for o in table_rows if len(o.states) != 1 or o.states[0] not in get_args(CallState)] == []


def test_the_agent_gets_the_whole_reply_or_an_error_of_its_library(table_rows: list[Outcome]) -> None:
    usual = (openai.APIError, anthropic.APIError)
    strange = [o for o in table_rows if o.raised is not None and not isinstance(o.raised, usual)]
    assert [(o.fault, o.caller, o.streamed, repr(o.raised)) for o in strange] == []
    assert {o.text for o in table_rows if o.raised is None} == {TEXT}


def test_a_call_is_recorded_as_answered_exactly_if_the_agent_has_the_answer(table_rows: list[Outcome]) -> None:
    answered = {(o.fault, o.caller, o.streamed) for o in table_rows if o.states[0] in ("ok", "no_tokens")}
    assert answered == {(o.fault, o.caller, o.streamed) for o in table_rows if o.raised is None}


def test_only_calls_with_every_token_become_rows_and_the_rows_are_the_engines(table_rows: list[Outcome]) -> None:
    ids = encode(TEXT)
    for outcome in table_rows:
        rows = rows_of(outcome)
        assert len(rows) == (outcome.states[0] == "ok"), (outcome.fault, outcome.caller, outcome.streamed)
        for row in rows:
            assert row.token_ids[-len(ids) :] == ids
            assert row.logprobs[-len(ids) :] == logprobs_of(ids)
            assert sum(row.mask) == len(ids)


def test_the_page_of_the_gateway_shows_this_table(table_rows: list[Outcome]) -> None:
    assert table(table_rows) in PAGE.read_text(), "put the output of `python -m tests.llm_proxy.faults` into the page"


# --- a stream cut after each byte ------------------------------------------------------------------------------------


SAID = "one two"
_AT_ONCE = 24


def wire_form(request: Request, framing: str) -> bytes:
    """Return all bytes of a good answer."""
    frames = request.frames(SAID)
    return CHUNKED + chunked(frames) if framing == "chunked" else UNTIL_CLOSED + b"".join(frames)


def cutting(framing: str, made: list[bytes]) -> Way:
    """Return a way that sends as many bytes as the agent's words say, and then closes the connection."""

    async def cut(request: Request) -> None:
        made.append(wire_form(request, framing))
        await request.send(made[-1][: int(request.asked["messages"][0]["content"])])

    return cut


@dataclass(frozen=True)
class Seen:
    """The answer that an agent got, read as strictly as the specification of server-sent events allows."""

    status: int
    body: bytes
    text: str
    error: bool

    @property
    def alike(self) -> bytes:
        """The same for answers that differ in numbers only."""
        return b"%d " % self.status + re.sub(rb"\d+", b"0", self.body)


def seen(status: int, body: bytes) -> Seen:
    if status != 200:
        return Seen(status, body, "", bool(json.loads(body)["error"]["message"]))
    *frames, rest = body.split(b"\n\n")
    assert rest == b"", "the last frame is not ended"
    text, error, done, finished = "", False, False, set[int]()
    for frame in frames:
        assert not done, "a frame after the end"
        assert not error, "a frame after the error"
        data = b"\n".join(line.removeprefix(b"data: ") for line in frame.split(b"\n") if line.startswith(b"data: "))
        done = data == b"[DONE]"
        chunk: Any = {} if done else json.loads(data)
        error = "error" in chunk
        for choice in chunk.get("choices", []):
            text += choice["delta"].get("content") or ""
            finished |= {choice["index"]} if choice["finish_reason"] else set()
    assert error or done or finished, "nothing says that the stream is at its end"
    return Seen(status, body, text, error)


def places(whole: bytes, which: str) -> set[int]:
    """Return where to cut: after every byte, or around the ends of the head and of each frame."""
    if which == "every byte":
        return set(range(len(whole) + 20))  # the agent's words, so the length, differ by a bit
    ends = [match.end() for match in re.finditer(rb"\n\n|\r\n\r\n", whole)]
    return {0, 1} | {end + apart for end in ends for apart in range(-4, 5)}


async def cut_at(harness: GatewayHarness, url: str, made: list[bytes], which: str) -> dict[int, Seen]:
    """Return what the agent saw for each number of bytes that the engine sent."""
    answers: dict[int, Seen] = {}

    async def ask(cut: int) -> None:
        async with turns:
            words = [{"role": "user", "content": str(cut)}]
            async with harness.session.post(url, json={"model": "cut", "messages": words, "stream": True}) as reply:
                answers[cut] = seen(reply.status, await reply.read())

    turns = asyncio.Semaphore(_AT_ONCE)
    await ask(10**6)
    await asyncio.gather(*(ask(cut) for cut in places(made[0], which)))
    return answers


@pytest.mark.parametrize("which", [pytest.param("every byte", marks=pytest.mark.heavy), "ends of frames"])
@pytest.mark.parametrize("framing", ["chunked", "until closed"])
async def test_a_stream_that_is_cut_after_any_byte_is_whole_or_an_error_for_agent_and_record_alike(
    framing: str, which: str
) -> None:
    made: list[bytes] = []
    with FaultyEngine({"cut": cutting(framing, made)}) as engine:
        async with GatewayHarness(model_list=engine.entries) as harness:
            answers = await cut_at(harness, harness.url(), made, which)
            spans = await harness.spans()
        states = {
            int(str(parent.attributes["gen_ai.prompt.0.content"])): str(raw.attributes["agentlightning.call.state"])
            for parent in spans
            for raw in spans
            if raw.parent_id == parent.span_id
        }
        assert set(states) == set(answers)
        assert len(spans) == 2 * len(answers)
        for cut, answer in answers.items():
            assert states[cut] == ("upstream_error" if answer.error else "ok"), cut
            assert SAID.startswith(answer.text.rstrip()) if answer.error else answer.text == SAID, cut
        assert answers[0].error
        assert not answers[10**6].error
        whole = [cut for cut in answers if not answers[cut].error]
        assert min(whole) > min(map(len, made)) - 60, "nothing but the last word of the stream may be missing"

        for adapter in (TracerTraceToTriplet(), LlmProxyTraceToTriplet()):
            triplets = adapter.read(spans).triplets
            assert len(triplets) == len(whole)
            for triplet in triplets:
                assert triplet.response["token_ids"] == encode(SAID)
                assert triplet.response["token_logprobs"] == logprobs_of(encode(SAID))

        await the_library_says_so(engine, {answer.alike: answer for answer in answers.values()})


async def the_library_says_so(engine: FaultyEngine, answers: dict[bytes, Seen]) -> None:
    """Give each distinct answer to the library of OpenAI: it reads the text, or raises its usual error."""
    kinds = list(answers.values())

    async def repeat(request: Request) -> None:
        answer = kinds[int(request.asked["messages"][0]["content"])]
        kind = "text/event-stream" if answer.status == 200 else "application/json"
        head = f"HTTP/1.1 {answer.status} Stub\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n"
        await request.send(head.encode() + answer.body)

    async def read(index: int) -> str:
        words: Any = [{"role": "user", "content": str(index)}]
        stream = await client.chat.completions.create(model="repeat", messages=words, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    engine.ways["repeat"] = repeat
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{engine.port}/v1", api_key="none", max_retries=0
    ) as client:
        for index, answer in enumerate(kinds):
            if answer.error:
                with pytest.raises(openai.APIError):
                    await read(index)
            else:
                assert await read(index) == SAID


@pytest.mark.parametrize(
    ("route", "state"), [("completions", "ok"), ("messages", "no_tokens"), ("responses", "no_tokens")]
)
async def test_a_stream_of_another_api_that_is_cut_between_frames_is_whole_or_an_error_of_the_library(
    route: str, state: str
) -> None:
    made: list[bytes] = []

    async def cut(request: Request) -> None:
        prompt = request.asked.get("prompt") or request.asked.get("input") or request.asked["messages"][0]["content"]
        made.append(wire_form(request, "until closed"))
        await request.send(made[-1][: int(prompt)])

    with FaultyEngine({"cut": cut}) as engine:
        async with (
            GatewayHarness(model_list=[engine.entry("cut", dialects=[route])]) as harness,
            (first := AGENTS[route](harness)).client,
        ):
            assert await call(first, True, "cut", str(10**6)) == SAID
            assert await harness.states() == [state]
            ends = [match.end() for match in re.finditer(rb"\n\n", made[0])]
            for place in sorted({end + apart for end in ends for apart in (-3, -1, 0)} - {len(made[0])}):
                attempt = await harness.attempt()
                try:
                    text = await call(AGENTS[route](harness, attempt, like=first), True, "cut", str(place))
                except (openai.APIError, anthropic.APIError):
                    assert await harness.states(attempt) == ["upstream_error"], place
                else:
                    assert (text, await harness.states(attempt)) == (SAID, [state]), place


async def test_a_stream_of_two_choices_that_ends_before_the_second_began_is_not_whole() -> None:
    async def first_only(request: Request) -> None:
        frames = [frame for frame in request.frames(SAID) if b'"index": 1' not in frame and b"DONE" not in frame]
        await request.send(UNTIL_CLOSED + b"".join(frames))

    with FaultyEngine({"cut": first_only}) as engine:
        async with GatewayHarness(model_list=engine.entries) as harness:
            body = {"model": "cut", "messages": [{"role": "user", "content": "go"}], "stream": True, "n": 2}
            async with harness.session.post(harness.url(), json=body) as reply:
                assert seen(reply.status, await reply.read()).error
            assert await harness.states() == ["upstream_error"]
