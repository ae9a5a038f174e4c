"""A store that is slow, refuses or is down: an agent is never answered without its record."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from agentlightning.errors import NotFoundError
from agentlightning.llm_proxy import GatewayLimits
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import Span
from agentlightning.utils.server_launcher import PythonServerLauncherArgs
from tests.llm_proxy.harness import GatewayHarness, arrived, until


class TroubledStore(InMemoryLightningStore):
    """The memory store with faults before it: `errors` are raised one per `add_many_spans`, oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[Exception] = []
        self.adds = 0
        self.down = False
        self.may_add = asyncio.Event()
        self.may_add.set()

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        if self.down:
            raise ConnectionRefusedError("no store at 10.0.0.1")
        return await super().get_next_span_sequence_id(rollout_id, attempt_id)

    async def add_many_spans(self, spans: Sequence[Span]) -> list[Span]:
        self.adds += 1
        await self.may_add.wait()
        if self.errors:
            raise self.errors.pop(0)
        return await super().add_many_spans(spans)


async def test_the_reply_goes_out_after_its_spans_are_stored() -> None:
    store = TroubledStore()
    async with GatewayHarness(store=store, launch_mode="asyncio") as harness:
        store.may_add.clear()
        call = asyncio.create_task(harness.ask())
        await until(lambda: store.adds)
        assert harness.model.calls[0].reply is not None
        done, _ = await asyncio.wait({call}, timeout=0.1)
        assert not done  # the model has answered, the agent has not heard of it
        store.may_add.set()
        assert (await call)[0] == 200


async def test_a_passing_fault_of_the_store_costs_the_agent_nothing() -> None:
    store = TroubledStore()
    async with GatewayHarness(store=store) as harness:
        store.errors = [ConnectionResetError("once"), TimeoutError("twice")]
        assert (await harness.ask())[0] == 200
        assert await harness.states() == ["ok"]
        assert store.adds == 3
        assert harness.proxy.stats()["lost"] == 0


async def test_a_call_that_cannot_be_recorded_is_503_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    store = TroubledStore()
    async with GatewayHarness(store=store, limits=GatewayLimits(store_seconds=0.2)) as harness:
        attempt = await harness.attempt()
        store.errors = [ConnectionResetError("gone") for _ in range(99)]
        with caplog.at_level(logging.ERROR):
            status, body = await harness.ask(of=attempt)
        assert (status, body["error"]["code"]) == (503, "record_lost")
        assert "choices" not in body
        assert harness.proxy.stats()["lost"] == 1
        assert harness.proxy.stats()["calls"] == {}
    assert attempt.rollout_id in caplog.text


async def test_spans_that_the_store_calls_wrong_are_not_sent_again() -> None:
    store = TroubledStore()
    async with GatewayHarness(store=store) as harness:
        store.errors = [NotFoundError("no such rollout")]
        assert (await harness.ask())[0] == 503
        assert store.adds == 1


async def test_a_store_that_is_down_at_arrival_costs_no_inference(caplog: pytest.LogCaptureFixture) -> None:
    store = TroubledStore()
    async with GatewayHarness(store=store) as harness:
        store.down = True
        status, body = await harness.ask()
        assert (status, body["error"]["code"]) == (503, "store_unavailable")
        assert harness.model.calls == []
        store.down = False
        assert (await harness.ask())[0] == 200
    assert "ConnectionRefusedError" in caplog.text


async def test_a_store_that_hangs_is_not_waited_for_without_end() -> None:
    store = TroubledStore()
    async with GatewayHarness(store=store, launch_mode="asyncio", limits=GatewayLimits(store_seconds=0.2)) as harness:
        store.may_add.clear()
        assert (await harness.ask())[0] == 503
        assert harness.proxy.stats()["lost"] == 1


async def test_a_gateway_that_stops_in_the_middle_of_a_call_leaves_a_span_of_it() -> None:
    args = PythonServerLauncherArgs(launch_mode="thread", shutdown_timeout=0.1)
    async with GatewayHarness(launcher_args=args) as harness:
        harness.model.hold()
        call = asyncio.create_task(harness.ask())
        await harness.model.until(arrived(1))
        await harness.proxy.stop()
        assert (await call)[0] == 503
        assert await harness.states() == ["upstream_error"]
        assert harness.proxy.stats()["in_flight"] == 0


async def test_calls_in_progress_may_end_while_the_gateway_stops(harness: GatewayHarness) -> None:
    harness.model.hold()
    call = asyncio.create_task(harness.ask())
    await harness.model.until(arrived(1))
    stop = asyncio.create_task(harness.proxy.stop())
    harness.model.release()
    await stop
    assert (await call)[0] == 200
    assert await harness.states() == ["ok"]
