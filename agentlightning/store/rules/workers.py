"""Workers: their heartbeats, their claims, and the leases of the claims."""

from __future__ import annotations

from typing import Any, cast

from agentlightning.store.base import Unset
from agentlightning.store.rules import lifecycle
from agentlightning.store.rules.idempotency import Call, is_known_beat
from agentlightning.store.rules.tx import Age, Tx, WorkerRow, by_wall_clock
from agentlightning.store.rules.values import changed
from agentlightning.types import Attempt, Worker

_WORKER_KEPT_SECONDS = 86_400.0
_HELD_AT_ONCE = 1000


def heartbeat(
    tx: Tx,
    now: float,
    worker_id: str,
    stats: dict[str, object] | Unset,
    run_id: str | None,
    attempts: frozenset[str] | None = None,
    call: Call | None = None,
) -> Worker:
    """Record a heartbeat of a worker, and the claims that are not in `attempts`; None means all claims."""
    present = _worker_row(tx, worker_id, run_id)
    row = WorkerRow(present.worker, present.unnamed, present.beats)  # one of its own, which is changed below
    if is_known_beat(row, call):
        return row.worker
    since = {attempt_id: time for _, attempt_id, time in row.unnamed}
    row.unnamed = []
    if attempts is not None:
        before = row.worker.last_heartbeat_time  # that one may have named claims that this one does not
        first = now if before is None else before
        held = tx.held(worker_id, len(attempts) + _HELD_AT_ONCE)
        row.unnamed = [(rollout, i, since.get(i, first)) for rollout, i in held if i not in attempts]
    changes: dict[str, object] = {} if isinstance(stats, Unset) else {"heartbeat_stats": stats}
    return _put_worker(tx, row, {"last_heartbeat_time": now, **changes})


def lost_claims(tx: Tx, now: float, lease_seconds: float, age: Age | None = None) -> list[tuple[str, str]]:
    """Return the claims with a lease that may have expired: claims of workers that stopped sending heartbeats, and
    claims that the heartbeats of their worker no longer name."""
    age = age or by_wall_clock(now)
    lost: list[tuple[str, str]] = []
    if not tx.any_held():  # the rows of idle workers need not be read
        return lost
    for worker_id, row in tx.scan("worker"):
        row = cast("WorkerRow", row)
        if _is_lost(row.worker, age, lease_seconds):
            lost.extend(tx.held(worker_id, _HELD_AT_ONCE))
        else:
            lost.extend((rollout, attempt) for rollout, attempt, since in row.unnamed if age(since) > lease_seconds)
    return lost


def has_lapsed(row: WorkerRow, attempt: Attempt, age: Age, lease_seconds: float) -> bool:
    """Return True if the lease of a claim has expired. It begins at the claim or the last heartbeat that names it."""
    if age(attempt.start_time) <= lease_seconds:
        return False
    if _is_lost(row.worker, age, lease_seconds):
        return True
    return any(attempt_id == attempt.attempt_id and age(since) > lease_seconds for _, attempt_id, since in row.unnamed)


def _is_lost(worker: Worker, age: Age, lease_seconds: float) -> bool:
    """Return True if the worker has sent heartbeats, but none for longer than its lease."""
    if worker.last_heartbeat_time is None:
        return False
    return min(age(worker.last_heartbeat_time), age(worker.last_dequeue_time or 0.0)) > lease_seconds


def forget_silent_workers(tx: Tx, now: float, lease_seconds: float, age: Age | None = None) -> None:
    """Set the status of workers without recent heartbeats to unknown; delete workers without heartbeats for a day."""
    age = age or by_wall_clock(now)
    for worker_id, row in tx.scan("worker"):
        row = cast("WorkerRow", row)
        worker = row.worker
        times = (worker.last_heartbeat_time, worker.last_dequeue_time, worker.last_busy_time, worker.last_idle_time)
        silent = min(map(age, [time for time in times if time is not None] or [0.0]))
        if silent > _WORKER_KEPT_SECONDS and not tx.held(worker_id, 1):
            tx.drop("worker", worker_id)
        elif silent > lease_seconds and worker.last_heartbeat_time is not None and worker.status == "idle":
            _put_worker(tx, row, {"status": "unknown"})


def mark_idle(tx: Tx, worker_id: str, now: float, run_id: str | None) -> None:
    """Mark a worker after an empty claim. It requests rollouts, so it is idle unless it has other claims."""
    row = _worker_row(tx, worker_id, run_id)
    changes: dict[str, object] = {"last_dequeue_time": now}
    if row.worker.status != "idle" and not tx.held(worker_id, 1):
        changes |= {"status": "idle", "last_idle_time": now, "current_rollout_id": None, "current_attempt_id": None}
    _put_worker(tx, row, changes)


def sync_worker(tx: Tx, attempt: Attempt, now: float, run_id: str | None, *, claimed: bool = False) -> None:
    """Update the worker's row for one of its attempts, which was saved before. Its other claims are kept."""
    worker_id = attempt.worker_id
    if not worker_id:
        return
    row = _worker_row(tx, worker_id, run_id)
    status = lifecycle.worker_after(attempt.status)
    if status == "busy":
        changes: dict[str, object] = {
            "status": "busy",
            "last_busy_time": now,
            "current_rollout_id": attempt.rollout_id,
            "current_attempt_id": attempt.attempt_id,
        }
    else:
        changes = {"last_idle_time": now}
        if row.worker.current_attempt_id in (attempt.attempt_id, None):
            held = tx.held(worker_id, 1)
            rollout_id, attempt_id = held[0] if held else (None, None)
            changes["status"] = "busy" if held else status
            changes["current_rollout_id"], changes["current_attempt_id"] = rollout_id, attempt_id
    if claimed:
        changes["last_dequeue_time"] = now
    _put_worker(tx, row, changes)


def _worker_row(tx: Tx, worker_id: str, run_id: str | None) -> WorkerRow:
    """Return the row of a worker; `_put_worker` replaces it."""
    row: Any = tx.get("worker", worker_id)
    return WorkerRow(Worker(worker_id=worker_id, run_id=run_id)) if row is None else row


def _put_worker(tx: Tx, row: WorkerRow, changes: dict[str, object]) -> Worker:
    worker = changed(row.worker, changes)
    tx.put("worker", worker.worker_id, WorkerRow(worker, row.unnamed, row.beats))
    return worker
