"""Changes of rollouts and attempts, and the effect of a changed attempt on its rollout and worker.

The table of allowed changes is in `lifecycle.py`.
"""

from __future__ import annotations

from typing import Any, cast

from agentlightning.errors import NotFoundError
from agentlightning.store.base import FINISHED, QUEUING, RUNNING
from agentlightning.store.rules import lifecycle
from agentlightning.store.rules.idempotency import Call, recall, remember
from agentlightning.store.rules.lifecycle import LEASE_EXPIRED
from agentlightning.store.rules.resources import resources_by_id
from agentlightning.store.rules.rewards import set_by_hand
from agentlightning.store.rules.tx import Age, Record, Tx, WorkerRow, by_wall_clock
from agentlightning.store.rules.values import changed, evolve
from agentlightning.store.rules.workers import has_lapsed, sync_worker
from agentlightning.types import Attempt, AttemptStatus, Rollout


def update_rollout(tx: Tx, now: float, rollout_id: str, changes: dict[str, Any], call: Call | None = None) -> Rollout:
    """Change the given fields of a rollout. The table of `lifecycle` checks a status."""
    record = existing(tx, rollout_id)
    if recall(tx, record, call, "update_rollout", now) is not None:
        return record.rollout
    before = record.rollout.status
    to = changes.pop("status", before)
    if changes:
        if "resources_id" in changes:
            named = resources_by_id(tx, changes["resources_id"], None) if changes["resources_id"] else None
            changes["resources_version"] = None if named is None else named.version
        record.rollout = evolve(record.rollout, **changes)
    if lifecycle.check_rollout_change(rollout_id, before, to):
        set_status(record, to, now)
    remember(tx, record, call, now)
    note_change(tx, record, before, now)
    return record.rollout


def update_attempt(
    tx: Tx, now: float, rollout_id: str, attempt_id: str, changes: dict[str, Any], call: Call | None = None
) -> Attempt:
    """Change the given fields of an attempt. The latest attempt changes its rollout's status unless it has ended."""
    record = existing(tx, rollout_id)
    done = recall(tx, record, call, "update_attempt", now)
    if done is not None:
        return attempt_of(record, done.answer or attempt_id)
    attempt = attempt_of(record, attempt_id)
    before = record.rollout.status
    to: AttemptStatus = changes.pop("status", attempt.status)
    moves = lifecycle.check_attempt_change(attempt, to)
    if moves:
        changes = {**_end_of_attempt(attempt, to, now), **changes, "status": to}
    new = changed(attempt, changes)
    if "reward" in changes or "rewards" in changes:
        set_by_hand(record, attempt)
    latest = attempt is record.latest
    record.put_attempt(new)
    if moves and to in lifecycle.ENDED:
        tx.notes.attempts_ended.append(new)
    if latest and moves:
        _follow(record, new, now)
    remember(tx, record, call, now, new.attempt_id)
    note_change(tx, record, before, now)
    if moves or changes.get("worker_id"):
        sync_worker(tx, new, now, record.rollout.run_id)
    return new


def expire(
    tx: Tx,
    now: float,
    rollout_id: str,
    attempt_id: str,
    to: AttemptStatus,
    reason: str,
    lease_seconds: float,
    age: Age | None = None,
) -> bool:
    """End the latest attempt because it exceeds a limit or its worker is lost; return False if this is no longer so."""
    age = age or by_wall_clock(now)
    record = tx.load(rollout_id)
    attempt = record.latest if record is not None else None
    if record is None or attempt is None or attempt.attempt_id != attempt_id or record.rollout.status not in RUNNING:
        return False
    if reason == LEASE_EXPIRED:
        row = cast("WorkerRow | None", tx.get("worker", attempt.worker_id or ""))
        if row is None or not has_lapsed(row, attempt, age, lease_seconds):
            return False
    elif lifecycle.health(attempt, record.rollout.config, now, age) != to:
        return False
    changes = {"outcome": lifecycle.default_outcome(to)[0], "outcome_reason": reason}
    if not lifecycle.check_attempt_change(attempt, to):
        changes = {}
    before = record.rollout.status
    new = evolve(attempt, **{**_end_of_attempt(attempt, to, now), **changes, "status": to})
    record.put_attempt(new)
    tx.notes.attempts_ended.append(new)
    _follow(record, new, now)
    note_change(tx, record, before, now)
    sync_worker(tx, new, now, record.rollout.run_id)
    return True


def _end_of_attempt(attempt: Attempt, to: AttemptStatus, now: float) -> dict[str, object]:
    """Return the additional changes that follow from a change of an attempt's status."""
    if to not in lifecycle.ENDED:
        return {"end_time": None, "outcome": None, "outcome_reason": None}
    outcome, reason = lifecycle.default_outcome(to)
    return {"end_time": now, "outcome": outcome, "outcome_reason": reason}


def _follow(record: Record, attempt: Attempt, now: float) -> None:
    """Set the rollout's status after a change of its latest attempt's status."""
    status = record.rollout.status
    if status in FINISHED:
        return
    to = lifecycle.rollout_after(attempt, record.rollout.config, record.infrastructure_retries)
    if to == "requeuing":
        if lifecycle.is_infrastructure_retry(attempt, record.rollout.config, record.infrastructure_retries):
            record.infrastructure_retries += 1
        pause = lifecycle.retry_pause(attempt.sequence_id, record.rollout.config)
        record.rollout = evolve(record.rollout, not_before=now + pause if pause else None)
    if to != status:
        set_status(record, to, now)


def set_status(record: Record, to: object, now: float) -> None:
    """Set the rollout's status, `end_time` and place in the queue."""
    was = record.rollout.status
    record.rollout = changed(record.rollout, {"status": to, "end_time": now if to in FINISHED else None})
    if to in QUEUING:
        record.queued_at = now if record.queued_at is None or was not in QUEUING else record.queued_at
    else:
        record.queued_at = None


def note_change(tx: Tx, record: Record, before: str | None, now: float) -> None:
    """Save a record with its deadline, and record its new status for waiters."""
    attempt = record.latest
    alive = attempt is not None and record.rollout.status in RUNNING and attempt.status in ("preparing", "running")
    record.deadline = lifecycle.deadline(attempt, record.rollout.config) if attempt is not None and alive else None
    tx.save(record)
    tx.notes.changed = True
    status = record.rollout.status
    if status != before:
        if status in QUEUING:
            later = record.rollout.not_before is not None and record.rollout.not_before > now
            (tx.notes.delayed if later else tx.notes.queued).append(record.rollout.run_id)
        elif status in FINISHED:
            tx.notes.finished.append(record.rollout.rollout_id)
            tx.notes.ended.append(record.rollout)


def existing(tx: Tx, rollout_id: str) -> Record:
    record = tx.load(rollout_id)
    if record is None:
        raise NotFoundError(f"Rollout {rollout_id} not found (Item {rollout_id!r} does not exist)")
    return record


def attempt_of(record: Record, attempt_id: str) -> Attempt:
    attempt = record.find_attempt(attempt_id)
    if attempt is None:
        rollout_id = record.rollout.rollout_id
        if not record.attempts:
            raise NotFoundError(f"No attempts found for rollout {rollout_id} (Attempt {attempt_id} not found)")
        raise NotFoundError(f"Attempt {attempt_id} not found for rollout {rollout_id}")
    return attempt
