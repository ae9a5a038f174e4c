"""Spans: store and number them, and read them in pages.

A span is stored as the JSON that `Span` writes. Its third field is the number of the span. Only the spans that are
returned are decoded.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

from pydantic import ValidationError

from agentlightning.errors import GoneError
from agentlightning.semconv import STALE
from agentlightning.store.base import FINISHED
from agentlightning.store.rules import lifecycle
from agentlightning.store.rules.durable import damaged
from agentlightning.store.rules.rewards import Rewarded, may_reward, rewarded_by, with_reward
from agentlightning.store.rules.tx import Choice, Record, SpanBody, Tx
from agentlightning.store.rules.updates import attempt_of, existing, note_change, set_status
from agentlightning.store.rules.values import evolve
from agentlightning.store.rules.workers import sync_worker
from agentlightning.types import Span
from agentlightning.utils.otlp.unread import UnreadSpan

_decode = Span.__pydantic_validator__.validate_json
_NUMBER = re.compile(r'"sequence_id":(-?\d+)\D')
_NUMBER_BYTES = re.compile(_NUMBER.pattern.encode())
_NO_REWARDS: Mapping[str, Sequence[Rewarded]] = {}


AnySpan = Span | UnreadSpan
"""A span to store; it can be unread if the backend keeps unread spans."""


def add_spans(tx: Tx, now: float, spans: Sequence[AnySpan]) -> list[AnySpan | None]:
    """Store spans; return for each one the stored span, or None if it existed already.

    A span without a number gets the next one. If its attempt has ended or is not the latest, a span is marked stale.
    """
    records: dict[str, Record] = {}
    issued: dict[str, int] = {}
    stale: dict[tuple[str, str], bool] = {}
    ready: list[AnySpan] = []
    rewarding: list[int] = []
    record, place, is_stale = None, ("", ""), False
    for span in spans:
        if record is None or place != (span.rollout_id, span.attempt_id):
            place = span.rollout_id, span.attempt_id
            record = records.get(place[0])
            if record is None:
                record = records[place[0]] = existing(tx, place[0])
                issued[place[0]] = record.spans_issued
            if place not in stale:
                attempt = attempt_of(record, place[1])
                stale[place] = attempt is not record.attempts[-1] or lifecycle.is_over(attempt, record.rollout.status)
            is_stale = stale[place]
        number = span.sequence_id
        if number < 0:
            record.spans_issued += 1
            span = _numbered(span, record.spans_issued)
        elif number > record.spans_issued:
            record.spans_issued = number
        if not is_stale and may_reward(span):
            rewarding.append(len(ready))
        ready.append(_marked_stale(span) if is_stale else span)
    sizes = tx.add_spans(cast("list[Span]", ready))
    stored: list[AnySpan | None] = list(ready)
    attempts: dict[str, dict[str, None]] = {rollout_id: {} for rollout_id in records}
    if len(stale) == 1 and record is not None and all(sizes):  # of one attempt, and all of them new, as most are
        record.span_count += len(sizes)
        record.span_bytes += sum(sizes)
        attempts[place[0]][place[1]] = None
    else:
        _count(records, attempts, spans, ready, sizes, stored)
    rewards = _rewards([ready[index] for index in rewarding if sizes[index]]) if rewarding else _NO_REWARDS
    for rollout_id, record in records.items():
        if attempts[rollout_id] or record.spans_issued != issued[rollout_id]:  # else all of it was there
            _record_heartbeats(tx, record, attempts[rollout_id], now, rewards)
    return stored


def _rewards(spans: Sequence[AnySpan]) -> dict[str, list[Rewarded]]:
    """Return the rewards of spans, by attempt."""
    rewards: dict[str, list[Rewarded]] = {}
    for span in spans:
        if (rewarded := rewarded_by(span)) is not None:
            rewards.setdefault(span.attempt_id, []).append(rewarded)
    return rewards


def _count(
    records: dict[str, Record],
    attempts: dict[str, dict[str, None]],
    spans: Sequence[AnySpan],
    ready: Sequence[AnySpan],
    sizes: Sequence[int],
    stored: list[AnySpan | None],
) -> None:
    """Count spans of several attempts, some of which may have existed already."""
    for place, (span, size) in enumerate(zip(ready, sizes, strict=True)):
        if size:
            record = records[span.rollout_id]
            record.span_count += 1
            record.span_bytes += size
            attempts[span.rollout_id][span.attempt_id] = None
        else:
            stored[place] = None
    for original, span, size in zip(reversed(spans), reversed(ready), reversed(sizes), strict=True):
        record = records[span.rollout_id]
        if size == 0 and original.sequence_id < 0 and span.sequence_id == record.spans_issued:
            record.spans_issued -= 1  # the number of a span that was there already is given to the next one


def _numbered(span: AnySpan, number: int) -> AnySpan:
    return span.numbered(number) if isinstance(span, UnreadSpan) else evolve(span, sequence_id=number)


def _marked_stale(span: AnySpan) -> AnySpan:
    if isinstance(span, UnreadSpan):
        return span.marked_stale()
    return evolve(span, attributes={**span.attributes, STALE: True})


def _record_heartbeats(
    tx: Tx, record: Record, attempt_ids: Iterable[str], now: float, rewards: Mapping[str, Sequence[Rewarded]]
) -> None:
    """Record spans as heartbeats. A `preparing` attempt and an `unresponsive` latest attempt become `running`."""
    before = record.rollout.status
    for attempt_id in attempt_ids:
        attempt = attempt_of(record, attempt_id)
        latest = attempt is record.latest
        alive = attempt.status in ("preparing", "running") or (attempt.status == "unresponsive" and latest)
        changes: dict[str, object] = {"last_heartbeat_time": now}
        if alive:
            changes["status"] = "running"
        if attempt.status == "unresponsive" and latest:
            changes.update(end_time=None, outcome=None, outcome_reason=None)
        changed = evolve(attempt, **changes)
        if attempt_id in rewards:
            changed = with_reward(record, changed, rewards[attempt_id])
        record.put_attempt(changed)
        if alive and latest:
            if before != "running" and before not in FINISHED:
                set_status(record, "running", now)
            if attempt.status == "unresponsive":
                sync_worker(tx, changed, now, record.rollout.run_id)
    note_change(tx, record, before, now)


def next_sequence_ids(tx: Tx, pairs: Sequence[tuple[str, str]]) -> list[int]:
    """Return one number per pair. The attempts of a rollout have a common counter."""
    records: dict[str, Record] = {}
    numbers: list[int] = []
    for rollout_id, _attempt_id in pairs:
        record = records.get(rollout_id) or records.setdefault(rollout_id, existing(tx, rollout_id))
        record.spans_issued += 1
        numbers.append(record.spans_issued)
    for record in records.values():
        tx.save(record)
    return numbers


def read_spans(
    tx: Tx, rollout_id: str, attempt_id: str | None, span_id: str | None, choose: Choice | None = None
) -> Sequence[SpanBody]:
    """Return the encoded spans of a rollout or of one attempt, or a selection of them; none if it is unknown.

    Raises:
        GoneError: some of the spans were evicted.
    """
    record = tx.load(rollout_id)
    if record is None:
        return []
    if attempt_id == "latest":
        if record.latest is None:
            return []
        attempt_id = record.latest.attempt_id
    attempt = record.find_attempt(attempt_id) if attempt_id is not None else None
    if record.attempts_dropped and (attempt is None or attempt.sequence_id <= record.attempts_dropped):
        raise GoneError(
            f"Spans for rollout {rollout_id} have been evicted (those of its first {record.attempts_dropped} attempts) "
            "because the store was full. Read spans earlier, increase max_span_bytes, or use a durable store "
            "(sqlite:///FILE)."
        )
    return tx.span_bodies(rollout_id, attempt_id, span_id, choose)


def decode_all(bodies: Sequence[SpanBody], rollout_id: str) -> list[Span]:
    """Return all spans, in the given order.

    Raises:
        DamagedRecordError: a span cannot be read. Without it, the trace of the rollout would be wrong.
    """
    spans: list[Span] = []
    for body in bodies:
        try:
            spans.append(_decode(body) if isinstance(body, (bytes, str)) else body.read())
        except ValidationError as error:  # it is called by its id, if that much can be read
            text = body.decode("utf-8", "replace") if isinstance(body, bytes) else cast(str, body)
            match = re.search(r'"span_id":"(\w{1,64})"', text)
            raise damaged("span", f"{match[1] if match else '?'} of rollout {rollout_id}", error) from None
    return spans


def readable_spans(bodies: Iterable[bytes | str]) -> Iterator[Span]:
    """Yield the spans that can be read."""
    for body in bodies:
        with contextlib.suppress(ValidationError):
            yield _decode(body)


def read_page(
    tx: Tx, rollout_id: str, attempt_id: str | None, span_id: str | None, descending: bool, limit: int, offset: int
) -> tuple[Sequence[SpanBody], int]:
    """Return one page of these spans in the order of their numbers, and the number of all spans. Spans with the same
    number keep their order. `limit` -1 is all.

    Raises:
        DamagedRecordError: the number of a span cannot be read.
        GoneError: some of the spans were evicted.
    """
    total, end = 0, None if limit == -1 else offset + limit

    def page_of(bodies: Sequence[SpanBody]) -> Sequence[int]:
        nonlocal total
        total = len(bodies)
        return sorted(range(total), key=lambda place: _number_of(bodies[place]), reverse=descending)[offset:end]

    if limit != -1 and span_id is None:
        with contextlib.suppress(_NoNumber):  # in a head, which is short
            return read_spans(tx, rollout_id, attempt_id, None, page_of), total
    bodies = read_spans(tx, rollout_id, attempt_id, span_id)
    try:
        return [bodies[place] for place in page_of(bodies)], total
    except _NoNumber:
        decode_all(bodies, rollout_id)
        raise


class _NoNumber(LookupError):
    """Raised if a span has no number at the expected position."""


def _number_of(body: SpanBody) -> int:
    if not isinstance(body, (bytes, str)):
        return body.sequence_id
    match = _NUMBER_BYTES.search(body) if isinstance(body, bytes) else _NUMBER.search(body)
    if match is None:
        raise _NoNumber(body[:200])
    return int(match[1])
