"""Streams through the gateway: frames as they come, the record beside them, and every way in which one can break."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from agentlightning.types import AttemptedRollout
from tests.llm_proxy.harness import GatewayHarness, GatewayProcess, arrived, until
from tests.stubs.faulty_engine import CHUNKED, FaultyEngine, Request, chunked
from tests.stubs.model_replies import chat_frames
from tests.stubs.model_server import Fault, ModelServer, encode, logprobs_of

Json = dict[str, Any]
TEXT = "one two three four five six"


@pytest.fixture
async def harness() -> Any:
    async with GatewayHarness(ModelServer(answer=lambda request: TEXT)) as ready:
        yield ready


def body(words: str, **fields: Any) -> Json:
    return {"model": "policy", "messages": [{"role": "user", "content": words}], "stream": True, **fields}


async def test_a_stream_reaches_the_agent_without_our_fields_and_the_record_has_every_token(
    harness: GatewayHarness,
) -> None:
    async with harness.session.post(harness.url(), json=body("go")) as reply:
        assert (reply.status, reply.content_type) == (200, "text/event-stream")
        *frames, done = [frame for frame in (await reply.text()).split("\n\n") if frame]
    assert done == "data: [DONE]"
    choices = [choice for frame in frames for choice in json.loads(frame[6:])["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == TEXT
    assert "token_ids" not in "".join(frames)
    assert all(choice.get("logprobs") is None for choice in choices)
    (call,) = await harness.raw()
    assert (call["state"], call["streamed"], call["finish_reason"]) == ("ok", True, "stop")
    assert call["completion_token_ids"] == encode(TEXT)
    assert call["completion_logprobs"] == logprobs_of(encode(TEXT))
    assert call["prompt_token_ids"] == encode("user go assistant")
    assert 0 <= call["first_frame_seconds"] <= call["latency_seconds"]
    (parent,) = [span for span in await harness.spans() if span.name == "litellm_request"]
    assert parent.attributes["gen_ai.completion.0.content"] == TEXT
    assert parent.attributes["llm.is_streaming"] == "True"


async def test_frames_to_which_nothing_was_added_pass_untouched(harness: GatewayHarness) -> None:
    odd = b'data:   {"id": "x",  "choices":[{"index":0,"delta":{"content":"h\\u00e9"},"finish_reason":null}]}\r\n\r\n'
    end = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n'
    sent = b": a comment\n\n" + odd + end + b"data: [DONE]\n\n"
    harness.model.faults = [Fault(body=sent, headers={"Content-Type": "text/event-stream"})]
    async with harness.session.post(harness.url(), json=body("go")) as reply:
        assert await reply.read() == sent


# --- many at once ----------------------------------------------------------------------------------------------------


STREAMS = 200
WORDS = 10


def sentence(request: dict[str, Any]) -> str:
    """Answer with the agent's word and the numbers from 0 on, so that any swap would show."""
    word = request["messages"][0]["content"]
    return " ".join(f"{word}-{number}" for number in range(WORDS))


