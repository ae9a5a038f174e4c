"""OtelTracer: what runs inside a trace context is in the store when the context has ended."""

from __future__ import annotations

import asyncio
import copy
import logging
import pickle

import pytest
from opentelemetry import trace as trace_api

from agentlightning.emitter import emit_message, emit_reward, find_final_reward
from agentlightning.semconv import AGL_SPANS_CUT, LightningCutAttributes
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.otel import OtelTracer
from agentlightning.tracer.scope import spans_left_out
from agentlightning.types import AttemptedRollout, Span, TraceStatus

KEPT, LEFT_OUT = LightningCutAttributes.KEPT.value, LightningCutAttributes.LEFT_OUT.value


def ids(rollout: AttemptedRollout) -> dict[str, str]:
    return {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}


async def test_spans_are_stored_at_the_end_in_start_order(
    store: InMemoryLightningStore, tracer: OtelTracer, rollout: AttemptedRollout
) -> None:
    async with tracer.trace_context("trace", **ids(rollout)) as otel_tracer:
        with otel_tracer.start_as_current_span("outer"), otel_tracer.start_as_current_span("inner"):
            assert len(await store.query_spans(rollout.rollout_id)) == 0
    stored = await store.query_spans(rollout.rollout_id)
    assert [(span.sequence_id, span.name) for span in stored] == [(1, "outer"), (2, "inner")]
    assert stored[1].parent_id == stored[0].span_id
    assert (await store.get_latest_attempt(rollout.rollout_id)).status == "running"  # type: ignore[union-attr] -- it is there


async def test_the_last_trace_lists_spans_as_they_ended_with_the_numbers_of_the_store(
    tracer: OtelTracer, rollout: AttemptedRollout
) -> None:
    async with tracer.trace_context("trace", **ids(rollout)) as otel_tracer:
        with otel_tracer.start_as_current_span("outer"):
            otel_tracer.start_span("inner").end()
    assert [(span.name, span.sequence_id) for span in tracer.get_last_trace()] == [("inner", 2), ("outer", 1)]


async def test_without_ids_spans_stay_local(store: InMemoryLightningStore, tracer: OtelTracer) -> None:
    async with tracer.trace_context("local"):
        emit_message("one")
        emit_message("two")
    trace = tracer.get_last_trace()
    assert [(span.rollout_id, span.attempt_id, span.sequence_id) for span in trace] == [
        ("rollout-dummy", "attempt-dummy", 0),
        ("rollout-dummy", "attempt-dummy", 1),
    ]
    assert (await store.statistics()).get("total_spans") == 0


async def test_spans_outside_of_a_context_belong_to_nobody(
    store: InMemoryLightningStore, tracer: OtelTracer, rollout: AttemptedRollout
) -> None:
    async with tracer.trace_context("trace", **ids(rollout)):
        pass
    trace_api.get_tracer("somebody").start_span("later").end()
    assert tracer.get_last_trace() == []
    assert len(await store.query_spans(rollout.rollout_id)) == 0


async def test_a_span_that_outlives_its_context_is_not_given_to_the_next(
    store: InMemoryLightningStore, tracer: OtelTracer, rollout: AttemptedRollout
) -> None:
    async with tracer.trace_context("first", **ids(rollout)) as otel_tracer:
        late = otel_tracer.start_span("late")
    other = await store.start_rollout(input="other")
    async with tracer.trace_context("second", **ids(other)):
        late.end()
    assert len(await store.query_spans(rollout.rollout_id)) == len(await store.query_spans(other.rollout_id)) == 0


async def test_the_trace_of_a_failed_body_is_stored_too(
    store: InMemoryLightningStore, tracer: OtelTracer, rollout: AttemptedRollout
) -> None:
    async def body() -> None:
        async with tracer.trace_context("trace", **ids(rollout)):
            emit_message("before")
            raise KeyError("x")

    with pytest.raises(KeyError):
        await body()
    assert len(await store.query_spans(rollout.rollout_id)) == 1


async def test_the_trace_of_a_cancelled_body_is_stored_too(
    store: InMemoryLightningStore, tracer: OtelTracer, rollout: AttemptedRollout
) -> None:
    inside = asyncio.Event()

    async def body() -> None:
        async with tracer.trace_context("trace", **ids(rollout)):
            emit_message("before")
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await inside.wait()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert len(await store.query_spans(rollout.rollout_id)) == 1


async def test_ids_come_together(tracer: OtelTracer) -> None:
    with pytest.raises(ValueError, match="rollout_id and attempt_id must be either all provided or all None"):
        async with tracer.trace_context("trace", rollout_id="ro-1"):
            pass


async def test_ids_need_a_store() -> None:
    tracer = OtelTracer()
    with tracer.lifespan(), pytest.raises(ValueError, match="store is required to be initialized"):
        async with tracer.trace_context("trace", rollout_id="ro-1", attempt_id="at-1"):
            pass


