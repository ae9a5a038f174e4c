"""Which rollouts go beyond what a run may keep: pure reading, a page at a time. Only what has ended ever goes."""

from __future__ import annotations

from agentlightning.store.backend import Tx
from agentlightning.store.base import FINISHED
from agentlightning.store.query import Plan
from agentlightning.types import RetentionPolicy

PAGE = 256
"""Rollouts removed in one step, so that no other caller waits long."""


def surplus(tx: Tx, now: float, run_id: str | None, policy: RetentionPolicy) -> list[str]:
    """Return up to `PAGE` ended rollouts of a run that go beyond the policy, those that ended first coming first."""
    found: dict[str, None] = {}
    if policy.max_age is not None:
        found.update(dict.fromkeys(_oldest(tx, run_id, PAGE, ended_before=now - policy.max_age)))
    if policy.keep_last is not None:
        ended = tx.find(Plan(status_in=sorted(FINISHED), run_id=(run_id,), limit=0))[1]
        found.update(dict.fromkeys(_oldest(tx, run_id, min(PAGE, max(0, ended - policy.keep_last)))))
    if policy.max_bytes is not None:
        found.update(dict.fromkeys(_beyond_bytes(tx, run_id, policy.max_bytes)))
    return list(found)[:PAGE]


def _oldest(tx: Tx, run_id: str | None, limit: int, ended_before: float | None = None) -> list[str]:
    if limit <= 0:
        return []
    plan = Plan(
        status_in=sorted(FINISHED), run_id=(run_id,), ended_before=ended_before, sort_by="end_time", limit=limit
    )
    return [record.rollout.rollout_id for record in tx.find(plan)[0]]


def _beyond_bytes(tx: Tx, run_id: str | None, max_bytes: int) -> list[str]:
    """Return the oldest ended rollouts without which the run is within its bytes."""
    over = tx.counts((run_id,)).span_bytes - max_bytes
    if over <= 0:
        return []
    chosen: list[str] = []
    plan = Plan(status_in=sorted(FINISHED), run_id=(run_id,), sort_by="end_time", limit=PAGE)
    for record in tx.find(plan)[0]:
        if over <= 0:
            break
        if record.span_bytes:
            chosen.append(record.rollout.rollout_id)
            over -= record.span_bytes
    return chosen
