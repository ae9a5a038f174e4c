"""Rollouts in batches: enqueue, wait with an end, cancel what is left, and fetch the evidence. For every algorithm."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentlightning.adapter.rewards import final_reward
from agentlightning.adapter.tokens import is_stale
from agentlightning.algorithm.record import attempt_verdict
from agentlightning.errors import ConflictError
from agentlightning.store.base import LightningStore
from agentlightning.types import Attempt, EnqueueRolloutRequest, Rollout, Span

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


async def collect(
    store: LightningStore,
    requests: Sequence[EnqueueRolloutRequest],
    *,
    timeout_seconds: float,
    on_done: Callable[[int], None] | None = None,
) -> list[Rollout]:
    """Enqueue the requests and return their rollouts, in order, once all are at an end.

    Those that are not after `timeout_seconds` are cancelled and returned as `cancelled`. `on_done` is told how many are
    done, from time to time. When the caller is cancelled, so are the open rollouts.
    """
    rollouts = await store.enqueue_many_rollouts(requests)
    ids = [rollout.rollout_id for rollout in rollouts]
    end = time.monotonic() + timeout_seconds
    ended: dict[str, Rollout] = {}
    try:
        while len(ended) < len(ids) and (left := end - time.monotonic()) > 0:
            pause = min(left, _LOOK_EVERY) if on_done else left
            ended = {r.rollout_id: r for r in await store.wait_for_rollouts(rollout_ids=ids, timeout=pause)}
            if on_done:
                on_done(len(ended))
    finally:
        for rollout_id in ids:
            if rollout_id not in ended:
                ended[rollout_id] = await _cancel(store, rollout_id)
    return [ended[rollout_id] for rollout_id in ids]


async def _cancel(store: LightningStore, rollout_id: str) -> Rollout:
    """Cancel a rollout; one that ended in this moment stays as it ended."""
    try:
        return await store.update_rollout(rollout_id, status="cancelled")
    except ConflictError:
        rollout = await store.get_rollout_by_id(rollout_id)
        assert rollout is not None, rollout_id
        return rollout


async def evidence(store: LightningStore, rollout: Rollout) -> Evidence:
    """Return a rollout with its attempts and spans."""
    attempts = await store.query_attempts(rollout.rollout_id)
    spans = await store.query_spans(rollout.rollout_id)
    return Evidence(rollout, sorted(attempts, key=lambda attempt: attempt.sequence_id), list(spans))
