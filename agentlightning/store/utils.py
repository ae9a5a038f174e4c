"""Rules of the contract as functions, if you write your own store. `rules/lifecycle.py` describes them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from agentlightning.store.rules.lifecycle import health, rollout_after
from agentlightning.types import Attempt, AttemptedRollout, AttemptStatus, RolloutConfig, RolloutStatus


async def rollout_status_from_attempt(attempt: Attempt, config: RolloutConfig) -> RolloutStatus:
    """Return the status of a rollout with this latest attempt.

    Raises:
        ValueError: the status of the attempt is invalid.
    """
    return rollout_after(attempt, config, infrastructure_retries=0)


async def scan_unhealthy_rollouts(rollouts: Sequence[AttemptedRollout]) -> dict[tuple[str, str], AttemptStatus]:
    """Return the new status of each attempt that exceeds a limit, by (rollout id, attempt id)."""
    now, unhealthy = time.time(), dict[tuple[str, str], AttemptStatus]()
    for rollout in rollouts:
        attempt: Attempt | None = getattr(rollout, "attempt", None)
        status = health(attempt, rollout.config, now) if attempt is not None else None
        if attempt is not None and status is not None:
            unhealthy[rollout.rollout_id, attempt.attempt_id] = status
    return unhealthy