async def attempts_for_all(harness: GatewayHarness) -> list[AttemptedRollout]:
    """Return an attempt for each stream; ten streams share one."""
    few = [await harness.attempt() for _ in range(STREAMS // 10)]
    return [few[index % len(few)] for index in range(STREAMS)]


def agents() -> aiohttp.ClientSession:
    """Return a client for all agents, each with a connection of its own."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=2**14)


async def test_two_hundred_streams_at_once_reach_their_agents_byte_for_byte() -> None:
    async with GatewayHarness(ModelServer(answer=sentence)) as harness, agents() as session:
        attempts = await attempts_for_all(harness)
        harness.model.hold_frames(3)

        async def one(index: int) -> bytes:
            request_body = body(f"w{index}", return_token_ids=True, logprobs=True)
            async with session.post(harness.url(of=attempts[index]), json=request_body) as reply:
                return await reply.read()

        streams = [asyncio.create_task(one(index)) for index in range(STREAMS)]
        await harness.model.until(arrived(STREAMS), timeout=60.0)
        assert harness.proxy.stats()["in_hand"] == STREAMS
        harness.model.release()
        got = await asyncio.gather(*streams)
        replies = {exchange.request["messages"][0]["content"]: exchange for exchange in harness.model.calls}
        for index, raw in enumerate(got):
            sent = replies[f"w{index}"]
            assert sent.reply is not None
            assert raw == b"".join(chat_frames(sent.reply, sent.request)), index
        for attempt in {attempt.rollout_id: attempt for attempt in attempts}.values():
            calls = await harness.raw(attempt)
            assert [call["state"] for call in calls] == ["ok"] * 10
            recorded = {tuple(call["completion_token_ids"]) for call in calls}
            own = [index for index in range(STREAMS) if attempts[index].rollout_id == attempt.rollout_id]
            assert recorded == {tuple(encode(sentence({"messages": [{"content": f"w{i}"}]}))) for i in own}
        assert harness.proxy.stats()["in_hand"] == 0


async def test_agents_that_leave_at_random_disturb_nobody_and_leave_nothing_behind() -> None:
    chance = random.Random(5)
    leaves_after = {index: chance.randrange(0, 6) for index in chance.sample(range(STREAMS), STREAMS // 2)}
    async with GatewayHarness(ModelServer(answer=sentence)) as harness, agents() as session:
        attempts = await attempts_for_all(harness)
        harness.model.hold_frames(8)

        async def one(index: int) -> bytes | None:
            async with session.post(harness.url(of=attempts[index]), json=body(f"w{index}")) as reply:
                if index not in leaves_after:
                    return await reply.read()
                for _ in range(leaves_after[index]):
                    await reply.content.readuntil(b"\n\n")
                reply.close()
                return None

        streams = [asyncio.create_task(one(index)) for index in range(STREAMS)]
        count = len(leaves_after)
        await until(lambda: harness.proxy.stats()["calls"].get("client_left", 0) == count)
        harness.model.release()
        got = await asyncio.gather(*streams)
        assert [index for index, raw in enumerate(got) if raw is None] == sorted(leaves_after)
        assert all(raw.endswith(b"data: [DONE]\n\n") for raw in got if raw is not None)
        await until(lambda: harness.proxy.stats()["in_hand"] == 0)
        assert harness.proxy.stats()["in_flight"] == 0
        states = Counter[str]()
        for attempt in {attempt.rollout_id: attempt for attempt in attempts}.values():
            calls = await harness.raw(attempt)
            states.update(call["state"] for call in calls)
            assert all(("completion_token_ids" in call) == (call["state"] == "ok") for call in calls)
        assert states == {"ok": STREAMS - count, "client_left": count}


_PADDING = b": " + b"." * 8190 + b"\n\n"
_PADS = 640  # five mebibytes for each stream, so that what the buffers of 200 streams take is little beside it


async def padded(request: Request) -> None:
    """Stream a reply among many comments, which the gateway passes on and does not record."""
    frames = request.frames()
    await request.send(CHUNKED + chunked([frames[0], *[_PADDING] * _PADS, *frames[1:]]))


@pytest.mark.heavy
async def test_agents_that_do_not_read_hold_the_engine_back_and_not_the_gateways_memory(tmp_path: Path) -> None:
    limits = tmp_path / "limits.json"
    limits.write_text('{"limits": {"calls_per_attempt": 1000}}')
    with FaultyEngine({"policy": padded}) as engine:
        gateway = GatewayProcess(tmp_path, f"http://127.0.0.1:{engine.port}/v1", "--config", str(limits))
        url = await gateway.start()
        try:
            memory = psutil.Process(gateway.process.pid)
            before = memory.memory_info().rss
            async with agents() as session:
                requests = [session.post(f"{url}/v1/chat/completions", json=body(f"w{i}")) for i in range(STREAMS)]
                replies = await asyncio.gather(*requests)
                grown = memory.memory_info().rss - before
                lengths = [len(await reply.read()) for reply in replies]
            assert set(lengths) == {max(lengths)}
            assert min(lengths) > _PADS * len(_PADDING)
            highest = max(grown, memory.memory_info().rss - before)
            assert highest < sum(lengths) / 2, f"{highest / 2**20:.0f} MiB more for {STREAMS} streams"
        finally:
            await gateway.end()
