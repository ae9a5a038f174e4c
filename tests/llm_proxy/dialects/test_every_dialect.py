"""Rules of every dialect, tested with the library of the agent: streams, their ends, refusals, native servers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import anthropic
import openai
import pytest

from tests.llm_proxy.agents import AGENTS, Agent, TextAgent
from tests.llm_proxy.harness import GatewayHarness, until
from tests.stubs.model_server import Fault, encode, logprobs_of

SSE = {"Content-Type": "text/event-stream"}


@pytest.fixture(params=AGENTS)
async def agent(request: pytest.FixtureRequest, harness: GatewayHarness) -> AsyncGenerator[Agent, None]:
    made = AGENTS[request.param](harness)
    async with made.client:
        yield made


async def test_a_reply_is_read_by_the_library_and_recorded_with_the_engines_tokens(agent: Agent) -> None:
    reply = await agent.ask(**agent.says("hi there"))
    assert agent.text(reply) == "you said hi there"
    attributes, call = await agent.recorded()
    assert attributes["gen_ai.response.id"] == reply.id
    words = [attributes[f"gen_ai.{part}.0.content"] for part in ("prompt", "completion")]
    assert words == ["hi there", "you said hi there"]
    prompt = "hi there" if isinstance(agent, TextAgent) else "user hi there assistant"
    assert call["prompt_token_ids"] == encode(prompt)
    assert call["completion_token_ids"] == encode("you said hi there")
    assert call["completion_logprobs"] == logprobs_of(encode("you said hi there"))
    assert isinstance(agent, AGENTS[call["dialect"]])
    assert (call["state"], call["finish_reason"], call["http_status"], call["upstream_tries"]) == ("ok", "stop", 200, 1)
    assert call["weight_version"] == 0
    assert call["latency_seconds"] > 0


async def test_the_first_words_come_before_the_last_are_made(agent: Agent) -> None:
    agent.harness.model.answer = lambda request: "one two three"
    agent.harness.model.hold_frames(2)
    pieces = agent.pieces()
    first = await anext(pieces)
    assert first == "one"
    assert await agent.harness.raw() == []
    agent.harness.model.release()
    assert "".join([first, *[piece async for piece in pieces]]) == "one two three"
    assert await agent.harness.states() == ["ok"]


CHAT = b'data: {"id": "x", "choices": [{"index": 0, "delta": {"content": "ha"}, "finish_reason": null}]}\n\n'
TEXT = b'data: {"id": "x", "choices": [{"index": 0, "text": "ha", "finish_reason": null}]}\n\n'
BREAKS: dict[str, tuple[bytes, Any]] = {
    "ends early": (b"", ""),
    "ends within a frame": (b'data: {"id": "x", "cho', ""),
    "garbage": (b"data: not json\n\n", ""),
    "error in the stream": (b'data: {"error": {"message": "out of memory", "code": 500}}\n\n', ""),
    "cut": (CHAT * 2, "middle"),
}


@pytest.mark.parametrize("case", BREAKS)
async def test_a_stream_that_breaks_is_the_librarys_own_error_and_recorded_as_broken(agent: Agent, case: str) -> None:
    rest, cut = BREAKS[case]
    half = TEXT if isinstance(agent, TextAgent) else CHAT
    agent.harness.model.faults = [Fault(body=half + rest, headers=SSE, cut=cut)]
    pieces: list[str] = []

    async def read() -> None:
        async for piece in agent.pieces():
            pieces.append(piece)

    with pytest.raises((openai.APIError, anthropic.APIStatusError), match="model server"):
        await read()
    text = "".join(pieces)
    assert text.startswith("ha")
    attributes, call = await agent.recorded()
    assert (call["state"], attributes["gen_ai.completion.0.content"]) == ("upstream_error", text)
    assert "completion_token_ids" not in call
    assert len(agent.harness.model.calls) == 1


async def test_an_agent_that_leaves_in_the_middle_leaves_a_span_that_says_so(agent: Agent) -> None:
    agent.harness.model.answer = lambda request: "one two three four"
    agent.harness.model.hold_frames(3)
    async with contextlib.aclosing(agent.pieces()) as pieces:
        await anext(pieces)
    await until(lambda: sum(agent.harness.proxy.stats()["calls"].values()) == 1)
    attributes, call = await agent.recorded()
    assert (call["state"], call["http_status"]) == ("client_left", 499)
    assert "completion_token_ids" not in call
    assert attributes["gen_ai.completion.0.content"].startswith("one")


REFUSALS: list[tuple[str, int, Any, str]] = [
    ("messages", 400, anthropic.BadRequestError, "invalid_request_error"),
    ("messages", 401, anthropic.AuthenticationError, "authentication_error"),
    ("messages", 403, anthropic.PermissionDeniedError, "permission_error"),
    ("messages", 404, anthropic.NotFoundError, "not_found_error"),
    ("messages", 413, anthropic.APIStatusError, "request_too_large"),
    ("messages", 422, anthropic.UnprocessableEntityError, "invalid_request_error"),
    ("messages", 500, anthropic.InternalServerError, "api_error"),
    ("messages", 529, anthropic.OverloadedError, "overloaded_error"),
    ("responses", 400, openai.BadRequestError, "stub"),
    ("responses", 500, openai.InternalServerError, "stub"),
]


@pytest.mark.parametrize(("route", "status", "error", "kind"), REFUSALS)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_servers_refusal_is_the_librarys_own_error(
    harness: GatewayHarness, route: str, status: int, error: Any, kind: str, stream: bool
) -> None:
    agent = AGENTS[route](harness)
    harness.model.faults = [Fault(status)]
    async with agent.client:
        with pytest.raises(error, match=f"told to answer {status}") as caught:
            await agent.ask(stream=stream)
    assert (caught.value.status_code, caught.value.type) == (status, kind)
    assert await harness.states() == ["upstream_error"]


@pytest.mark.parametrize("route", ["messages", "responses"])
async def test_a_native_stream_passes_frame_by_frame(harness: GatewayHarness, route: str) -> None:
    harness.proxy.update_model_list([harness.model.entry("policy", dialects=[route])])
    body = {"model": "policy", "stream": True, **AGENTS[route].defaults}
    read: list[bytes] = []
    for url in (harness.url(f"/v1/{route}"), f"{harness.model.base_url}/{route}"):
        async with harness.session.post(url, json=body) as reply:
            read.append(await reply.read())
    first, second = ((exchange.reply or {})["id"].encode() for exchange in harness.model.calls)
    assert read[0].replace(first, second) == read[1]
