"""What each operation does: one synchronous function per operation over a `Tx`, read it as the specification.

Time, ids and tokens are arguments (see `backend.py`). `ids(n)` gives the n-th identifier of the call: random for a
plain call, made from the token for one that carries a token, so that a repeated call finds what it made the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

from agentlightning.errors import BadRequestError, ConflictError, GoneError, NotFoundError
from agentlightning.semconv import STALE
from agentlightning.store import lifecycle
from agentlightning.store.backend import (
    TOKENS_KEPT,
    ClaimRow,
    Record,
    ResourcesRow,
    TextRow,
    Tx,
    WorkerRow,
    note_change,
)
from agentlightning.store.base import FINISHED, QUEUING, RUNNING, UNSET, Unset
from agentlightning.store.lifecycle import LEASE_EXPIRED
from agentlightning.store.query import Plan
from agentlightning.store.values import DEFAULT_CONFIG, evolve, new_attempt, new_rollout
from agentlightning.types import (
    Attempt,
    AttemptStatus,
    EnqueueRolloutRequest,
    NamedResources,
    ResourcesUpdate,
    Rollout,
    RolloutEvent,
    Span,
    Worker,
)

Ids = Callable[[int], str]
_WORKER_KEPT_SECONDS = 86_400.0
_TOKEN_KEPT_SECONDS = 600.0
_LOADED_AT_ONCE = 1000
_FURTHER_DRAW = 1 << 32
"""Past every index that a call uses."""
_FINISHED = sorted(FINISHED)
Claim = tuple[Rollout, Attempt]


# --- work comes in ---------------------------------------------------------------------------------------------------


def enqueue(tx: Tx, now: float, ids: Ids, requests: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
    """Create rollouts and queue them, in order."""
    made: list[Rollout] = []
    pins: dict[str | None, tuple[str, int] | None] = {}
    for index, request in enumerate(requests):
        rollout_id, known = _own_id(
            tx, ids, index, lambda known, made_by=request: _is_made_by(made_by, known.rollout, now)
        )
        if known is None:
            rollout = _new_rollout(tx, now, rollout_id, request, pins)
            note_change(tx, Record(rollout, queued_at=now), None, now)
            made.append(rollout)
        else:
            made.append(known.rollout)
    return made


def start_rollout(
    tx: Tx, now: float, ids: Ids, attempt_id: str, request: EnqueueRolloutRequest, worker_id: str | None
) -> Claim:
    """Create a rollout with its first attempt in hand; it is never queued."""
    rollout_id, known = _own_id(tx, ids, 0, lambda known: known.find_attempt(attempt_id) is not None)
    if known is not None:
        return known.rollout, cast("Attempt", known.find_attempt(attempt_id))
    record = Record(_new_rollout(tx, now, rollout_id, request, {}))
    return _begin_attempt(tx, record, now, attempt_id, worker_id, claimed=False)


def _own_id(tx: Tx, ids: Ids, index: int, is_own: Callable[[Record], bool]) -> tuple[str, Record | None]:
    """Return the id for the index-th rollout of a call, and the rollout if an earlier copy of the call made it.

    The 12 digits of an id are few enough for two calls to draw the same; the later one then draws again.
    """
    while True:
        rollout_id = "ro-" + ids(index)
        known = tx.load(rollout_id)
        if known is None or is_own(known):
            return rollout_id, known
        index += _FURTHER_DRAW


def _is_made_by(request: EnqueueRolloutRequest, rollout: Rollout, now: float) -> bool:
    """True if a rollout found under an id of this request is its own, and not another that drew the same id."""
    return rollout.start_time > now - _TOKEN_KEPT_SECONDS or rollout.input == request.input


def claim(
    tx: Tx, now: float, ids: Ids, token: str | None, run_id: str | None, worker_id: str | None, limit: int
) -> list[Claim]:
    """Take the oldest queued rollouts of the run, each with a new attempt."""
    if token is not None:
        row = cast("ClaimRow | None", tx.get("claim", token))
        if row is not None:
            return [claimed for pair in row.claims if (claimed := _claimed(tx, *pair)) is not None]
    taken: list[Claim] = []
    while len(taken) < limit:
        record = tx.claim(run_id, now)
        if record is None:
            break
        taken.append(_begin_attempt(tx, record, now, "at-" + ids(len(taken)), worker_id, claimed=True))
    if not taken and worker_id:
        _mark_idle(tx, worker_id, now, run_id)
    if taken and token is not None:
        pairs = [(rollout.rollout_id, attempt.attempt_id) for rollout, attempt in taken]
        tx.put("claim", token, ClaimRow(pairs, now))
    return taken


def claim_or_due(
    tx: Tx, now: float, ids: Ids, token: str | None, run_id: str | None, worker_id: str | None, limit: int
) -> tuple[list[Claim], float | None]:
    """The same; when there is nothing, with the moment at which the first delayed rollout may be claimed."""
    claims = claim(tx, now, ids, token, run_id, worker_id, limit)
    return claims, None if claims else tx.next_available(run_id)


def start_attempt(tx: Tx, now: float, rollout_id: str, attempt_id: str, worker_id: str | None) -> Claim:
    """Begin a further attempt, whatever the rollout's status."""
    record = _existing(tx, rollout_id)
    known = record.find_attempt(attempt_id)
    if known is not None:
        return record.rollout, known
    return _begin_attempt(tx, record, now, attempt_id, worker_id, claimed=False)


