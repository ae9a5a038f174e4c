"""Rules of claims: select queued rollouts for a worker, each with a new attempt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from agentlightning.store.base import RUNNING
from agentlightning.store.rules.idempotency import TOKEN_SECONDS, Call, claim_call, recall, remember
from agentlightning.store.rules.query import Plan
from agentlightning.store.rules.tx import Age, ClaimRow, Ids, Record, Tx, by_wall_clock
from agentlightning.store.rules.updates import existing, note_change, set_status
from agentlightning.store.rules.values import evolve, new_attempt
from agentlightning.store.rules.workers import mark_idle, sync_worker
from agentlightning.types import Attempt, Rollout

Claim = tuple[Rollout, Attempt]
_LOADED_AT_ONCE = 1000


@dataclass(slots=True)
class Claimed:
    """The result of a claim."""

    claims: list[Claim]
    answered: bool
    """True if the caller should not wait: the claim has rollouts, or it is a copy of a claim that had none."""
    due: float | None = None
    """Time at which the first delayed rollout becomes claimable, if the claim is empty."""


def claim(
    tx: Tx,
    now: float,
    ids: Ids,
    token: str | None,
    run_id: str | None,
    worker_id: str | None,
    limit: int,
    *,
    looks_again: bool = False,
) -> Claimed:
    """Claim queued rollouts of the run, each with a new attempt.

    A copy of the call gets the result of the first call, even an empty one. A request with a new token gets new
    rollouts. `looks_again`: this is still the first call, which has found nothing so far and is waiting.
    """
    row, digests = None, ""
    if token is not None:
        call = claim_call(token, run_id, worker_id, limit)
        row, digests = cast("ClaimRow | None", tx.get("claim", token)), call.asked
        if row is not None:
            if row.asked:
                call.check(row.asked, "dequeue_many_rollouts")
            if row.claims or not looks_again:
                return Claimed(
                    [claimed for pair in row.claims if (claimed := _open_claim(tx, *pair)) is not None], True
                )
    claims: list[Claim] = []
    while len(claims) < limit:
        record = tx.claim(run_id, now)
        if record is None:
            break
        claims.append(begin_attempt(tx, record, now, "at-" + ids(len(claims)), worker_id, claimed=True))
    if not claims and worker_id:
        mark_idle(tx, worker_id, now, run_id)
    if token is not None and (claims or row is None):
        pairs = [(rollout.rollout_id, attempt.attempt_id) for rollout, attempt in claims]
        tx.put("claim", token, ClaimRow(pairs, now, asked=digests))
    return Claimed(claims, bool(claims), None if claims else tx.next_available(run_id))


def start_attempt(
    tx: Tx, now: float, rollout_id: str, attempt_id: str, worker_id: str | None, call: Call | None = None
) -> Claim:
    """Start another attempt, whatever the rollout's status."""
    record = existing(tx, rollout_id)
    recall(tx, record, call, "start_attempt", now)
    earlier = record.find_attempt(attempt_id)
    if earlier is not None:
        return record.rollout, earlier
    remember(tx, record, call, now)
    return begin_attempt(tx, record, now, attempt_id, worker_id, claimed=False)


def begin_attempt(
    tx: Tx, record: Record, now: float, attempt_id: str, worker_id: str | None, *, claimed: bool
) -> Claim:
    before = record.rollout.status if record.attempts or claimed else None
    attempt = new_attempt(record.rollout.rollout_id, attempt_id, len(record.attempts) + 1, now, worker_id)
    record.attempts.append(attempt)
    set_status(record, "preparing", now)
    note_change(tx, record, before, now)
    sync_worker(tx, attempt, now, record.rollout.run_id, claimed=claimed)
    return record.rollout, attempt


def _open_claim(tx: Tx, rollout_id: str, attempt_id: str) -> Claim | None:
    """Return an earlier claim; None if it ended, expired, or was cancelled or deleted."""
    record = tx.load(rollout_id)
    attempt = None if record is None else record.latest
    if record is None or attempt is None or attempt.attempt_id != attempt_id or record.rollout.status not in RUNNING:
        return None
    return (record.rollout, attempt) if attempt.status in ("preparing", "running") else None


def forget_claim_tokens(tx: Tx, now: float, most: int = _LOADED_AT_ONCE, age: Age | None = None) -> bool:
    """Delete expired tokens of claims among the first `most` tokens; return True if there may be more.

    The token of a pending claim is kept, because a worker that did not receive the claim can retry after an outage.
    """
    age = age or by_wall_clock(now)
    rows = tx.scan("claim", most)
    for token, row in rows:
        row = cast("ClaimRow", row)
        if age(row.time) > TOKEN_SECONDS:
            if any(_open_claim(tx, *pair) for pair in row.claims):
                tx.put("claim", token, replace(row, time=now, renewed=True))
            else:
                tx.drop("claim", token)
        elif not row.renewed:
            return False  # those behind it are younger
    return len(rows) == most


def queued_ahead(tx: Tx, now: float) -> list[str]:
    """Return the rollouts with a queue time in the future because the clock was set back, in the order of the queue.
    For read-only scripts."""
    rollouts: list[tuple[float, str]] = []
    for status in ("queuing", "requeuing"):
        plan = Plan(status_in=[status], sort_by="start_time", descending=True, limit=_LOADED_AT_ONCE)
        while True:
            page, total, after = tx.find(plan)
            rollouts += [(r.queued_at, r.rollout.rollout_id) for r in page if r.queued_at and r.queued_at > now]
            if after is None or (status == "queuing" and page[-1].rollout.start_time <= now):
                break
            plan = replace(plan, after=after, total=total)
    rollouts.sort(key=lambda queued: queued[0])  # among equals they are in the order of their numbers
    return [rollout_id for _, rollout_id in rollouts]


def queue_now(tx: Tx, now: float, rollout_ids: Sequence[str]) -> None:
    """Set the queue time of rollouts with a queue time in the future to now, in this order.

    A pause before a retry starts again. A user's `not_before` is a wall-clock time and is not changed.
    """
    for place, rollout_id in enumerate(rollout_ids):
        record = tx.load(rollout_id)
        if record is None or record.queued_at is None or record.queued_at <= now:
            continue
        pause = (record.rollout.not_before or 0.0) - record.queued_at
        if record.rollout.status == "requeuing" and pause > 0:
            record.rollout = evolve(record.rollout, not_before=now + pause)
        record.queued_at = now - 1e-6 * (len(rollout_ids) - place)
        note_change(tx, record, None, now)
