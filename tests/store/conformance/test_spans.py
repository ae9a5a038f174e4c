"""Spans on every store: storing them, their numbers, and their effect on an attempt."""

from __future__ import annotations

import asyncio
import logging

import pytest
from opentelemetry.sdk.trace import TracerProvider

from agentlightning.errors import NotFoundError
from agentlightning.semconv import STALE
from agentlightning.store.base import LightningStore
from agentlightning.types import RolloutConfig, Span
from tests.store.parts import required, span_of


async def test_numbers_run_per_rollout_and_never_repeat(store: LightningStore) -> None:
    a, b = await store.start_rollout("a"), await store.start_rollout("b")
    pairs = [(r.rollout_id, r.attempt.attempt_id) for r in (a, b, a, a)]
    assert await store.get_many_span_sequence_ids(pairs) == [1, 1, 2, 3]
    assert await store.get_next_span_sequence_id(*pairs[1]) == 2
    assert await store.get_many_span_sequence_ids([]) == []
    with pytest.raises(NotFoundError):
        await store.get_next_span_sequence_id("nope", "nope")


async def test_spans_are_numbered_by_the_store_or_by_the_caller(store: LightningStore) -> None:
    rollout = await store.start_rollout("x")
    stored = await store.add_many_spans([span_of(rollout), span_of(rollout, number=7), span_of(rollout)])
    assert [s.sequence_id for s in stored] == [1, 7, 8]
    page = await store.query_spans(rollout.rollout_id)
    assert [s.sequence_id for s in page] == [1, 7, 8]


async def test_a_span_is_stored_once(store: LightningStore, caplog: pytest.LogCaptureFixture) -> None:
    rollout = await store.start_rollout("x")
    first, new = span_of(rollout, "first"), span_of(rollout, "new")
    assert await store.add_span(first) is not None
    with caplog.at_level(logging.ERROR):
        assert await store.add_span(first) is None
    assert "Duplicated span added" in caplog.text
    stored = await store.add_many_spans([span_of(rollout, "before"), first, new, new])
    assert [s.name for s in stored] == ["before", "new"]
    assert (await store.query_spans(rollout.rollout_id)).total == 3


async def test_spans_that_come_at_the_same_time_are_all_answered_with_themselves(store: LightningStore) -> None:
    rollouts = [await store.start_rollout(number) for number in range(2)]
    spans = [span_of(rollouts[number % 2], f"{number}") for number in range(20)]
    stored = await asyncio.gather(*(store.add_span(each) for each in spans))
    assert [answer and (answer.name, answer.span_id) for answer in stored] == [(s.name, s.span_id) for s in spans]
    assert len(await store.add_many_spans([*spans[:3], *(span_of(rollout) for rollout in rollouts)])) == 2
    assert [summary.spans for summary in await store.query_rollout_summaries()] == [11, 11]


async def test_a_span_of_opentelemetry_is_answered_with_what_is_stored_however_often_it_comes(
    store: LightningStore,
) -> None:
    rollout = await store.start_rollout("x")
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    tracer = TracerProvider().get_tracer("tests")
    spans = [tracer.start_span(f"{number}") for number in range(20)]
    for each in spans:
        each.end()
    stored = await asyncio.gather(*(store.add_otel_span(*ids, each) for each in (*spans, *spans[:5])))  # type: ignore[arg-type]
    spans_by_id = {span.span_id: span for span in await store.query_spans(rollout.rollout_id)}
    assert len(spans_by_id) == 20
    assert [span and span.name for span in stored] == [f"{number}" for number in (*range(20), *range(5))]
    assert all(span == spans_by_id[span.span_id] for span in stored if span is not None)


async def test_a_span_of_nobody_is_refused_and_nothing_of_its_batch_is_kept(store: LightningStore) -> None:
    rollout = await store.start_rollout("x")
    stranger = span_of(rollout)
    stranger.attempt_id = "at-nobody"
    with pytest.raises(NotFoundError, match="Attempt at-nobody not found"):
        await store.add_many_spans([span_of(rollout), stranger])
    assert (await store.query_spans(rollout.rollout_id)).total == 0
    assert await store.get_next_span_sequence_id(rollout.rollout_id, rollout.attempt.attempt_id) == 1


