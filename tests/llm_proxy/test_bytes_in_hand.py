"""The bytes of requests that the gateway holds: bounded for each attempt, counted as they arrive, and given back."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from agentlightning.adapter.calls.calls import model_calls
from agentlightning.adapter.calls.refusals import refused_for_good
from agentlightning.llm_proxy import GatewayLimits
from agentlightning.llm_proxy.access import bodies
from agentlightning.types import AttemptedRollout
from agentlightning.utils.http.byte_budget import PROCESS
from tests.llm_proxy.harness import GatewayHarness, arrived, until
from tests.stubs.raw_http import Answer, read_answer, request

MIB = 2**20
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def begun(harness: GatewayHarness, attempt: AttemptedRollout, size: int) -> Connection:
    """Send a part of a body whose rest does not come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", harness.proxy.server_launcher.port)
    path = "/" + harness.url(attempt).split("/", 3)[3]
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
        status, _ = await harness.ask(other, "x" * (2 * MIB))
        assert status == 200
        for _, writer in connections:
            writer.transport.abort()
        await asyncio.gather(*waiting, return_exceptions=True)
        await until(lambda: PROCESS.held == 0)
        assert (await harness.ask(greedy, "x" * (2 * MIB)))[0] == 200
        assert await harness.states(greedy) != []


@pytest.mark.parametrize("keep", ["all", "counts"])
async def test_a_call_without_room_for_its_bytes_is_made_up_for_by_the_clients_retry(keep: Any) -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed")
    limits = GatewayLimits(bytes_per_attempt=6 * MIB)
    async with GatewayHarness(limits=limits, keep=keep) as harness:
        attempt = await harness.attempt()
        client = openai.AsyncOpenAI(base_url=harness.url(attempt, "/v1"), api_key="none", max_retries=20)
        harness.model.hold()

        async def ask(word: str) -> object:
            messages: Any = [{"role": "user", "content": word + "x" * 2 * MIB}]
            return await client.chat.completions.create(model="policy", messages=messages)

        calls = [asyncio.create_task(ask(word)) for word in ("one", "two", "three", "four")]
        await until(lambda: harness.proxy.stats()["calls"].get("refused"))
        harness.model.release()
        await asyncio.gather(*calls)
        await client.close()
        recorded = model_calls(await harness.spans(attempt))
        assert [call.state for call in recorded].count("ok") == 4
        assert "refused" in [call.state for call in recorded]
        assert refused_for_good(recorded) == []


async def test_a_call_without_room_for_its_bytes_is_not_made_up_for_by_another_call() -> None:
    async with GatewayHarness(limits=GatewayLimits(bytes_per_attempt=6 * MIB)) as harness:
        attempt = await harness.attempt()
        harness.model.hold()
        first = asyncio.create_task(harness.ask(attempt, "one" + "x" * 4 * MIB))
        await harness.model.until(arrived(1))
        assert (await harness.ask(attempt, "two" + "x" * 4 * MIB))[0] == 429
        harness.model.release()
        assert (await first)[0] == 200
        assert (await harness.ask(attempt, "too" + "x" * 4 * MIB))[0] == 200
        assert [call.state for call in refused_for_good(model_calls(await harness.spans(attempt)))] == ["refused"]


async def test_a_body_is_held_until_its_call_is_recorded() -> None:
    async with GatewayHarness() as harness:
        attempt = await harness.attempt()
        harness.model.hold()
        body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "x" * MIB}]}).encode()
        call = asyncio.create_task(harness.post(harness.url(attempt), body))
        await harness.model.until(arrived(1))
        assert PROCESS.held == len(body)
        harness.model.release()
        assert (await call)[0] == 200
        await until(lambda: PROCESS.held == 0)


async def test_what_a_body_expands_to_is_held_and_one_alone_always_fits() -> None:
    async with GatewayHarness(limits=GatewayLimits(bytes_per_attempt=12 * MIB)) as harness:
        attempt = await harness.attempt()
        harness.model.hold()
        url = harness.url(attempt, "/completions")
        body = json.dumps({"model": "policy", "prompt": [1] * 500_000}).encode()  # 1.5 MB, 20 MB as a value
        call = asyncio.create_task(harness.post(url, body))
        await harness.model.until(arrived(1))
        assert PROCESS.held == 12 * MIB
        status, said = await harness.post(url, body)
        assert (status, said["error"]["code"]) == (429, "too_many_bytes")
        harness.model.release()
        assert (await call)[0] == 200
        await until(lambda: PROCESS.held == 0)