def _new_rollout(
    tx: Tx,
    now: float,
    rollout_id: str,
    request: EnqueueRolloutRequest,
    pins: dict[str | None, tuple[str, int] | None],
) -> Rollout:
    resources_id, version = request.resources_id, None
    if resources_id is None:
        if request.run_id not in pins:
            latest = latest_resources(tx, request.run_id)
            pins[request.run_id] = None if latest is None else (latest.resources_id, latest.version)
        pin = pins[request.run_id]
        if pin is not None:
            resources_id, version = pin
    else:
        named = resources_by_id(tx, resources_id, None)
        version = None if named is None else named.version
    return new_rollout(
        rollout_id=rollout_id,
        input=request.input,
        start_time=now,
        mode=request.mode,
        resources_id=resources_id,
        resources_version=version,
        status="queuing",
        config=request.config or DEFAULT_CONFIG,
        metadata={} if request.metadata is None else request.metadata,
        run_id=request.run_id,
        priority=request.priority,
        not_before=request.not_before,
    )


def _begin_attempt(
    tx: Tx, record: Record, now: float, attempt_id: str, worker_id: str | None, *, claimed: bool
) -> Claim:
    before = record.rollout.status if record.attempts or claimed else None
    attempt = new_attempt(
        rollout_id=record.rollout.rollout_id,
        attempt_id=attempt_id,
        sequence_id=len(record.attempts) + 1,
        start_time=now,
        worker_id=worker_id,
    )
    record.attempts.append(attempt)
    _set_status(record, "preparing", now)
    note_change(tx, record, before, now)
    _sync_worker(tx, attempt, now, record.rollout.run_id, claimed=claimed)
    return record.rollout, attempt


def _claimed(tx: Tx, rollout_id: str, attempt_id: str) -> Claim | None:
    """Return what was claimed before; None if it was deleted since."""
    record = tx.load(rollout_id)
    return None if record is None else (record.rollout, _attempt_of(record, attempt_id))


# --- evidence comes in -----------------------------------------------------------------------------------------------


def add_spans(tx: Tx, now: float, spans: Sequence[Span]) -> list[Span | None]:
    """Store spans; each answer is the span as stored, or None if it was there already."""
    records: dict[str, Record] = {}
    ready: list[Span] = []
    for span in spans:
        record = records.get(span.rollout_id)
        if record is None:
            record = records[span.rollout_id] = _existing(tx, span.rollout_id)
        ready.append(_numbered(record, span))
    sizes = tx.add_spans(ready)
    for given, span, size in zip(reversed(spans), reversed(ready), reversed(sizes), strict=True):
        record = records[span.rollout_id]
        if size == 0 and given.sequence_id < 0 and span.sequence_id == record.spans_issued:
            record.spans_issued -= 1  # the number of a span that was there already is given to the next one
    seen: dict[str, set[str]] = {rollout_id: set() for rollout_id in records}
    stored: list[Span | None] = []
    for span, size in zip(ready, sizes, strict=True):
        if size:
            record = records[span.rollout_id]
            record.span_count += 1
            record.span_bytes += size
            seen[span.rollout_id].add(span.attempt_id)
        stored.append(span if size else None)
    for rollout_id, record in records.items():
        _sign_of_life(tx, record, seen[rollout_id], now)
    return stored


