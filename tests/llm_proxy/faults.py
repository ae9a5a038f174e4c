"""The table of faults: what an engine can do wrong, and what becomes of the call. `python -m tests.llm_proxy.faults`.

Each fault meets a real gateway, asked by the real libraries of OpenAI and Anthropic, plain and streamed. A row says in
which state the call is recorded, and what the library raises in the agent. All calls are made at once, but for those in
which the engine falls silent: their time begins when the others are over.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from agentlightning.adapter import LlmProxyTraceToTriplet, TracerTraceToTriplet
from agentlightning.llm_proxy import GatewayLimits
from agentlightning.types import Span, Triplet
from tests.llm_proxy.agents import AGENTS, Agent, TextAgent
from tests.llm_proxy.harness import GatewayHarness
from tests.stubs.faulty_engine import CHUNKED, UNTIL_CLOSED, FaultyEngine, Request, Way, chunked, whole

SILENT_SECONDS = 5.0
"""Time of a call in the rows in which the engine falls silent; enough for its output before, at any load."""
HEARD: set[str] = set()
"""The words of the streamed calls of which the agent has had an event."""
_LIMITS = GatewayLimits(call_seconds=60.0, body_bytes=64 * 1024)
_SHORT_LIMITS = GatewayLimits(call_seconds=SILENT_SECONDS)
_ENDLESS = b"data: " + b"x" * 4096 + b"\n\n"


# --- what an engine can do ----------------------------------------------------------------------------------------


def sends(data: Callable[[Request], bytes]) -> Way:
    """Return a way that sends these bytes and closes the connection."""

    async def way(request: Request) -> None:
        await request.send(data(request))

    return way


def answers(status: int, body: bytes | None = None) -> Way:
    """Return a way that gives this answer; without a body OpenAI's error object."""
    content = body if body is not None else json.dumps({"error": {"message": f"told to answer {status}"}}).encode()
    return sends(lambda _: whole(status, content))


def streams(*more: bytes, frames: slice = slice(3), head: bytes = CHUNKED) -> Way:
    """Return a way that sends some frames of a good stream and then something else, chunked or until it closes."""

    def data(request: Request) -> bytes:
        sent = [*request.frames()[frames], *more]
        return head + (chunked(sent) if head == CHUNKED else b"".join(sent))

    return sends(data)


def half_chunked(request: Request) -> bytes:
    """Return half a stream without the end of its transfer coding."""
    return CHUNKED + chunked(request.frames()[:3])[: -len(b"0\r\n\r\n")]


