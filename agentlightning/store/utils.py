"""Rules of the contract as functions, for authors of other stores. They are described in `rules/lifecycle.py`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from agentlightning.store.rules.lifecycle import health, rollout_after
from agentlightning.types import Attempt, AttemptedRollout, AttemptStatus, RolloutConfig, RolloutStatus


async def rollout_status_from_attempt(attempt: Attempt, config: RolloutConfig) -> RolloutStatus:
    """Return the status of a rollout whose latest attempt is this one.

    Raises:
        ValueError: the attempt has no such status.
    """
    return rollout_after(attempt, config, infrastructure_retries=0)


async def scan_unhealthy_rollouts(rollouts: Sequence[AttemptedRollout]) -> dict[tuple[str, str], AttemptStatus]:
    """Return the attempts that are past a limit, by (rollout id, attempt id), with their new status."""
    now, unhealthy = time.time(), dict[tuple[str, str], AttemptStatus]()
    for rollout in rollouts:
        attempt: Attempt | None = getattr(rollout, "attempt", None)
        status = health(attempt, rollout.config, now) if attempt is not None else None
        if attempt is not None and status is not None:
            unhealthy[rollout.rollout_id, attempt.attempt_id] = status
    return unhealthy
