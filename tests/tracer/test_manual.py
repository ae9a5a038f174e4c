"""Traces that are opened and closed by hand: with and without a store, and what is misuse."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.types import Span, TraceStatus


def by_hand(tracer: agl.OtelTracer, rollout_id: str | None = None, attempt_id: str | None = None) -> None:
    tracer.open_rollout(rollout_id, user_id="user-123")
    tracer.open_attempt(attempt_id, sequence_id=1)
    tracer.emit_span("tool_execution", {"tool": "search", "found": {"pages": 3}}, TraceStatus(status_code="ERROR"))
    with agl.operation(name="rank"):
        pass
    agl.emit_reward(0.5)
    tracer.close_attempt()
    tracer.close_rollout()


def check(spans: Any, rollout_id: str, attempt_id: str) -> None:
    assert [span.name.rpartition(".")[2] for span in spans] == ["tool_execution", "operation", "annotation"]
    assert {(span.rollout_id, span.attempt_id) for span in spans} == {(rollout_id, attempt_id)}
    tool: Span = spans[0]
    assert tool.status.status_code == "ERROR"
    expected = {"user_id": "user-123", "attempt.sequence_id": 1, "tool": "search", "found.pages": 3}
    assert tool.attributes == expected
    assert agl.find_final_reward(spans) == 0.5


def test_without_a_store_the_spans_are_kept() -> None:
    tracer = agl.OtelTracer(rollout_id="ro-001", attempt_id="at-001", store_client=None)
    with tracer.lifespan():
        by_hand(tracer)
        check(tracer.get_last_trace(), "ro-001", "at-001")
        by_hand(tracer, "ro-001", "at-001")
    assert agl.get_active_tracer() is None


def test_a_tracer_that_nobody_initialised_is_so_for_the_rollout() -> None:
    tracer = agl.OtelTracer()
    for rollout_id in ("ro-001", "ro-002"):
        by_hand(tracer, rollout_id, "at-001")
        check(tracer.get_last_trace(), rollout_id, "at-001")


async def test_the_spans_reach_a_store_of_this_process_also_while_a_loop_runs() -> None:
    store = agl.InMemoryLightningStore()
    claimed = await store.start_rollout("x")
    tracer = agl.OtelTracer(store, rollout_id=claimed.rollout_id)
    by_hand(tracer)
    check(await store.query_spans(claimed.rollout_id), claimed.rollout_id, claimed.attempt.attempt_id)
    assert [span.sequence_id for span in tracer.get_last_trace()] == [1, 2, 3]
    running = await store.get_rollout_by_id(claimed.rollout_id)
    assert running is not None
    assert running.status == "running"


async def test_the_spans_reach_a_store_behind_a_server(server: agl.LightningStoreServer) -> None:
    client = agl.LightningStoreClient(endpoint=server.endpoint)
    claimed = await client.start_rollout("x")
    tracer = agl.OtelTracer(store_client=client)
    await asyncio.to_thread(by_hand, tracer, claimed.rollout_id, claimed.attempt.attempt_id)
    check(await client.query_spans(claimed.rollout_id), claimed.rollout_id, claimed.attempt.attempt_id)
    await client.close()


async def test_what_the_store_does_not_know_is_told_at_once() -> None:
    store = agl.InMemoryLightningStore()
    queued, claimed = await store.enqueue_rollout("x"), await store.start_rollout("y")
    tracer = agl.OtelTracer(store)
    with pytest.raises(agl.NotFoundError, match=r"ro-001 not found.*await store\.start_rollout"):
        tracer.open_rollout("ro-001")
    tracer.open_rollout(queued.rollout_id)
    with pytest.raises(agl.NotFoundError, match=r"it has none; await store\.start_attempt"):
        tracer.open_attempt()
    tracer.close_rollout()
    tracer.open_rollout(claimed.rollout_id)
    with pytest.raises(agl.NotFoundError, match=f"at-001 not found.*it has {claimed.attempt.attempt_id}"):
        tracer.open_attempt("at-001")
    with pytest.raises(agl.BadRequestError, match="has the sequence_id 1, not 2"):
        tracer.open_attempt(sequence_id=2)
    tracer.close_rollout()


async def test_spans_that_the_store_does_not_take_are_kept_and_told_of() -> None:
    store = agl.InMemoryLightningStore()
    claimed = await store.start_rollout("x")
    tracer = agl.OtelTracer(store)
    tracer.open_rollout(claimed.rollout_id)
    tracer.open_attempt()
    tracer.emit_span("tool_execution")
    await store.delete_rollouts(rollout_ids=[claimed.rollout_id], force=True)
    with pytest.raises(RuntimeError, match=r"1 span of rollout .* not delivered"):
        tracer.close_attempt()
    tracer.close_rollout()
    with tracer.lifespan():
        assert [span.name for span in tracer.get_last_trace()] == ["tool_execution"]


# --- misuse ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda tracer: tracer.open_attempt("at-001"), r"open_attempt\(\): no rollout is open.*open_rollout\(rollout"),
        (lambda tracer: tracer.emit_span("x"), r"emit_span\(\): no rollout is open"),
        (lambda tracer: tracer.close_attempt(), r"close_attempt\(\): no rollout is open"),
        (lambda tracer: tracer.close_rollout(), r"close_rollout\(\): no rollout is open"),
        (lambda tracer: tracer.open_rollout(), r"needs a rollout_id.*start_rollout"),
    ],
)
def test_without_a_rollout_there_is_nothing_to_do(call: Callable[[Any], None], message: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=message):
        call(agl.OtelTracer())


def test_things_are_opened_and_closed_in_order() -> None:
    tracer = agl.OtelTracer()
    tracer.open_rollout("ro-001")
    for call, message in (
        (lambda: tracer.open_rollout("ro-002"), "ro-001 is already open; call close_rollout"),
        (lambda: tracer.emit_span("x"), r"no attempt is open here; call open_attempt\("),
        (lambda: tracer.close_attempt(), "no attempt is open here"),
        (lambda: tracer.open_attempt(), "open_attempt needs an attempt_id: without a store"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=message):
            call()
    tracer.open_attempt("at-001")
    with pytest.raises(RuntimeError, match="at-001 is already open; call close_attempt"):
        tracer.open_attempt("at-002")
    with pytest.raises(RuntimeError, match="at-001 is still open; call close_attempt"):
        tracer.close_rollout()
    assert copy.deepcopy(tracer)._opened is None
    tracer.close_attempt()
    tracer.close_rollout()
    assert pickle.loads(pickle.dumps(tracer)).rollout_id is None


async def test_a_tracer_that_was_made_for_a_rollout_is_for_no_other() -> None:
    store = agl.InMemoryLightningStore()
    claimed, other = await store.start_rollout("x"), await store.start_rollout("y")
    tracer = agl.OtelTracer(store, rollout_id=claimed.rollout_id, attempt_id=claimed.attempt.attempt_id)
    with pytest.raises(ValueError, match=f"accepts only rollout_id='{claimed.rollout_id}'; got 'ro-002'"):
        tracer.open_rollout("ro-002")
    with tracer.lifespan():
        with pytest.raises(ValueError, match="accepts only rollout_id="):
            async with tracer.trace_context(rollout_id=other.rollout_id, attempt_id=other.attempt.attempt_id):
                raise AssertionError("not reached")
        async with tracer.trace_context("as it was made"):
            agl.emit_annotation({"a": 1})
    assert len(await store.query_spans(claimed.rollout_id, claimed.attempt.attempt_id)) == 1
    with pytest.raises(TypeError, match="the same setting"):
        agl.OtelTracer(store, store_client=agl.InMemoryLightningStore())
