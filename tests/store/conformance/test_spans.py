"""Spans on every store: storing them, their numbers, and their effect on an attempt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest
from opentelemetry.sdk.trace import TracerProvider

from agentlightning.errors import NotFoundError
from agentlightning.semconv import STALE
from agentlightning.store.base import LightningStore
from agentlightning.types import AttemptStatus, RolloutConfig, Span

MakeSpan = Callable[..., Span]


async def test_numbers_run_per_rollout_and_never_repeat(store: LightningStore) -> None:
    a, b = await store.start_rollout("a"), await store.start_rollout("b")
    pairs = [(r.rollout_id, r.attempt.attempt_id) for r in (a, b, a, a)]
    assert await store.get_many_span_sequence_ids(pairs) == [1, 1, 2, 3]
    assert await store.get_next_span_sequence_id(*pairs[1]) == 2
    assert await store.get_many_span_sequence_ids([]) == []
    with pytest.raises(NotFoundError):
        await store.get_next_span_sequence_id("nope", "nope")


async def test_spans_are_numbered_by_the_store_or_by_the_caller(store: LightningStore, span: MakeSpan) -> None:
    rollout = await store.start_rollout("x")
    stored = await store.add_many_spans([span(rollout), span(rollout, sequence_id=7), span(rollout)])
    assert [s.sequence_id for s in stored] == [1, 7, 8]
    page = await store.query_spans(rollout.rollout_id)
    assert [s.sequence_id for s in page] == [1, 7, 8]


async def test_a_span_is_stored_once(store: LightningStore, span: MakeSpan, caplog: pytest.LogCaptureFixture) -> None:
    rollout = await store.start_rollout("x")
    first, new = span(rollout, "first"), span(rollout, "new")
    assert await store.add_span(first) is not None
    with caplog.at_level(logging.ERROR):
        assert await store.add_span(first) is None
    assert "Duplicated span added" in caplog.text
    stored = await store.add_many_spans([span(rollout, "before"), first, new, new])
    assert [s.name for s in stored] == ["before", "new"]
    assert (await store.query_spans(rollout.rollout_id)).total == 3


async def test_spans_that_come_at_the_same_time_are_all_answered_with_themselves(
    store: LightningStore, span: MakeSpan
) -> None:
    rollouts = [await store.start_rollout(number) for number in range(2)]
    spans = [span(rollouts[number % 2], f"{number}") for number in range(20)]
    stored = await asyncio.gather(*(store.add_span(each) for each in spans))
    assert [answer and (answer.name, answer.span_id) for answer in stored] == [(s.name, s.span_id) for s in spans]


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


async def test_a_span_of_nobody_is_refused_and_nothing_of_its_batch_is_kept(
    store: LightningStore, span: MakeSpan
) -> None:
    rollout = await store.start_rollout("x")
    stranger = span(rollout)
    stranger.attempt_id = "at-nobody"
    with pytest.raises(NotFoundError, match="Attempt at-nobody not found"):
        await store.add_many_spans([span(rollout), stranger])
    assert (await store.query_spans(rollout.rollout_id)).total == 0
    assert await store.get_next_span_sequence_id(rollout.rollout_id, rollout.attempt.attempt_id) == 1


async def test_a_span_starts_its_attempt_and_rollout(store: LightningStore, span: MakeSpan) -> None:
    rollout = await store.start_rollout("x")
    await store.add_span(span(rollout))
    stored_rollout = await store.get_rollout_by_id(rollout.rollout_id)
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    assert stored_rollout is not None
    assert attempt is not None
    assert (stored_rollout.status, attempt.status) == ("running", "running")
    assert attempt.last_heartbeat_time is not None


async def test_a_late_span_of_an_older_attempt_is_kept_and_marked_stale(store: LightningStore, span: MakeSpan) -> None:
    rollout = await store.start_rollout("x")
    await store.start_attempt(rollout.rollout_id)
    stored = await store.add_span(span(rollout))
    assert stored is not None
    assert stored.attributes[STALE] is True
    [only_span] = await store.query_spans(rollout.rollout_id)
    assert only_span.attributes == {"k": "v", STALE: True}
    stored_rollout = await store.get_rollout_by_id(rollout.rollout_id)
    assert stored_rollout is not None
    assert stored_rollout.status == "preparing"


@pytest.mark.parametrize("status", ["preparing", "running", "failed", "succeeded", "unresponsive", "timeout"])
async def test_a_span_that_comes_after_the_end_of_its_attempt_is_kept_and_marked_stale(
    store: LightningStore, span: MakeSpan, status: AttemptStatus
) -> None:
    rollout = await store.start_rollout("x")
    await store.add_span(span(rollout, "before"))
    ended = await store.update_attempt(rollout.rollout_id, "latest", status=status)
    await store.add_span(span(rollout, "after"))
    before, after = await store.query_spans(rollout.rollout_id, "latest")
    assert STALE not in before.attributes
    over = status in ("failed", "succeeded", "timeout")
    assert (STALE in after.attributes) is over
    assert ended.end_time is not None or not over


async def test_a_late_result_after_a_timeout_counts_while_the_rollout_waits_to_be_tried_again(
    store: LightningStore, span: MakeSpan
) -> None:
    config = RolloutConfig(max_attempts=2, retry_condition=["timeout"])
    rollout = await store.start_rollout("x", config=config)
    await store.update_attempt(rollout.rollout_id, "latest", status="timeout")
    await store.add_span(span(rollout, "its last call"))
    await store.update_attempt(rollout.rollout_id, "latest", status="succeeded")
    assert (await _statuses(store, rollout.rollout_id)) == ("succeeded", "succeeded")
    await store.add_span(span(rollout, "by a process that it left"))
    spans = await store.query_spans(rollout.rollout_id)
    assert [STALE in each.attributes for each in spans] == [False, True]


async def test_a_span_that_is_there_already_changes_nothing(store: LightningStore, span: MakeSpan) -> None:
    rollout = await store.start_rollout("x")
    sent = span(rollout)
    await store.add_span(sent)
    cursor = (await store.query_events()).cursor
    assert await store.add_span(sent) is None
    assert (await store.query_events(after=cursor)).events == []


async def test_a_span_revives_an_unresponsive_attempt_but_no_timed_out_one(
    store: LightningStore, span: MakeSpan
) -> None:
    config = RolloutConfig(max_attempts=2, retry_condition=["unresponsive", "timeout"])
    rollout = await store.start_rollout("x", config=config)
    await store.update_attempt(rollout.rollout_id, "latest", status="unresponsive")
    assert (await _statuses(store, rollout.rollout_id)) == ("requeuing", "unresponsive")
    await store.add_span(span(rollout))
    assert (await _statuses(store, rollout.rollout_id)) == ("running", "running")
    assert await store.dequeue_rollout() is None
    await store.update_attempt(rollout.rollout_id, "latest", status="timeout")
    await store.add_span(span(rollout))
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


async def test_spans_are_filtered_sorted_and_paged(store: LightningStore, span: MakeSpan) -> None:
    rollout = await store.start_rollout("x")
    for number, name in enumerate(["alpha", "beta", "alphabet"], start=1):
        await store.add_span(span(rollout, name, number, trace_id=str(number) * 32))
    rid = rollout.rollout_id
    assert [s.name for s in await store.query_spans(rid, "latest", name_contains="alpha")] == ["alpha", "alphabet"]
    either = await store.query_spans(rid, name="beta", trace_id="1" * 32, filter_logic="or")
    assert [s.name for s in either] == ["alpha", "beta"]
    page = await store.query_spans(rid, limit=1, offset=1, sort_order="desc")
    assert ([s.name for s in page], page.total) == (["beta"], 3)
    assert (await store.query_spans("unknown")).total == 0
    assert (await store.query_spans(rid, "at-unknown")).total == 0


async def _statuses(store: LightningStore, rollout_id: str) -> tuple[str, str]:
    rollout, attempt = await store.get_rollout_by_id(rollout_id), await store.get_latest_attempt(rollout_id)
    assert rollout is not None
    assert attempt is not None
    return rollout.status, attempt.status
