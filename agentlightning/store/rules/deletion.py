"""Deletion of rollouts, by id or by a retention policy.

A policy deletes only rollouts that have ended, a page at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from agentlightning.errors import ConflictError, DamagedRecordError
from agentlightning.store.base import FINISHED
from agentlightning.store.rules.idempotency import TOKEN_SECONDS, Call, recall_row, remember_row
from agentlightning.store.rules.query import Plan
from agentlightning.store.rules.tx import Record, TokenRow, Tx
from agentlightning.types import RetentionPolicy

PAGE = 256
"""Number of rollouts that are removed in one step, so that no other caller waits long."""


def delete(
    tx: Tx, now: float, rollout_ids: Sequence[str], active: Literal["refuse", "skip", "force"], call: Call | None = None
) -> int | ConflictError:
    """Remove rollouts with their spans; return the number removed. Unknown ids are ignored.

    `active` selects what happens to a rollout that has not ended: an error (returned, so that it is recorded), nothing,
    or removal.
    """
    before = recall_row(tx, call, "delete_rollouts")
    if before is not None:  # remaining rollouts were left when the first copy was cut off
        active = "force"
    records: list[Record] = []
    removed = 0
    for rollout_id in dict.fromkeys(rollout_ids):
        try:
            record = tx.load(rollout_id)
        except DamagedRecordError:
            if active != "force":
                raise
            removed += tx.delete(rollout_id)
        else:
            records += [] if record is None else [record]
    running = [record for record in records if record.rollout.status not in FINISHED]
    if running and active == "refuse":
        rollout = running[0].rollout
        error = ConflictError(
            f"Nothing was deleted: rollout {rollout.rollout_id} is {rollout.status} and has not ended. "
            "Cancel it with update_rollout(status='cancelled') first, or pass force=True."
        )
        remember_row(tx, call, now, error)
        return error
    for record in records:
        if active == "skip" and record.rollout.status not in FINISHED:
            continue
        rollout_id = record.rollout.rollout_id
        tx.delete(rollout_id)
        if record.made_by and now - record.rollout.start_time <= TOKEN_SECONDS:
            tx.put("token", record.made_by.split()[0], TokenRow(record.rollout.start_time))
        tx.notes.finished.append(rollout_id)
        tx.notes.changed = True
        removed += 1
    if before is not None:
        return int(before.answer)
    remember_row(tx, call, now, str(removed))
    return removed


def begin_deletion(tx: Tx, now: float, call: Call) -> TokenRow | None:
    """Return the row of the first copy of a deletion in several steps: its time, and its result if it is complete."""
    row = recall_row(tx, call, "delete_rollouts")
    if row is None:
        remember_row(tx, call, now, "")
    return row


def end_deletion(tx: Tx, call: Call, removed: int) -> None:
    """Record the result of a deletion in several steps."""
    row = recall_row(tx, call, "delete_rollouts")
    if row is not None:
        remember_row(tx, call, row.time, str(removed))


def set_aside(tx: Tx, rollout_ids: Sequence[str]) -> None:
    """Remove rollouts with unreadable records from the queue and from all lists."""
    for rollout_id in rollout_ids:
        try:
            tx.load(rollout_id)
        except DamagedRecordError:
            tx.set_aside(rollout_id)


def surplus(
    tx: Tx, now: float, run_id: str | None, policy: RetentionPolicy, ended_before: float | None = None
) -> list[str]:
    """Return up to `PAGE` ended rollouts of a run that exceed the policy, in the order of their ends."""
    chosen: list[Record] = []
    if policy.max_age is not None:
        oldest = now - policy.max_age
        chosen += _oldest(tx, run_id, PAGE, oldest if ended_before is None else min(oldest, ended_before))
    if policy.keep_last is not None:
        ended = tx.find(Plan(status_in=sorted(FINISHED), run_id=(run_id,), limit=0)).total
        chosen += _oldest(tx, run_id, min(PAGE, ended - policy.keep_last), ended_before)
    if policy.max_bytes is not None:
        over = tx.counts((run_id,)).span_bytes - policy.max_bytes
        for record in _oldest(tx, run_id, PAGE, ended_before) if over > 0 else ():
            if over > 0 and record.span_bytes:
                chosen.append(record)
                over -= record.span_bytes
    return list(dict.fromkeys(record.rollout.rollout_id for record in chosen))[:PAGE]


def _oldest(tx: Tx, run_id: str | None, limit: int, ended_before: float | None) -> list[Record]:
    if limit <= 0:
        return []
    plan = Plan(
        status_in=sorted(FINISHED), run_id=(run_id,), ended_before=ended_before, sort_by="end_time", limit=limit
    )
    return tx.find(plan).records
