"""Delivery: retried while the store is away, and never lost in silence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest
from typing_extensions import override

from agentlightning.emitter import emit_message, emit_reward
from agentlightning.errors import BadRequestError, BusyError
from agentlightning.store.client_server import LightningStoreClient
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.delivery import TraceDeliveryError
from agentlightning.tracer.otel import OtelTracer
from agentlightning.types import AttemptedRollout, Span

from .test_otel import ids


class Moody(InMemoryLightningStore):
    """A store that raises each of `moods` once before it takes spans."""

    def __init__(self, *moods: Exception) -> None:
        super().__init__()
        self.moods = list(moods)
        self.deliveries = 0

    @override
    async def add_many_spans(self, spans: Sequence[Span]) -> list[Span]:
        self.deliveries += 1
        if self.moods:
            raise self.moods.pop(0)
        return await super().add_many_spans(spans)


class Numberless(InMemoryLightningStore):
    """A store that has no numbers to give."""

    @override
    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        raise ConnectionError("away")


async def trace_on(store: InMemoryLightningStore, *messages: str) -> tuple[OtelTracer, AttemptedRollout]:
    rollout = await store.start_rollout(input="x")
    tracer = OtelTracer()
    with tracer.lifespan(store):
        async with tracer.trace_context("trace", **ids(rollout)):
            for message in messages:
                emit_message(message)
    return tracer, rollout


async def test_all_spans_go_in_one_delivery() -> None:
    store = Moody()
    _, rollout = await trace_on(store, *"abcdef")
    assert store.deliveries == 1
    assert len(await store.query_spans(rollout.rollout_id)) == 6


async def test_an_empty_trace_asks_nothing_of_the_store() -> None:
    store = Moody()
    await trace_on(store)
    assert store.deliveries == 0


async def test_a_store_that_is_away_for_a_moment_gets_the_spans_once() -> None:
    store = Moody(ConnectionError("away"), BusyError("full", retry_after=0.01))
    _, rollout = await trace_on(store, "a", "b")
    assert store.deliveries == 3
    assert len(await store.query_spans(rollout.rollout_id)) == 2


async def test_a_refusal_is_raised_at_the_end_of_the_context() -> None:
    store = Moody(BadRequestError("no"))
    with pytest.raises(TraceDeliveryError, match=r"1 span of rollout ro-.* BadRequestError: no"):
        await trace_on(store, "a")


async def test_an_unknown_rollout_is_a_refusal(store: InMemoryLightningStore, tracer: OtelTracer) -> None:
    with pytest.raises(TraceDeliveryError, match="NotFoundError"):
        async with tracer.trace_context("trace", rollout_id="ro-none", attempt_id="at-none"):
            emit_message("x")


async def test_the_exception_of_the_body_goes_before_a_failed_delivery(
    tracer: OtelTracer, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with tracer.trace_context("trace", rollout_id="ro-none", attempt_id="at-none"):
            emit_message("x")
            raise KeyError("mine")

    with pytest.raises(KeyError), caplog.at_level(logging.ERROR):
        await body()
    assert "not delivered" in caplog.text


async def test_a_store_that_stays_away_is_given_up_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OtelTracer, "store_unreachable_timeout", 0.2)
    store = Moody(*[ConnectionError("away")] * 100)
    with pytest.raises(TraceDeliveryError, match="ConnectionError: away") as raised:
        await trace_on(store, "a")
    assert raised.value.unanswered


async def test_a_long_trace_goes_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.tracer.delivery.BATCH", 4)
    store = Moody()
    tracer, _ = await trace_on(store, *"abcdefghij")
    assert store.deliveries == 3
    assert [span.sequence_id for span in tracer.get_last_trace()] == list(range(1, 11))


async def test_a_reward_without_a_number_is_stored_behind_the_calls(caplog: pytest.LogCaptureFixture) -> None:
    store = Numberless()
    rollout = await store.start_rollout(input="x")
    tracer = OtelTracer()
    with tracer.lifespan(store), caplog.at_level(logging.WARNING):
        async with tracer.trace_context("trace", **ids(rollout)):
            emit_reward(1.0)
    (reward,) = await store.query_spans(rollout.rollout_id)
    assert reward.sequence_id == 1
    assert "got no sequence_id" in caplog.text


async def test_over_http_rewards_lie_between_the_calls_of_async_and_sync_agents(client: LightningStoreClient) -> None:
    """The calls draw their numbers over HTTP as well, as the gateway's do at the earliest."""
    tracer = OtelTracer()
    loop = asyncio.get_running_loop()

    async def draw(rollout: AttemptedRollout) -> int:
        return await client.get_next_span_sequence_id(rollout.rollout_id, rollout.attempt.attempt_id)

    with tracer.lifespan(client):
        for in_thread in (False, True):
            rollout = await client.start_rollout(input="x")

            def sync_agent(rollout: AttemptedRollout = rollout) -> list[int]:
                def ask() -> int:
                    return asyncio.run_coroutine_threadsafe(draw(rollout), loop).result(10)

                first = ask()
                emit_reward(0.5)
                return [first, ask()]

            async with tracer.trace_context("trace", **ids(rollout)):
                if in_thread:
                    before, after = await asyncio.to_thread(sync_agent)
                else:
                    before = await draw(rollout)
                    emit_reward(0.5)
                    after = await draw(rollout)
            (reward,) = await client.query_spans(rollout.rollout_id)
            assert before < reward.sequence_id < after
