"""Runs rollouts in batches for all algorithms: enqueue, wait with a limit, cancel the rest, fetch the spans."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from agentlightning.adapter.spans.rewards import final_reward
from agentlightning.errors import AgentLightningError, ConflictError
from agentlightning.store.base import LightningStore
from agentlightning.training.ledger import attempt_verdict, counted_spans, refusal_of
from agentlightning.types import Attempt, EnqueueRolloutRequest, Rollout, Span

logger = logging.getLogger(__name__)

_LOOK_EVERY = 0.25
"""Seconds between two reports to `on_done`; the end is reported immediately."""


@dataclass(frozen=True)
class Evidence:
    """A finished rollout with its attempts and spans."""

    rollout: Rollout
    attempts: list[Attempt]
    """Attempts in order of time."""
    spans: list[Span]
    """Spans of all attempts."""

    @property
    def latest(self) -> Attempt | None:
        """The attempt that counts; None if no runner claimed the rollout."""
        return self.attempts[-1] if self.attempts else None

    @property
    def counted(self) -> list[Span]:
        """The spans of the latest attempt that were not late, in their order."""
        return counted_spans(self.spans, self.latest)

    @property
    def reward(self) -> float | None:
        """The last reward of a scored attempt, or the reward of a policy fault. None for a rollout that failed in
        another way, has not ended, or has no reward."""
        latest = self.latest
        if latest is None or attempt_verdict(latest) is not None:
            return None
        return final_reward(self.counted)


LatePolicy = Literal["drop", "wait", "resubmit"]
"""Handling of late rollouts: cancel them; or wait, with a time limit that restarts whenever a rollout ends; or cancel
and requeue them once, with the same time limit."""


@dataclass(frozen=True, kw_only=True)
class Watcher:
    """Functions that follow the rollouts of one call of `collect`."""

    on_enqueued: Callable[[Sequence[Rollout]], None] = lambda rollouts: None
    """Called with the rollouts when the store has enqueued them."""
    on_done: Callable[[int], None] | None = None
    """Called from time to time with the number of ended rollouts."""
    on_ended: Callable[[Sequence[Rollout]], Awaitable[None]] | None = None
    """Awaited with newly ended rollouts while others are still running."""
    last_end: Callable[[], float] = lambda: -math.inf
    """Returns the monotonic time of the last end of a rollout in another call, if several calls form one step: with
    `late="wait"` it restarts the time limit."""


async def collect(
    store: LightningStore,
    requests: Sequence[EnqueueRolloutRequest],
    *,
    timeout_seconds: float,
    late: LatePolicy = "drop",
    watcher: Watcher | None = None,
) -> list[Rollout]:
    """Enqueue the requests, wait until all have ended, and return their rollouts in order.

    `late` sets the handling of rollouts that have not ended after `timeout_seconds`. In the end they are returned as
    `cancelled`, so the wait always ends. With `resubmit` the cancelled rollouts come after the others. If the caller is
    cancelled, the open rollouts are cancelled too.
    """
    batch = _Batch(store, timeout_seconds, watcher or Watcher(), is_patient=late == "wait")
    rollouts, cancelled = await batch.run(requests)
    if late != "resubmit" or not cancelled:
        return rollouts
    given_up = [rollouts[place] for place in cancelled]
    resubmitted, _ = await batch.run([requests[place] for place in cancelled], len(rollouts) - len(cancelled))
    for place, rollout in zip(cancelled, resubmitted, strict=True):
        rollouts[place] = rollout
    return rollouts + given_up


@dataclass(frozen=True)
class _Batch:
    """The wait for rollouts that are enqueued together."""

    store: LightningStore
    timeout_seconds: float
    watcher: Watcher
    is_patient: bool
    """Whether the time limit restarts with each end."""

    async def run(
        self, requests: Sequence[EnqueueRolloutRequest], already_done: int = 0
    ) -> tuple[list[Rollout], list[int]]:
        """Return the rollouts, and the positions of those that were late and cancelled."""
        rollouts = await _enqueued(self.store, requests)
        self.watcher.on_enqueued(rollouts)
        ids = [rollout.rollout_id for rollout in rollouts]
        ended: dict[str, Rollout] = {}
        try:
            await self._wait(ids, ended, already_done)
        finally:
            given_up = [place for place, rollout_id in enumerate(ids) if rollout_id not in ended]
            for rollout_id in (ids[place] for place in given_up):
                ended[rollout_id] = await self._cancel(rollout_id)
        cancelled = [place for place in given_up if ended[ids[place]].status == "cancelled"]
        return [ended[rollout_id] for rollout_id in ids], cancelled

    async def _wait(self, ids: Sequence[str], ended: dict[str, Rollout], already_done: int) -> None:
        """Wait until all have ended or the time is over, and add those that end to `ended`."""
        watcher = self.watcher
        looks = watcher.on_done is not None or watcher.on_ended is not None or self.is_patient
        end = time.monotonic() + self.timeout_seconds
        while len(ended) < len(ids):
            if self.is_patient:
                end = max(end, watcher.last_end() + self.timeout_seconds)
            if (remaining := end - time.monotonic()) <= 0:
                return
            pause = min(remaining, _LOOK_EVERY) if looks else remaining
            rollouts = await self.store.wait_for_rollouts(rollout_ids=list(ids), timeout=pause)
            fresh = [rollout for rollout in rollouts if rollout.rollout_id not in ended]
            ended.update((rollout.rollout_id, rollout) for rollout in rollouts)
            if self.is_patient and fresh:
                end = time.monotonic() + self.timeout_seconds
            if watcher.on_done is not None:
                watcher.on_done(already_done + len(ended))
            if watcher.on_ended is not None and fresh:
                await watcher.on_ended(fresh)

    async def _cancel(self, rollout_id: str) -> Rollout:
        try:
            return await self.store.update_rollout(rollout_id, status="cancelled")
        except ConflictError:  # it ended in this moment, and its ending stays
            rollout = await self.store.get_rollout_by_id(rollout_id)
            assert rollout is not None, rollout_id
            return rollout


async def _enqueued(store: LightningStore, requests: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
    """Enqueue the requests and return their rollouts. If the caller is cancelled meanwhile, none of them stays open."""
    enqueuing = asyncio.ensure_future(store.enqueue_many_rollouts(requests))
    try:
        return list(await asyncio.shield(enqueuing))
    except asyncio.CancelledError:
        await asyncio.wait([enqueuing])
        for rollout in [] if enqueuing.exception() else enqueuing.result():
            with suppress(ConflictError):  # a rollout that a resumed run reuses may have ended
                await store.update_rollout(rollout.rollout_id, status="cancelled")
        raise


async def evidence(store: LightningStore, rollout: Rollout, *, note: bool = False) -> Evidence:
    """Return a rollout with its attempts and spans.

    The latest attempt has the reason `refused_call` if one of its calls was finally refused. This can be derived from
    the spans; with `note`, the store also records it, so that lists show it.
    """
    attempts = sorted(await store.query_attempts(rollout.rollout_id), key=lambda attempt: attempt.sequence_id)
    result = Evidence(rollout, attempts, list(await store.query_spans(rollout.rollout_id)))
    reason = None if result.latest is None else refusal_of(result.latest, result.counted)
    if result.latest is None or reason is None:
        return result
    latest = attempts[-1] = result.latest.model_copy(update={"outcome_reason": reason})
    if note:
        try:
            await store.update_attempt(latest.rollout_id, latest.attempt_id, outcome_reason=reason)
        except (AgentLightningError, OSError) as error:  # readers can derive the reason from the spans
            logger.warning(
                "[Rollout %s | Attempt %s] could not store the reason %s: %s",
                *(latest.rollout_id, latest.attempt_id, reason, error),
            )
    return result