def _numbered(record: Record, span: Span) -> Span:
    """Return the span with its number, marked stale if its attempt is no longer the latest."""
    attempt = _attempt_of(record, span.attempt_id)
    if span.sequence_id < 0:
        record.spans_issued += 1
        span = evolve(span, sequence_id=record.spans_issued)
    elif span.sequence_id > record.spans_issued:
        record.spans_issued = span.sequence_id
    if attempt is not record.attempts[-1]:
        span = evolve(span, attributes={**span.attributes, STALE: True})
    return span


def _sign_of_life(tx: Tx, record: Record, attempt_ids: set[str], now: float) -> None:
    """A span is a heartbeat of its attempt: it starts a preparing one, and revives an unresponsive latest one."""
    before = record.rollout.status
    for attempt_id in attempt_ids:
        attempt = _attempt_of(record, attempt_id)
        latest = attempt is record.latest
        alive = attempt.status in ("preparing", "running") or (attempt.status == "unresponsive" and latest)
        changes: dict[str, Any] = {"last_heartbeat_time": now}
        if alive:
            changes["status"] = "running"
        if attempt.status == "unresponsive" and latest:
            changes.update(end_time=None, outcome=None, outcome_reason=None)
        changed = evolve(attempt, **changes)
        record.put_attempt(changed)
        if alive and latest:
            if before != "running" and before not in FINISHED:
                _set_status(record, "running", now)
            if attempt.status == "unresponsive":
                _sync_worker(tx, changed, now, record.rollout.run_id)
    note_change(tx, record, before, now)


def next_sequence_ids(tx: Tx, pairs: Sequence[tuple[str, str]]) -> list[int]:
    """Give out one number per pair; attempts of a rollout share the counter."""
    records: dict[str, Record] = {}
    numbers: list[int] = []
    for rollout_id, _attempt_id in pairs:
        record = records.get(rollout_id) or records.setdefault(rollout_id, _existing(tx, rollout_id))
        record.spans_issued += 1
        numbers.append(record.spans_issued)
    for record in records.values():
        tx.save(record)
    return numbers


# --- changes ---------------------------------------------------------------------------------------------------------


def update_rollout(tx: Tx, now: float, rollout_id: str, changes: dict[str, Any], token: str | None = None) -> Rollout:
    """Change the given fields of a rollout; a status goes through the table of `lifecycle`."""
    record = _existing(tx, rollout_id)
    if record.is_done(token):
        return record.rollout
    before = record.rollout.status
    to = changes.pop("status", before)
    if changes:
        if "resources_id" in changes:
            named = resources_by_id(tx, changes["resources_id"], None) if changes["resources_id"] else None
            changes["resources_version"] = None if named is None else named.version
        record.rollout = evolve(record.rollout, **changes)
    if lifecycle.check_rollout_change(rollout_id, before, to):
        _set_status(record, to, now)
    note_change(tx, record, before, now)
    return record.rollout


def update_attempt(
    tx: Tx, now: float, rollout_id: str, attempt_id: str, changes: dict[str, Any], token: str | None = None
) -> Attempt:
    """Change the given fields of an attempt; the latest attempt moves its rollout unless that is at an end."""
    record = _existing(tx, rollout_id)
    attempt = _attempt_of(record, attempt_id)
    if record.is_done(token):
        return attempt
    before = record.rollout.status
    to: AttemptStatus = changes.pop("status", attempt.status)
    changed = lifecycle.check_attempt_change(attempt, to)
    if changed:
        changes = {**_end_of_attempt(attempt, to, now), **changes, "status": to}
    new = evolve(attempt, **changes)
    latest = attempt is record.latest
    record.put_attempt(new)
    if changed and to in lifecycle.ENDED:
        tx.notes.attempts_ended.append(new)
    if latest:
        _follow(record, new, now, moved=changed)
    note_change(tx, record, before, now)
    if changed or changes.get("worker_id"):
        _sync_worker(tx, new, now, record.rollout.run_id)
    return new


