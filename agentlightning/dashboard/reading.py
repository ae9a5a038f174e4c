"""Read the subject of a request from the store, or raise an error if it is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from agentlightning.errors import BadRequestError, NotFoundError
from agentlightning.store.base import LightningStore
from agentlightning.training.rollouts import Evidence, evidence
from agentlightning.types import Attempt, Rollout, Run, RunRecord

_SPANS_OF_CALL: Final = 3
"""Usual maximum number of spans per call: two of the gateway and one of a tracer."""


async def rollout_evidence(store: LightningStore, rollout_id: str, attempt_id: str | None = None) -> Evidence:
    """Return a rollout with its attempts and spans.

    Raises:
        NotFoundError: The rollout or the attempt does not exist.
        GoneError: The spans were evicted from memory.
    """
    rollout_data = await evidence(store, await _known_rollout(store, rollout_id))
    if attempt_id is not None:
        _check_known(rollout_id, attempt_id, rollout_data.attempts)
    return rollout_data


async def first_evidence(store: LightningStore, rollout_id: str, calls: int) -> Evidence | None:
    """Return a rollout with the first spans of its only attempt, usually enough for `calls` calls; None if it has
    several attempts, or no further spans, so that all of it should be read."""
    rollout, attempts = await _known_rollout(store, rollout_id), list(await store.query_attempts(rollout_id))
    if len(attempts) > 1:
        return None
    most = _SPANS_OF_CALL * calls
    spans = list(await store.query_spans(rollout_id, limit=most + 1))
    return Evidence(rollout, attempts, spans[:most]) if len(spans) > most else None


async def known_attempt(store: LightningStore, rollout_id: str, attempt_id: str) -> str:
    """Return the id of an attempt, without reading its spans; `latest` is the last attempt.

    Raises:
        NotFoundError: The rollout or the attempt does not exist.
        BadRequestError: The attempt is `latest`, and the rollout has no attempts.
    """
    await _known_rollout(store, rollout_id)
    attempts = await store.query_attempts(rollout_id)
    if attempt_id != "latest":
        _check_known(rollout_id, attempt_id, attempts)
        return attempt_id
    if not attempts:
        raise BadRequestError(f"Rollout {rollout_id!r} has no attempt yet: it has not been claimed")
    return max(attempts, key=lambda attempt: attempt.sequence_id).attempt_id


async def _known_rollout(store: LightningStore, rollout_id: str) -> Rollout:
    rollout = await store.get_rollout_by_id(rollout_id)
    if rollout is None:
        raise NotFoundError(
            f"The store has no rollout {rollout_id!r}; it may have been removed by the store's retention"
        )
    return rollout


def _check_known(rollout_id: str, attempt_id: str, attempts: Sequence[Attempt]) -> None:
    ids = [attempt.attempt_id for attempt in attempts]
    if attempt_id not in ids:
        raise NotFoundError(f"Rollout {rollout_id!r} has no attempt {attempt_id!r}; it has: {', '.join(ids) or 'none'}")


async def known_run(store: LightningStore, run_id: str) -> Run:
    """Return a run.

    Raises:
        NotFoundError: The run does not exist.
    """
    run = await store.get_run_by_id(run_id)
    if run is None:
        raise NotFoundError(f"The store has no run {run_id!r}; GET /v1/agl/runs lists the existing runs")
    return run


async def ledger_record(store: LightningStore, run_id: str | None, rollout_id: str) -> RunRecord | None:
    """Return the last record of a rollout in the ledger of a run; None if it does not exist."""
    if run_id is None:
        return None
    records = await store.query_run_records(run_id, kind_in=["ledger"], name=rollout_id, sort_order="desc", limit=1)
    return records.items[0] if records.items else None