async def test_a_late_result_after_a_timeout_counts_while_the_rollout_waits_to_be_tried_again(
    store: LightningStore,
) -> None:
    config = RolloutConfig(max_attempts=2, retry_condition=["timeout"])
    rollout = await store.start_rollout("x", config=config)
    await store.update_attempt(rollout.rollout_id, "latest", status="timeout")
    await store.add_span(span_of(rollout, "its last call"))
    await store.update_attempt(rollout.rollout_id, "latest", status="succeeded")
    assert (await _statuses(store, rollout.rollout_id)) == ("succeeded", "succeeded")
    await store.add_span(span_of(rollout, "by a process that it left"))
    spans = await store.query_spans(rollout.rollout_id)
    assert [STALE in each.attributes for each in spans] == [False, True]


async def test_a_span_that_is_there_already_changes_nothing(store: LightningStore) -> None:
    rollout = await store.start_rollout("x")
    sent = span_of(rollout)
    await store.add_span(sent)
    cursor = (await store.query_events()).cursor
    assert await store.add_span(sent) is None
    assert (await store.query_events(after=cursor)).events == []


async def test_a_span_revives_an_unresponsive_attempt_but_no_timed_out_one(store: LightningStore) -> None:
    config = RolloutConfig(max_attempts=2, retry_condition=["unresponsive", "timeout"])
    rollout = await store.start_rollout("x", config=config)
    ended = await store.update_attempt(rollout.rollout_id, "latest", status="unresponsive")
    assert ended.end_time is not None
    assert (await _statuses(store, rollout.rollout_id)) == ("requeuing", "unresponsive")
    await store.add_span(span_of(rollout))
    assert (await _statuses(store, rollout.rollout_id)) == ("running", "running")
    alive = required(await store.get_latest_attempt(rollout.rollout_id))
    assert (alive.end_time, alive.outcome, alive.outcome_reason) == (None, None, None)
    assert await store.dequeue_rollout() is None
    await store.update_attempt(rollout.rollout_id, "latest", status="timeout")
    await store.add_span(span_of(rollout))
    assert (await _statuses(store, rollout.rollout_id)) == ("requeuing", "timeout")


async def test_everything_on_a_span_survives(store: LightningStore) -> None:
    rollout = await store.start_rollout("x")
    sent = Span.model_validate(
        {
            "rollout_id": rollout.rollout_id,
            "attempt_id": rollout.attempt.attempt_id,
            "sequence_id": 3,
            "trace_id": "a" * 32,
            "span_id": "b" * 16,
            "parent_id": "c" * 16,
            "name": "näme/☃",
            "status": {"status_code": "ERROR", "description": "boom"},
            "attributes": {"s": "x", "b": True, "i": 1, "f": 0.5, "ints": [1, 2], "strs": ["a"], "none": []},
            "events": [{"name": "e", "attributes": {"k": 1}, "timestamp": 1.5}],
            "links": [],
            "start_time": 1.0,
            "end_time": 2.0,
            "context": {"trace_id": "a" * 32, "span_id": "b" * 16, "is_remote": False, "trace_state": {"k": "v"}},
            "parent": None,
            "resource": {"attributes": {"service.name": "x"}, "schema_url": "u"},
            "kind": "CLIENT",
            "scope": {"name": "lib", "version": "1"},
            "extra_field": {"deep": [1, None]},
        }
    )
    await store.add_span(sent)
    [span] = await store.query_spans(rollout.rollout_id)
    assert span.model_dump() == sent.model_dump()


async def _statuses(store: LightningStore, rollout_id: str) -> tuple[str, str]:
    rollout, attempt = await store.get_rollout_by_id(rollout_id), await store.get_latest_attempt(rollout_id)
    assert rollout is not None
    assert attempt is not None
    return rollout.status, attempt.status