def expire(
    tx: Tx, now: float, rollout_id: str, attempt_id: str, to: AttemptStatus, reason: str, lease_seconds: float
) -> bool:
    """End the latest attempt because it is past a limit or its worker is lost; False if it is no longer so."""
    record = tx.load(rollout_id)
    attempt = record.latest if record is not None else None
    if record is None or attempt is None or attempt.attempt_id != attempt_id or record.rollout.status not in RUNNING:
        return False
    if reason == LEASE_EXPIRED:
        worker = cast("WorkerRow | None", tx.get("worker", attempt.worker_id or ""))
        if worker is None or not _is_lost(worker.worker, now, lease_seconds):
            return False
    elif lifecycle.health(attempt, record.rollout.config, now) != to:
        return False
    changes = {"outcome": "infrastructure_fault", "outcome_reason": reason}
    if not lifecycle.check_attempt_change(attempt, to):
        changes = {}
    before = record.rollout.status
    new = evolve(attempt, **{**_end_of_attempt(attempt, to, now), **changes, "status": to})
    record.put_attempt(new)
    tx.notes.attempts_ended.append(new)
    _follow(record, new, now, moved=True)
    note_change(tx, record, before, now)
    _sync_worker(tx, new, now, record.rollout.run_id)
    return True


def _end_of_attempt(attempt: Attempt, to: AttemptStatus, now: float) -> dict[str, Any]:
    """Return what goes with a change of an attempt's status."""
    if to not in lifecycle.ENDED:
        return {"end_time": None, "outcome": None, "outcome_reason": None}
    outcome, reason = lifecycle.default_outcome(to)
    return {"end_time": now, "outcome": outcome, "outcome_reason": reason}


def _follow(record: Record, attempt: Attempt, now: float, *, moved: bool) -> None:
    """Move the rollout after its latest attempt."""
    status = record.rollout.status
    if not moved or status in FINISHED:
        return
    to = lifecycle.rollout_after(attempt, record.rollout.config, record.infrastructure_retries)
    if to == "requeuing":
        if attempt.outcome_reason == LEASE_EXPIRED:
            record.infrastructure_retries += 1
        pause = lifecycle.retry_pause(attempt.sequence_id, record.rollout.config)
        record.rollout = evolve(record.rollout, not_before=now + pause if pause else None)
    if to != status:
        _set_status(record, to, now)


def _set_status(record: Record, to: Any, now: float) -> None:
    """Set the rollout's status, and with it `end_time` and the place in the queue."""
    was = record.rollout.status
    end_time = now if to in FINISHED else None
    record.rollout = evolve(record.rollout, status=to, end_time=end_time)
    if to in QUEUING:
        record.queued_at = now if record.queued_at is None or was not in QUEUING else record.queued_at
    else:
        record.queued_at = None


def delete(tx: Tx, rollout_ids: Sequence[str], active: Literal["refuse", "skip", "force"]) -> int:
    """Remove rollouts with their spans; unknown ones are passed over. Returns how many were removed.

    `active` says what becomes of one that has not ended: an error, nothing, or its removal.
    """
    removed = 0
    for rollout_id in dict.fromkeys(rollout_ids):
        record = tx.load(rollout_id)
        if record is None:
            continue
        status = record.rollout.status
        if status not in FINISHED:
            if active == "refuse":
                raise ConflictError(
                    f"Rollout {rollout_id} is {status} and has not ended, so it is not deleted (nothing was). "
                    "Cancel it with update_rollout(status='cancelled') first, or pass force=True."
                )
            if active == "skip":
                continue
        tx.delete(rollout_id)
        tx.notes.finished.append(rollout_id)
        tx.notes.changed = True
        removed += 1
    return removed