def half_whole(request: Request) -> bytes:
    good = whole(200, json.dumps(request.reply()).encode())
    return good[: -len(good) // 3]


async def until_heard(request: Request) -> None:
    """Return when the agent has an event of the stream, so that it does not read it together with the next bytes."""
    request_text = json.dumps(request.asked)
    while not any(words in request_text for words in list(HEARD)):  # noqa: ASYNC110 -- another loop has no event to offer
        await asyncio.sleep(0.01)


async def resets_without_a_byte(request: Request) -> None:
    request.reset()


async def silent(request: Request) -> None:
    await request.until_left()


async def late(request: Request) -> None:
    await asyncio.sleep(0.3)
    await request.send(request.good())


def endless(begin: Callable[[Request], bytes], more: Callable[[Request], bytes], pause: float = 0.0) -> Way:
    """Return a way that begins a stream and, once the agent has an event of it, sends more without end."""

    async def way(request: Request) -> None:
        await request.send(begin(request))
        if request.streamed and not pause:
            await until_heard(request)
        while True:
            await request.send(more(request))
            await asyncio.sleep(pause)

    return way


async def a_reply_without_end(request: Request) -> None:
    await request.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n")
    while True:
        await request.send(_ENDLESS)


async def half_a_stream_then_resets(request: Request) -> None:
    await request.send(half_chunked(request))
    await until_heard(request)  # what was sent before RST may be lost with it
    request.reset()


def first(request: Request) -> bytes:
    return UNTIL_CLOSED + request.frames()[0]


def half(request: Request) -> bytes:
    return UNTIL_CLOSED + b"".join(request.frames()[:3])


async def half_then_silence(request: Request) -> None:
    await request.send(half(request))
    await request.until_left()


def garbage(request: Request) -> bytes:
    return CHUNKED + chunked([*request.frames()[:3], b"data: 0101\n\n", *request.frames()[3:]])


BUSY = b'{"error": {"message": "busy"}}'
COMMENT = b": still here\n\n"
OUT_OF_MEMORY = b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'


@dataclass(frozen=True)
class Fault:
    """One row: a way to fail, and the calls that it is tried with."""

    name: str
    way: Way | None
    """None is a server that does not listen."""
    plain: bool = True
    short: bool = False
    """Tried with little time for a call."""


FAULTS = (
    Fault("returns 500", answers(500)),
    Fault("returns 400", answers(400)),
    Fault("returns 429 each time", answers(429)),
    Fault("returns 503 each time", answers(503)),
    Fault("returns 503 once", sends(lambda r: r.good() if r.repeated else whole(503, BUSY))),
    Fault("does not listen", None),
    Fault("closes before the first byte", sends(lambda _: b"")),
    Fault("resets before the first byte", resets_without_a_byte),
    Fault("does not speak HTTP", sends(lambda _: b"220 mail.example.org ready\r\n")),
    Fault("returns a web page", answers(200, b"<html>It works!</html>")),
    Fault("returns other JSON", answers(200, b'{"hello": ["world"]}')),
    Fault("returns an empty body", answers(200, b"")),
    Fault("returns half a reply", sends(half_whole)),
    Fault("returns an endless reply", a_reply_without_end),
    Fault("returns a complete reply late", late),
    Fault("returns a complete reply without token ids", sends(lambda r: r.good(tokens=False))),
    Fault("sends nothing", silent, short=True),
    Fault("sends a stream without frames", streams(frames=slice(0)), plain=False),
    Fault("sends half a stream, ends it properly", streams(head=UNTIL_CLOSED), plain=False),
    Fault("sends half a stream, then closes", sends(half_chunked), plain=False),
    Fault("sends half a stream, then resets", half_a_stream_then_resets, plain=False),
    Fault("sends half a frame", sends(lambda r: UNTIL_CLOSED + b"".join(r.frames()[:3])[:-20]), plain=False),
    Fault("sends garbage in the stream", sends(garbage), plain=False),
    Fault("sends an error in the stream", streams(OUT_OF_MEMORY), plain=False),
    Fault("sends half a stream, then nothing", half_then_silence, plain=False, short=True),
    Fault("sends half a stream, then only comments", endless(half, lambda _: COMMENT, 0.05), plain=False, short=True),
    Fault("sends an endless stream", endless(first, lambda r: r.frames()[1] * 64), plain=False),
    Fault("sends an endless frame", endless(lambda r: first(r) + b"data: ", lambda _: b"x" * 4096), plain=False),
    Fault("sends a complete stream without `[DONE]`", streams(frames=slice(-1), head=UNTIL_CLOSED), plain=False),
)


# --- how agents call ----------------------------------------------------------------------------------------------

CALLERS = {"openai chat": "chat/completions", "openai responses": "responses", "anthropic messages": "messages"}
"""The route of each caller."""


async def call(agent: Agent, streamed: bool, model: str, words: str) -> str:
    """Send these words to a model by the agent's library and return the whole text."""
    fields = {"model": model, **agent.says(words)}
    if isinstance(agent, TextAgent):  # its library puts no stream together
        return "".join([piece async for piece in agent.pieces(**fields)])
    return agent.text(await agent.whole(streamed, lambda: HEARD.add(words), **fields))


# --- what became of a call ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """One call of the table."""

    fault: str
    caller: str
    streamed: bool
    states: tuple[str, ...]
    """States of all calls recorded for the attempt."""
    raised: BaseException | None
    text: str
    """Text that the agent got, if it got all of it."""
    seconds: float
    spans: tuple[Span, ...]

    @property
    def heard(self) -> str:
        """Return what the agent saw: the library's error, or `the reply`."""
        return "the reply" if self.raised is None else type(self.raised).__name__

    def triplets(self) -> list[list[Triplet]]:
        """Return the calls that each adapter would have trained on."""
        return [adapter.read(self.spans).triplets for adapter in (TracerTraceToTriplet(), LlmProxyTraceToTriplet())]


async def outcomes(faults: tuple[Fault, ...] = FAULTS) -> list[Outcome]:
    """Make every call of the table."""
    ways = {fault.name: fault.way for fault in faults if fault.way is not None}
    with FaultyEngine(ways) as engine, _ClosedPort() as nobody:
        entries = [*engine.entries, *(_entry(fault.name, nobody) for fault in faults if fault.way is None)]
        async with (
            GatewayHarness(model_list=entries, limits=_LIMITS) as harness,
            GatewayHarness(model_list=entries, limits=_SHORT_LIMITS) as short_desk,
            AsyncExitStack() as clients,
        ):
            agents = {caller: AGENTS[route](harness, timeout=60.0) for caller, route in CALLERS.items()}
            for agent in agents.values():
                await clients.enter_async_context(agent.client)
            cases = [
                (fault, caller, streamed)
                for fault in faults
                for caller in CALLERS
                for streamed in ((False, True) if fault.plain else (True,))
            ]
            others = [_outcome(harness, agents[case[1]], *case) for case in cases if not case[0].short]
            made = await asyncio.gather(*others)
            made += await asyncio.gather(
                *(_outcome(short_desk, agents[case[1]], *case) for case in cases if case[0].short)
            )
            order = [(fault.name, caller, streamed) for fault, caller, streamed in cases]
            return sorted(made, key=lambda one: order.index((one.fault, one.caller, one.streamed)))


async def _outcome(harness: GatewayHarness, like: Agent, fault: Fault, caller: str, streamed: bool) -> Outcome:
    attempt, raised, text = await harness.attempt(), None, ""
    agent, began = type(like)(harness, attempt, like=like), time.monotonic()
    try:
        text = await asyncio.wait_for(call(agent, streamed, fault.name, attempt.rollout_id), 60.0)
    except Exception as error:  # the point of the table: which one it is
        raised = error
    seconds, spans = time.monotonic() - began, await harness.spans(attempt)
    states = tuple(await harness.states(attempt))
    return Outcome(fault.name, caller, streamed, states, raised, text, seconds, tuple(spans))


class _ClosedPort:
    """A port that is bound without a listener, so that no other program takes it."""

    def __enter__(self) -> int:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        return self._socket.getsockname()[1]

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def _entry(name: str, port: int) -> Any:
    return {"model_name": name, "litellm_params": {"model": name, "api_base": f"http://127.0.0.1:{port}/v1"}}


# --- as a page shows it -------------------------------------------------------------------------------------------


def table(outcomes: list[Outcome]) -> str:
    """Return the outcomes as a table in Markdown: one line per fault, two where plain and streamed calls differ."""
    lines = [
        "| The engine | Call | Recorded as | `openai` raises | `anthropic` raises |",
        "| --- | --- | --- | --- | --- |",
    ]
    for fault in dict.fromkeys(outcome.fault for outcome in outcomes):
        cells = {
            streamed: _cells([o for o in outcomes if (o.fault, o.streamed) == (fault, streamed)])
            for streamed in (False, True)
        }
        if cells[False] == cells[True]:
            lines.append(f"| {fault} | both | {cells[True]} |")
        else:
            lines += [
                f"| {fault} | {'streamed' if streamed else 'plain'} | {cells[streamed]} |"
                for streamed in (False, True)
                if cells[streamed]
            ]
    return "\n".join(lines)


def _cells(outcomes: list[Outcome]) -> str:
    if not outcomes:
        return ""
    states = {state for outcome in outcomes for state in outcome.states}
    names_by_library = [
        {o.heard for o in outcomes if o.caller.startswith(library)} for library in ("openai", "anthropic")
    ]
    return " | ".join(", ".join(_marked(name) for name in sorted(names)) for names in (states, *names_by_library))


def _marked(name: str) -> str:
    return name if name == "the reply" else f"`{name}`"


if __name__ == "__main__":
    print(table(asyncio.run(outcomes())))
