"""Ends the attempts of a worker that has ended, at once, so that nobody waits for a lease to run out."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Set
from dataclasses import dataclass

from agentlightning.errors import ConflictError, NotFoundError
from agentlightning.execution.processes.children import ChildExit
from agentlightning.store.base import RUNNING, UNSET, LightningStore, Unset
from agentlightning.store.rules.lifecycle import RUNNER_DIED, STOPPED
from agentlightning.store.wrappers import complete
from agentlightning.types import AttemptedRollout, AttemptError

logger = logging.getLogger(__name__)


@dataclass
class EndAttempts:
    """Ends the attempts that a child held when it ended.

    Rollouts of a child that died are queued again, up to `infrastructure_retries` times; those of a child that ended
    because the run did (`stopped`) are not tried again.
    """

    store: LightningStore
    stopped: bool = False

    async def __call__(self, exit_: ChildExit) -> frozenset[str]:
        """Return the ids of the rollouts that the worker held."""
        if exit_.worker_id is None:
            return frozenset()
        if self.stopped:
            message, traceback = f"{exit_.describe()} ended with its run, with this attempt in hand", None
        else:
            message = f"{exit_.describe()} died with this attempt in hand"
            traceback = exit_.report.traceback if exit_.report is not None else None
        return await end_attempts(self.store, {exit_.worker_id}, message, traceback, stopped=self.stopped)


async def end_attempts(
    store: LightningStore,
    worker_ids: Set[str],
    message: str,
    traceback: str | None = None,
    *,
    stopped: bool = False,
    run_id: str | Unset | None = UNSET,
) -> frozenset[str]:
    """End the attempts that workers hold, of one run or of all, and return the ids of the rollouts.

    An attempt that was reported before, or has another worker, stays as it is. One that was `stopped` is cancelled; the
    others are lost with their runner and made again.
    """
    store = complete(store)
    error = AttemptError(type="agentlightning.errors.RunnerDiedError", message=message, traceback=traceback)
    held: set[str] = set()
    for rollout in await store.query_rollouts(status_in=sorted(RUNNING), run_id=run_id):
        if not isinstance(rollout, AttemptedRollout) or rollout.attempt.worker_id not in worker_ids:
            continue
        held.add(rollout.rollout_id)
        with contextlib.suppress(ConflictError, NotFoundError):  # it came to its end, or was deleted, meanwhile
            await store.update_attempt(
                rollout.rollout_id,
                rollout.attempt.attempt_id,
                status="failed",
                outcome="cancelled" if stopped else "infrastructure_fault",
                outcome_reason=STOPPED if stopped else RUNNER_DIED,
                error=error,
            )
    return frozenset(held)