def events(tx: Tx, after: str | None, limit: int, run_id: tuple[str | None] | None) -> tuple[list[RolloutEvent], str]:
    """Return what changed after a cursor and the cursor to go on from; None is this moment."""
    if after is None:
        return [], tx.last_change()
    records, cursor = tx.changes(after, limit)
    return [_event(record) for record in records if run_id is None or record.rollout.run_id == run_id[0]], cursor


def _event(record: Record) -> RolloutEvent:
    rollout, attempt = record.rollout, record.latest
    return RolloutEvent(
        rollout_id=rollout.rollout_id,
        run_id=rollout.run_id,
        status=rollout.status,
        mode=rollout.mode,
        attempt_id=attempt.attempt_id if attempt else None,
        attempt_status=attempt.status if attempt else None,
        outcome=attempt.outcome if attempt else None,
        worker_id=attempt.worker_id if attempt else None,
        spans=record.span_count,
        start_time=rollout.start_time,
        end_time=rollout.end_time,
    )


def load_rollouts(tx: Tx, rollout_ids: Sequence[str]) -> list[Rollout]:
    """Return the rollouts with these ids, in their order; unknown ones are left out. For reading scripts."""
    if len(rollout_ids) == 1:
        record = tx.load(rollout_ids[0])
        return [] if record is None else [record.rollout]
    found: dict[str, Rollout] = {}
    for start in range(0, len(rollout_ids), _LOADED_AT_ONCE):
        records, _ = tx.find(Plan(ids=rollout_ids[start : start + _LOADED_AT_ONCE]))
        found.update((record.rollout.rollout_id, record.rollout) for record in records)
    return [found[rollout_id] for rollout_id in rollout_ids if rollout_id in found]


def ended_rollouts(tx: Tx, rollout_ids: Sequence[str]) -> tuple[list[Rollout], list[str]]:
    """Return those of the rollouts that have ended, in their order, and the ids of those that have not.

    Unknown ones are in neither. For reading scripts. What has not ended is only counted.
    """
    if len(rollout_ids) == 1:
        known = load_rollouts(tx, rollout_ids)
        return [r for r in known if r.status in FINISHED], [r.rollout_id for r in known if r.status not in FINISHED]
    wanted = list(dict.fromkeys(rollout_ids))
    ended: dict[str, Rollout] = {}
    count = 0
    for start in range(0, len(wanted), _LOADED_AT_ONCE):
        some = wanted[start : start + _LOADED_AT_ONCE]
        records, _ = tx.find(Plan(ids=some, status_in=_FINISHED))
        ended.update((record.rollout.rollout_id, record.rollout) for record in records)
        count += tx.find(Plan(ids=some, limit=0))[1]
    if count < len(wanted):  # which of them are unknown is worth a look at each only now
        there = {rollout.rollout_id for rollout in load_rollouts(tx, wanted)}
        wanted = [rollout_id for rollout_id in wanted if rollout_id in there]
    return (
        [ended[rollout_id] for rollout_id in rollout_ids if rollout_id in ended],
        [rollout_id for rollout_id in wanted if rollout_id not in ended],
    )