async def test_a_store_given_to_the_context_is_deprecated_and_used(
    tracer: OtelTracer, rollout: AttemptedRollout, store: InMemoryLightningStore
) -> None:
    other = InMemoryLightningStore()
    theirs = await other.start_rollout(input="x")
    with pytest.warns(DeprecationWarning, match="pass the store to init_worker") as warned:
        async with tracer.trace_context("trace", store=other, **ids(theirs)):
            emit_message("there")
    assert warned[0].filename == __file__
    assert len(await other.query_spans(theirs.rollout_id)) == 1
    await other.close()


async def test_a_store_given_to_the_constructor_is_the_default(
    store: InMemoryLightningStore, rollout: AttemptedRollout
) -> None:
    tracer = OtelTracer(store=store)
    with tracer.lifespan():
        async with tracer.trace_context("trace", **ids(rollout)):
            emit_message("there")
    assert len(await store.query_spans(rollout.rollout_id)) == 1


def test_before_init_worker_the_error_says_what_to_call() -> None:
    tracer = OtelTracer()
    with pytest.raises(RuntimeError, match=r"TracerProvider is not initialized. Call init_worker\(\) first."):
        tracer.create_span("x")
    with pytest.raises(RuntimeError, match=r"LightningSpanProcessor is not initialized. Call init_worker\(\) first."):
        tracer.get_last_trace()


def test_a_tracer_pickles_before_and_after_use(tracer: OtelTracer) -> None:
    fresh: OtelTracer = pickle.loads(pickle.dumps(OtelTracer()))
    with fresh.lifespan():
        fresh.create_span("x")
    used = OtelTracer()
    used.init_worker(0)
    assert isinstance(pickle.loads(pickle.dumps(used)), OtelTracer)
    used.teardown_worker(0)


async def test_a_copy_of_a_tracer_shares_its_store(store: InMemoryLightningStore, rollout: AttemptedRollout) -> None:
    tracer = copy.deepcopy(OtelTracer(store=store))
    with tracer.lifespan():
        async with tracer.trace_context("trace", **ids(rollout)):
            emit_message("there")
    assert len(await store.query_spans(rollout.rollout_id)) == 1


async def test_an_operation_that_raises_is_recorded_once(tracer: OtelTracer) -> None:
    async with tracer.trace_context():
        with pytest.raises(ValueError, match="no"), tracer.operation_context("op"):
            raise ValueError("no")
    (span,) = tracer.get_last_trace()
    assert span.status == TraceStatus(status_code="ERROR", description="ValueError: no")
    assert [event.name for event in span.events] == ["exception"]


async def test_a_cancelled_operation_is_no_success(tracer: OtelTracer) -> None:
    async with tracer.trace_context():
        with pytest.raises(asyncio.CancelledError), tracer.operation_context("op"):
            raise asyncio.CancelledError
    assert tracer.get_last_trace()[0].status.status_code == "ERROR"


async def test_an_operation_keeps_the_times_it_is_given(tracer: OtelTracer) -> None:
    async with tracer.trace_context():
        with tracer.operation_context("op", {"a": 1}, start_time=1700000000.0, end_time=1700000002.5) as recording:
            recording.record_attributes({"b": {"deep": 1}})
            recording.record_status("OK")
    (span,) = tracer.get_last_trace()
    assert (span.start_time, span.end_time) == (1700000000.0, 1700000002.5)
    assert span.attributes == {"a": 1, "b": '{"deep": 1}'}
    assert span.status.status_code == "OK"


async def test_get_last_trace_is_a_copy(tracer: OtelTracer) -> None:
    async with tracer.trace_context():
        emit_message("x")
        tracer.get_last_trace().clear()
        assert len(tracer.get_last_trace()) == 1


async def test_a_trace_is_bounded_but_for_rewards(
    tracer: OtelTracer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentlightning.tracer.scope.MOST_SPANS", 2)
    with caplog.at_level(logging.WARNING):
        async with tracer.trace_context():
            for _ in range(4):
                emit_message("x")
            emit_reward(1.0)
    *_, reward, mark = trace = tracer.get_last_trace()
    assert (len(trace), find_final_reward([reward])) == (4, 1.0)
    assert (mark.name, mark.attributes) == (AGL_SPANS_CUT, {KEPT: 3, LEFT_OUT: 2})
    assert caplog.text.count("only rewards are kept") == 1


async def test_of_endless_rewards_the_last_one_is_kept(tracer: OtelTracer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.tracer.scope.MOST_SPANS", 2)
    async with tracer.trace_context():
        for value in range(50):
            emit_reward(float(value))
    trace = tracer.get_last_trace()
    assert (find_final_reward(trace), len(trace), spans_left_out(trace)) == (49.0, 5, 46)


def test_a_span_converted_once_keeps_the_fields_of_opentelemetry() -> None:
    tracer = OtelTracer()
    with tracer.lifespan(), tracer.operation_context("op", {"k": [1, 2]}) as recording:
        pass
    span = Span.from_opentelemetry(recording.get_otel_span(), "r", "a", 3)  # type: ignore[attr-defined] -- Otel's
    assert (span.rollout_id, span.attempt_id, span.sequence_id) == ("r", "a", 3)
    assert span.attributes == {"k": [1, 2]}
