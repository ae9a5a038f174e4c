"""Reads what an endpoint is about from the store, or says clearly that it is not there."""

from __future__ import annotations

from agentlightning.algorithm.collect import Evidence, evidence
from agentlightning.errors import NotFoundError
from agentlightning.store.base import LightningStore
from agentlightning.types import Run, RunRecord


async def rollout_evidence(store: LightningStore, rollout_id: str, attempt_id: str | None = None) -> Evidence:
    """Return a rollout with its attempts and spans.

    Raises:
        NotFoundError: the store has no such rollout, or the rollout no such attempt.
        GoneError: its spans were evicted from memory.
    """
    rollout = await store.get_rollout_by_id(rollout_id)
    if rollout is None:
        raise NotFoundError(
            f"The store has no rollout {rollout_id!r}; it may have been removed by the store's retention"
        )
    found = await evidence(store, rollout)
    known = [attempt.attempt_id for attempt in found.attempts]
    if attempt_id is not None and attempt_id not in known:
        raise NotFoundError(
            f"Rollout {rollout_id!r} has no attempt {attempt_id!r}; it has: {', '.join(known) or 'none'}"
        )
    return found


async def known_run(store: LightningStore, run_id: str) -> Run:
    """Return a run.

    Raises:
        NotFoundError: the store has no such run.
    """
    run = await store.get_run_by_id(run_id)
    if run is None:
        raise NotFoundError(f"The store has no run {run_id!r}; GET /v1/agl/runs lists those that it has")
    return run


async def ledger_record(store: LightningStore, run_id: str | None, rollout_id: str) -> RunRecord | None:
    """Return what the ledger of a run says last of a rollout; None if it says nothing."""
    if run_id is None:
        return None
    records = await store.query_run_records(run_id, kind_in=["ledger"], name=rollout_id, sort_order="desc", limit=1)
    return records.items[0] if records.items else None
