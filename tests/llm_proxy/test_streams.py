"""Streams through the gateway: frames as they come, the record beside them, and every way in which one can break."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentlightning.types import AttemptedRollout
from tests.llm_proxy.agents import ChatAgent
from tests.llm_proxy.harness import GatewayHarness
from tests.stubs.model_server import Fault, ModelServer, encode, logprobs_of

Json = dict[str, Any]
TEXT = "one two three four five six"


@pytest.fixture
async def harness() -> Any:
    async with GatewayHarness(ModelServer(answer=lambda request: TEXT)) as ready:
        yield ready


def _body(**fields: Any) -> Json:
    return {"model": "policy", "messages": [{"role": "user", "content": "go"}], "stream": True, **fields}


async def _read(harness: GatewayHarness, attempt: AttemptedRollout, **fields: Any) -> tuple[int, list[bytes]]:
    """Return the frames as the agent gets them."""
    async with harness.session.post(harness.url(attempt), json=_body(**fields)) as reply:
        raw = await reply.read()
        assert reply.content_type == ("text/event-stream" if reply.status == 200 else "application/json")
        return reply.status, [frame + b"\n\n" for frame in raw.split(b"\n\n") if frame]


def _chunks(frames: list[bytes]) -> list[Json]:
    return [json.loads(frame[6:]) for frame in frames if frame != b"data: [DONE]\n\n"]


def _text(chunks: list[Json]) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk.get("choices", []))


async def test_a_stream_reaches_the_agent_without_our_fields_and_the_record_has_every_token(
    harness: GatewayHarness,
) -> None:
    attempt = await harness.attempt()
    status, frames = await _read(harness, attempt)
    assert status == 200
    assert frames[-1] == b"data: [DONE]\n\n"
    chunks = _chunks(frames)
    assert _text(chunks) == TEXT
    assert "token_ids" not in b"".join(frames).decode()
    assert all(choice.get("logprobs") is None for chunk in chunks for choice in chunk["choices"])
    (call,) = await harness.raw(attempt)
    assert (call["state"], call["streamed"], call["finish_reason"]) == ("ok", True, "stop")
    assert call["completion_token_ids"] == encode(TEXT)
    assert call["completion_logprobs"] == logprobs_of(encode(TEXT))
    assert call["prompt_token_ids"] == encode("user go assistant")
    assert 0 <= call["first_frame_seconds"] <= call["latency_seconds"]
    (parent,) = [span for span in await harness.spans(attempt) if span.name == "litellm_request"]
    assert parent.attributes["gen_ai.completion.0.content"] == TEXT
    assert parent.attributes["llm.is_streaming"] == "True"


async def test_frames_to_which_nothing_was_added_pass_untouched(harness: GatewayHarness) -> None:
    odd = b'data:   {"id": "x",  "choices":[{"index":0,"delta":{"content":"h\\u00e9"},"finish_reason":null}]}\r\n\r\n'
    end = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n'
    body = b": a comment\n\n" + odd + end + b"data: [DONE]\n\n"
    harness.model.faults = [Fault(body=body, headers={"Content-Type": "text/event-stream"})]
    async with harness.session.post(harness.url(await harness.attempt()), json=_body()) as reply:
        assert await reply.read() == body


async def test_the_openai_library_reads_streams_and_tool_calls(harness: GatewayHarness) -> None:
    calls = [{"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}]
    harness.model.answer = lambda request: {"content": None, "tool_calls": calls}
    agent = ChatAgent(harness, await harness.attempt())
    async with agent.client:
        reply = await agent.whole(streamed=True)
    (call,) = reply.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    said, recorded = await agent.recorded()
    assert recorded["completion_token_ids"] == encode(json.dumps(calls))
    assert said["gen_ai.completion.0.tool_calls.0.arguments"] == '{"a": 1, "b": 2}'


async def test_a_server_that_cannot_stream_is_streamed_for(harness: GatewayHarness) -> None:
    harness.model.streams = False
    attempt = await harness.attempt()
    status, frames = await _read(harness, attempt)
    assert status == 200
    assert _text(_chunks(frames)) == TEXT
    (call,) = await harness.raw(attempt)
    assert call["completion_token_ids"] == encode(TEXT)


SSE = {"Content-Type": "text/event-stream"}


@pytest.mark.parametrize("fault", [Fault(400), Fault(body=b"", headers=SSE)], ids=["refused", "empty"])
async def test_a_stream_that_never_begins_is_an_ordinary_error(harness: GatewayHarness, fault: Fault) -> None:
    harness.model.faults = [fault]
    attempt = await harness.attempt()
    async with harness.session.post(harness.url(attempt), json=_body()) as reply:
        assert reply.status == (400 if fault.status == 400 else 502)
        assert "error" in await reply.json()
    assert await harness.states(attempt) == ["upstream_error"]
