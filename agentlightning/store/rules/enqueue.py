"""Creation of rollouts: enqueue them, or start them with a first attempt.

A call with a token creates each rollout once. Ids are derived from the token, so a repeated call finds its rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from agentlightning.errors import GoneError
from agentlightning.store.rules.claims import Claim, begin_attempt
from agentlightning.store.rules.idempotency import TOKEN_SECONDS, Call, digest, reused
from agentlightning.store.rules.resources import latest_resources, resources_by_id
from agentlightning.store.rules.tx import Ids, Record, Tx
from agentlightning.store.rules.updates import note_change
from agentlightning.store.rules.values import DEFAULT_CONFIG, new_rollout
from agentlightning.types import Attempt, EnqueueRolloutRequest, Rollout

_FURTHER_DRAW = 1 << 32
"""An index larger than all indexes of a call."""


def enqueue(
    tx: Tx, now: float, ids: Ids, requests: Sequence[EnqueueRolloutRequest], call: Call | None = None
) -> list[Rollout]:
    """Create rollouts and queue them, in order."""
    rollouts: list[Rollout] = []
    pins: dict[str | None, tuple[str | None, int | None]] = {}
    made_by = ""
    for index, request in enumerate(requests):
        if call is not None:
            made_by = _maker(call, request, len(requests))
        rollout_id = "ro-" + ids(index)
        existing = tx.load(rollout_id)
        if existing is not None:
            rollout_id, existing = _own_id(tx, ids, index, partial(_is_made_by, made_by, request, now))
        if existing is None:
            if call is not None:
                _check_not_deleted(tx, call, rollout_id)
            rollout = _new_rollout(tx, now, rollout_id, request, pins)
            note_change(tx, Record(rollout, [], queued_at=now, made_by=made_by), None, now)
            rollouts.append(rollout)
        else:
            _check_same_request(made_by, request, existing, "enqueue_many_rollouts")
            rollouts.append(existing.rollout)
    return rollouts


def start_rollout(
    tx: Tx,
    now: float,
    ids: Ids,
    attempt_id: str,
    request: EnqueueRolloutRequest,
    worker_id: str | None,
    call: Call | None = None,
) -> Claim:
    """Create a rollout with a pending first attempt, without queuing it."""
    made_by = "" if call is None else _maker(call, request, worker_id)
    rollout_id, existing = _own_id(tx, ids, 0, lambda existing: existing.find_attempt(attempt_id) is not None)
    if existing is not None:
        _check_same_request(made_by, request, existing, "start_rollout")
        return existing.rollout, cast("Attempt", existing.find_attempt(attempt_id))
    if call is not None:
        _check_not_deleted(tx, call, rollout_id)
    record = Record(_new_rollout(tx, now, rollout_id, request, {}), made_by=made_by)
    return begin_attempt(tx, record, now, attempt_id, worker_id, claimed=False)


def _own_id(tx: Tx, ids: Ids, index: int, is_own: Callable[[Record], bool]) -> tuple[str, Record | None]:
    """Return the id for the index-th rollout of a call, and the rollout if an earlier copy of the call created it.

    An id has only 12 digits, so two calls can get the same id. The later call then gets another one.
    """
    while True:
        rollout_id = "ro-" + ids(index)
        existing = tx.load(rollout_id)
        if existing is None or is_own(existing):
            return rollout_id, existing
        index += _FURTHER_DRAW


def _maker(call: Call, request: EnqueueRolloutRequest, further: object) -> str:
    """Return the `made_by` of a rollout: the key of the call that created it, and a digest of all its arguments."""
    return f"{call.key} {digest([request, further])}"


def _is_made_by(made_by: str, request: EnqueueRolloutRequest, now: float, record: Record) -> bool:
    """Return True if this call created the rollout with the id of this request: the rollout names the call, or it names
    no call and does not look like another rollout that got the same id."""
    if made_by != "" and record.made_by.split()[:1] == made_by.split()[:1]:
        return True
    young = record.rollout.start_time > now - TOKEN_SECONDS
    return not record.made_by and (young or record.rollout.input == request.input)


def _check_same_request(made_by: str, request: EnqueueRolloutRequest, record: Record, operation: str) -> None:
    if made_by and record.made_by and made_by != record.made_by:
        names = ("input", "mode", "run_id", "priority", "metadata")
        values = {name: getattr(request, name) for name in names}
        values["metadata"] = values["metadata"] or {}
        raise reused(operation, [name for name in names if values[name] != getattr(record.rollout, name)])


def _check_not_deleted(tx: Tx, call: Call, rollout_id: str) -> None:
    """Raise an error if an earlier copy of the call created this rollout and it was deleted since."""
    if tx.get("token", call.key) is not None:
        raise GoneError(
            f"This call already created rollout {rollout_id}, which was deleted since. "
            "To create another rollout, make a new call with a new token."
        )


def _new_rollout(
    tx: Tx,
    now: float,
    rollout_id: str,
    request: EnqueueRolloutRequest,
    pins: dict[str | None, tuple[str | None, int | None]],
) -> Rollout:
    """Return the rollout of a request. `pins` caches the id and version of the latest resources of each run."""
    resources_id, run_id = request.resources_id, request.run_id
    if resources_id is None:
        pin = pins.get(run_id)
        if pin is None:
            latest = latest_resources(tx, run_id)
            pin = pins[run_id] = (None, None) if latest is None else (latest.resources_id, latest.version)
        resources_id, version = pin
    else:
        named = resources_by_id(tx, resources_id, None)
        version = None if named is None else named.version
    return new_rollout(
        {
            "rollout_id": rollout_id,
            "input": request.input,
            "start_time": now,
            "end_time": None,
            "mode": request.mode,
            "resources_id": resources_id,
            "status": "queuing",
            "config": request.config or DEFAULT_CONFIG,
            "metadata": {} if request.metadata is None else request.metadata,
            "run_id": run_id,
            "resources_version": version,
            "priority": request.priority,
            "not_before": request.not_before,
        }
    )