def read_spans(tx: Tx, rollout_id: str, attempt_id: str | None, span_id: str | None) -> Sequence[bytes | str]:
    """Return the encoded spans of a rollout or of one attempt; none for an unknown one.

    Raises:
        GoneError: some of them were evicted.
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
            "to keep the store within its bound. Read spans before that, give the store more room "
            "(max_span_bytes), or use a durable one (sqlite:///FILE)."
        )
    return tx.span_bodies(rollout_id, attempt_id, span_id)


def _existing(tx: Tx, rollout_id: str) -> Record:
    record = tx.load(rollout_id)
    if record is None:
        raise NotFoundError(f"Rollout {rollout_id} not found (Item {rollout_id!r} does not exist)")
    return record


def _attempt_of(record: Record, attempt_id: str) -> Attempt:
    attempt = record.find_attempt(attempt_id)
    if attempt is None:
        rollout_id = record.rollout.rollout_id
        if not record.attempts:
            raise NotFoundError(f"No attempts found for rollout {rollout_id} (Attempt {attempt_id} not found)")
        raise NotFoundError(f"Attempt {attempt_id} not found for rollout {rollout_id}")
    return attempt


# --- workers ---------------------------------------------------------------------------------------------------------


def heartbeat(tx: Tx, now: float, worker_id: str, stats: dict[str, Any] | Unset, run_id: str | None) -> Worker:
    """Record a sign of life of a worker."""
    changes: dict[str, Any] = {"last_heartbeat_time": now}
    if not isinstance(stats, Unset):
        changes["heartbeat_stats"] = stats
    worker = evolve(_worker(tx, worker_id, run_id), **changes)
    tx.put("worker", worker_id, WorkerRow(worker))
    return worker


def lost_claims(tx: Tx, now: float, lease_seconds: float) -> list[tuple[str, str]]:
    """Return what the workers hold that have sent heartbeats and have been silent for longer than their lease."""
    lost: list[tuple[str, str]] = []
    for worker_id, row in tx.scan("worker"):
        if _is_lost(cast("WorkerRow", row).worker, now, lease_seconds):
            lost.extend(tx.held(worker_id, 1000))
    return lost


def _is_lost(worker: Worker, now: float, lease_seconds: float) -> bool:
    """True if the worker has sent heartbeats and has been silent for longer than its lease."""
    if worker.last_heartbeat_time is None:
        return False
    return now - max(worker.last_heartbeat_time, worker.last_dequeue_time or 0.0) > lease_seconds


def forget_silent_workers(tx: Tx, now: float, lease_seconds: float) -> None:
    """Call silent workers unknown, and forget those silent for a day."""
    for worker_id, row in tx.scan("worker"):
        worker = cast("WorkerRow", row).worker
        silent = now - _last_sign(worker)
        if silent > _WORKER_KEPT_SECONDS and not tx.held(worker_id, 1):
            tx.drop("worker", worker_id)
        elif silent > lease_seconds and worker.last_heartbeat_time is not None and worker.status == "idle":
            tx.put("worker", worker_id, WorkerRow(evolve(worker, status="unknown")))


def forget_claim_tokens(tx: Tx, now: float) -> bool:
    """Forget tokens of claims that nobody repeats any more, a page of them; True if there may be more."""
    rows = tx.scan("claim", _LOADED_AT_ONCE)
    for token, row in rows:
        if now - cast("ClaimRow", row).time <= _TOKEN_KEPT_SECONDS:
            return False
        tx.drop("claim", token)
    return len(rows) == _LOADED_AT_ONCE


def forget_resources(tx: Tx, now: float, keep_seconds: float) -> None:
    """Forget the resources of runs that have no rollouts left, unless they were published lately."""
    empty: dict[str, bool] = {}
    for resources_id, row in tx.scan("resources"):
        update = cast("ResourcesRow", row).update
        run_id = update.run_id
        if run_id is None or now - update.update_time <= keep_seconds:
            continue
        if run_id not in empty:
            empty[run_id] = tx.counts((run_id,)).rollouts == 0
        if empty[run_id]:
            tx.drop("resources", resources_id)
            for version in range(1, update.version + 1):
                tx.drop("resources_version", f"{resources_id}\n{version}")
            pointer = tx.get("latest_resources", _run_key(run_id))
            if pointer is not None and cast("TextRow", pointer).value == resources_id:
                tx.drop("latest_resources", _run_key(run_id))


def _last_sign(worker: Worker) -> float:
    times = (worker.last_heartbeat_time, worker.last_dequeue_time, worker.last_busy_time, worker.last_idle_time)
    return max((time for time in times if time is not None), default=0.0)


def _worker(tx: Tx, worker_id: str, run_id: str | None) -> Worker:
    row = cast("WorkerRow | None", tx.get("worker", worker_id))
    return row.worker if row is not None else Worker(worker_id=worker_id, run_id=run_id)


def _mark_idle(tx: Tx, worker_id: str, now: float, run_id: str | None) -> None:
    """An empty claim: the worker asks for work, so it is idle unless it has other work in hand."""
    worker = _worker(tx, worker_id, run_id)
    changes: dict[str, Any] = {"last_dequeue_time": now}
    if worker.status != "idle" and not tx.held(worker_id, 1):
        changes.update(status="idle", last_idle_time=now, current_rollout_id=None, current_attempt_id=None)
    tx.put("worker", worker_id, WorkerRow(evolve(worker, **changes)))


def _sync_worker(tx: Tx, attempt: Attempt, now: float, run_id: str | None, *, claimed: bool = False) -> None:
    """Bring the worker's row in line with one of its attempts (saved before); its other claims are kept."""
    if not attempt.worker_id:
        return
    worker = _worker(tx, attempt.worker_id, run_id)
    status = lifecycle.worker_after(attempt.status)
    changes: dict[str, Any] = {"last_dequeue_time": now} if claimed else {}
    if status == "busy":
        changes.update(status="busy", last_busy_time=now)
        changes.update(current_rollout_id=attempt.rollout_id, current_attempt_id=attempt.attempt_id)
    else:
        changes["last_idle_time"] = now
        if worker.current_attempt_id in (attempt.attempt_id, None):
            held = tx.held(attempt.worker_id, 1)
            rollout_id, attempt_id = held[0] if held else (None, None)
            changes.update(status="busy" if held else status)
            changes.update(current_rollout_id=rollout_id, current_attempt_id=attempt_id)
    tx.put("worker", attempt.worker_id, WorkerRow(evolve(worker, **changes)))


