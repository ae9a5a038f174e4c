"""Reads for callers that follow or wait: changes after a cursor, and ended rollouts."""

from __future__ import annotations

from collections.abc import Sequence

from agentlightning.store.base import FINISHED
from agentlightning.store.rules.query import Plan
from agentlightning.store.rules.tx import Record, RunRow, Tx
from agentlightning.types import EventPage, Rollout, RolloutEvent, RunEvent

_LOADED_AT_ONCE = 1000
_FINISHED = sorted(FINISHED)


def events(tx: Tx, after: str | None, limit: int, run_id: tuple[str | None] | None) -> EventPage:
    """Return the changes after a cursor (None for now), and the next cursor."""
    if after is None:
        return EventPage(events=[], cursor=tx.last_change())
    changed, cursor = tx.changes(after, limit)
    page = EventPage(events=[], cursor=cursor)
    for each in changed:
        if isinstance(each, RunRow):
            if run_id is None or each.run.run_id == (run_id[0] or ""):
                page.runs.append(_run_event(each))
        elif run_id is None or each.rollout.run_id == run_id[0]:
            page.events.append(_event(each))
    return page


def _run_event(row: RunRow) -> RunEvent:
    run = row.run
    return RunEvent(
        run_id=run.run_id,
        state=run.state,
        last_step=run.last_step,
        records=dict(row.records),
        last_heartbeat_time=run.last_heartbeat_time,
        stop_reason=run.stop_reason,
    )


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
    """Return the rollouts with these ids, in this order, without unknown ids. For read-only scripts."""
    if len(rollout_ids) == 1:
        record = tx.load(rollout_ids[0])
        return [] if record is None else [record.rollout]
    rollouts: dict[str, Rollout] = {}
    for start in range(0, len(rollout_ids), _LOADED_AT_ONCE):
        records = tx.find(Plan(ids=rollout_ids[start : start + _LOADED_AT_ONCE])).records
        rollouts.update((record.rollout.rollout_id, record.rollout) for record in records)
    return [rollouts[rollout_id] for rollout_id in rollout_ids if rollout_id in rollouts]


def ended_rollouts(tx: Tx, rollout_ids: Sequence[str]) -> tuple[list[Rollout], list[str]]:
    """Return the ended rollouts in the given order, and the ids of the rollouts that have not ended.

    Unknown ids are in neither. For read-only scripts. Rollouts that have not ended are only counted.
    """
    if len(rollout_ids) == 1:
        rollouts = load_rollouts(tx, rollout_ids)
        return [r for r in rollouts if r.status in FINISHED], [
            r.rollout_id for r in rollouts if r.status not in FINISHED
        ]
    ids = list(dict.fromkeys(rollout_ids))
    ended: dict[str, Rollout] = {}
    count = 0
    for start in range(0, len(ids), _LOADED_AT_ONCE):
        some = ids[start : start + _LOADED_AT_ONCE]
        records = tx.find(Plan(ids=some, status_in=_FINISHED)).records
        ended.update((record.rollout.rollout_id, record.rollout) for record in records)
        count += tx.find(Plan(ids=some, limit=0)).total
    if count < len(ids):  # which of them are unknown is worth a look at each only now
        present = {rollout.rollout_id for rollout in load_rollouts(tx, ids)}
        ids = [rollout_id for rollout_id in ids if rollout_id in present]
    return (
        [ended[rollout_id] for rollout_id in rollout_ids if rollout_id in ended],
        [rollout_id for rollout_id in ids if rollout_id not in ended],
    )
