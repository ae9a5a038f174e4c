"""Runs rollouts in batches for all algorithms: enqueue, wait with a limit, cancel what is left, fetch the evidence."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from agentlightning.adapter.spans.rewards import final_reward
from agentlightning.adapter.spans.tokens import is_stale
from agentlightning.errors import AgentLightningError, ConflictError
from agentlightning.store.base import LightningStore
from agentlightning.training.ledger.record import attempt_verdict, refusal_of
from agentlightning.types import Attempt, EnqueueRolloutRequest, Rollout, Span

logger = logging.getLogger(__name__)

_LOOK_EVERY = 0.25
"""Seconds between two reports to `on_done`; the end itself is noticed at once."""


@dataclass(frozen=True)
class Evidence:
    """A rollout at its end, with everything that was recorded of it."""

    rollout: Rollout
    attempts: list[Attempt]
    """In the order in which they were made."""
    spans: list[Span]
    """Of all attempts."""

    @property
    def latest(self) -> Attempt | None:
        """The attempt that counts; None if nobody claimed the rollout."""
        return self.attempts[-1] if self.attempts else None

    @property
    def counted(self) -> list[Span]:
        """The spans of the latest attempt that were not late, in their order."""
        latest = self.latest
        own = (s for s in self.spans if latest is not None and s.attempt_id == latest.attempt_id and not is_stale(s))
        return sorted(own, key=lambda span: span.sequence_id)

    @property
    def reward(self) -> float | None:
        """What the rollout earned: the last reward of an attempt that was scored, or what was said for a fault of the
        policy. None for one that failed in another way, is not at its end, or earned nothing."""
        latest = self.latest
        if latest is None or attempt_verdict(latest, is_latest=True) is not None:
            return None
        return final_reward(self.counted)


OnEnded = Callable[[Sequence[Rollout]], Awaitable[None]]
LatePolicy = Literal["drop", "wait", "resubmit"]
"""What becomes of rollouts that are late: they are cancelled; or waited for as long as others still end, each end
beginning the time anew; or cancelled and enqueued once more, with the same time limit."""


async def collect(
    store: LightningStore,
    requests: Sequence[EnqueueRolloutRequest],
    *,
    timeout_seconds: float,
    on_done: Callable[[int], None] | None = None,
    on_ended: OnEnded | None = None,
    on_enqueued: Callable[[Sequence[Rollout]], None] | None = None,
    late: LatePolicy = "drop",
    last_end: Callable[[], float] | None = None,
) -> list[Rollout]:
    """Enqueue the requests and return their rollouts, in order, once all are at an end.

    Those that are not after `timeout_seconds` are treated as `late` says, and in the end returned as `cancelled`; the
    wait has an end in each case. With `resubmit` the rollouts that were given up come after the others. `on_done` is
    told how many are done, from time to time; `on_ended` is awaited with those that have ended since, while others are
    still open; `on_enqueued` is told the rollouts as soon as the store has them. `last_end` gives the monotonic time at
    which a rollout of another call ended last, where several calls are one step: with `wait` it begins the time anew.
    When the caller is cancelled, so are the open rollouts.
    """
    told = on_enqueued or _nobody
    first = _collect_once(
        store, requests, timeout_seconds, on_done, on_ended, told, patient=late == "wait", last_end=last_end
    )
    rollouts, again = await first
    if late != "resubmit" or not again:
        return rollouts
    given_up = [rollouts[i] for i in again]
    done = len(rollouts) - len(again)

    def tell(count: int) -> None:
        if on_done:
            on_done(done + count)

    once_more = [requests[i] for i in again]
    fresh, _ = await _collect_once(store, once_more, timeout_seconds, tell, on_ended, told, patient=False)
    for i, rollout in zip(again, fresh, strict=True):
        rollouts[i] = rollout
    return rollouts + given_up


def _nobody(rollouts: Sequence[Rollout]) -> None:
    """Is told of rollouts and does nothing."""


async def _enqueued(store: LightningStore, requests: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
    """Return the rollouts of the requests. A caller that is cancelled meanwhile leaves none of them open."""
    enqueuing = asyncio.ensure_future(store.enqueue_many_rollouts(requests))
    try:
        return list(await asyncio.shield(enqueuing))
    except asyncio.CancelledError:
        await asyncio.wait([enqueuing])
        for rollout in [] if enqueuing.exception() else enqueuing.result():
            with suppress(ConflictError):  # one that a run has found again may have ended
                await store.update_rollout(rollout.rollout_id, status="cancelled")
        raise


async def _collect_once(
    store: LightningStore,
    requests: Sequence[EnqueueRolloutRequest],
    timeout_seconds: float,
    on_done: Callable[[int], None] | None,
    on_ended: OnEnded | None,
    on_enqueued: Callable[[Sequence[Rollout]], None],
    *,
    patient: bool,
    last_end: Callable[[], float] | None = None,
) -> tuple[list[Rollout], list[int]]:
    """Return the rollouts, and the places of those that were late and cancelled."""
    rollouts = await _enqueued(store, requests)
    on_enqueued(rollouts)
    ids = [rollout.rollout_id for rollout in rollouts]
    end = time.monotonic() + timeout_seconds
    ended: dict[str, Rollout] = {}
    try:
        while len(ended) < len(ids):
            if patient and last_end is not None:
                end = max(end, last_end() + timeout_seconds)
            if (left := end - time.monotonic()) <= 0:
                break
            pause = min(left, _LOOK_EVERY) if on_done or on_ended or patient else left
            before = len(ended)
            known = set(ended)
            ended = {r.rollout_id: r for r in await store.wait_for_rollouts(rollout_ids=ids, timeout=pause)}
            if patient and len(ended) > before:
                end = time.monotonic() + timeout_seconds
            if on_done:
                on_done(len(ended))
            if on_ended and (fresh := [rollout for id, rollout in ended.items() if id not in known]):
                await on_ended(fresh)
    finally:
        given_up = [i for i, rollout_id in enumerate(ids) if rollout_id not in ended]
        for rollout_id in (ids[i] for i in given_up):
            try:
                ended[rollout_id] = await store.update_rollout(rollout_id, status="cancelled")
            except ConflictError:  # it ended in this moment, and stays as it ended
                rollout = await store.get_rollout_by_id(rollout_id)
                assert rollout is not None, rollout_id
                ended[rollout_id] = rollout
    late = [i for i in given_up if ended[ids[i]].status == "cancelled"]  # the others have ended in this moment
    return [ended[rollout_id] for rollout_id in ids], late


async def evidence(store: LightningStore, rollout: Rollout, *, note: bool = False) -> Evidence:
    """Return a rollout with its attempts and spans.

    The latest attempt has the reason `refused_call` where a call of it was refused for good. That can be told by every
    reader of every store, whatever ran the agent; with `note` the store is told too, so that lists show it.
    """
    attempts = sorted(await store.query_attempts(rollout.rollout_id), key=lambda attempt: attempt.sequence_id)
    found = Evidence(rollout, attempts, list(await store.query_spans(rollout.rollout_id)))
    reason = None if found.latest is None else refusal_of(found.latest, found.counted)
    if found.latest is not None and reason is not None:
        attempts[-1] = found.latest.model_copy(update={"outcome_reason": reason})
        if note:
            await _note_reason(store, attempts[-1])
    return found


async def _note_reason(store: LightningStore, attempt: Attempt) -> None:
    try:
        await store.update_attempt(attempt.rollout_id, attempt.attempt_id, outcome_reason=attempt.outcome_reason)
    except (AgentLightningError, OSError) as error:  # readers find the reason in the spans again
        logger.warning(
            "[Rollout %s | Attempt %s] the store did not take the reason %s: %s",
            *(attempt.rollout_id, attempt.attempt_id, attempt.outcome_reason, error),
        )