# --- resources -------------------------------------------------------------------------------------------------------


def publish(
    tx: Tx, now: float, resources_id: str, token: str | None, resources: NamedResources, run_id: str | None
) -> ResourcesUpdate:
    """Add the next version of a set of resources, which becomes the latest of its run."""
    newest = cast("ResourcesRow | None", tx.get("resources", resources_id))
    if newest is not None and token is not None:
        for version in range(newest.update.version, max(0, newest.update.version - TOKENS_KEPT), -1):
            row = tx.get("resources_version", f"{resources_id}\n{version}")
            if row is not None and cast("ResourcesRow", row).token == token:
                return cast("ResourcesRow", row).update
    update = ResourcesUpdate(
        resources_id=resources_id,
        create_time=newest.update.create_time if newest else now,
        update_time=now,
        version=newest.update.version + 1 if newest else 1,
        resources=resources,
        run_id=run_id if run_id is not None or newest is None else newest.update.run_id,
    )
    row = ResourcesRow(update, token)
    tx.put("resources", resources_id, row)
    tx.put("resources_version", f"{resources_id}\n{update.version}", row)
    tx.put("latest_resources", _run_key(update.run_id), TextRow(resources_id))
    return update


def resources_by_id(tx: Tx, resources_id: str, version: int | None) -> ResourcesUpdate | None:
    """Return one version of a set of resources, the newest by default."""
    if version is None:
        row = tx.get("resources", resources_id)
    else:
        row = tx.get("resources_version", f"{resources_id}\n{version}")
    return cast("ResourcesRow", row).update if row is not None else None


def latest_resources(tx: Tx, run_id: str | None) -> ResourcesUpdate | None:
    """Return what was published last for the run, else what was published last for no run."""
    pointer = tx.get("latest_resources", _run_key(run_id))
    if pointer is None and run_id is not None:
        pointer = tx.get("latest_resources", _run_key(None))
    return resources_by_id(tx, cast("TextRow", pointer).value, None) if pointer is not None else None


def _run_key(run_id: str | None) -> str:
    return "" if run_id is None else f"run {run_id}"


# --- argument checks -------------------------------------------------------------------------------------------------


def given(**arguments: Any) -> dict[str, Any]:
    """Return the arguments that were supplied."""
    return {name: value for name, value in arguments.items() if value is not UNSET}


def check_limit(limit: int) -> int:
    """Return a claim's limit, at most 1000.

    Raises:
        BadRequestError: `limit` is no integer.
    """
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise BadRequestError(f"limit must be an integer; got {limit!r}")
    return min(limit, 1000)
