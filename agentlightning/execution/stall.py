"""Stall detector: reports once that a run makes no progress, and what each part waits for.

Progress is any change of a rollout of the run (a claim, a span, an end). While no rollout is open, CPU use of the
algorithm also counts as progress."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentlightning.base.terminal import counted
from agentlightning.execution.base import OpenWork, StalledError
from agentlightning.semconv import CONTROL_PREFIX
from agentlightning.store.base import QUEUING, RUNNING, LightningStore
from agentlightning.types import AttemptedRollout, Rollout, Worker
from agentlightning.utils.concurrency.where_blocked import task_stack, thread_stack

logger = logging.getLogger(__name__)

OnStall = Literal["report", "raise"]

PAGE = 100
"""Changes per request."""
DEFAULT_SECONDS = 300.0
COMPUTING_SHARE = 0.2
"""Fraction of a core above which a process counts as computing; a waiting process uses almost none."""


@dataclass(frozen=True)
class StallPolicy:
    """The time without progress after which a run counts as stalled, and the reaction to it."""

    seconds: float | None = DEFAULT_SECONDS
    """Seconds without progress; None disables the check."""
    on_stall: OnStall = "report"

    def look_seconds(self) -> float:
        """Seconds between checks."""
        return min(5.0, max(0.05, (self.seconds or 0.0) / 10))


@dataclass
class StallDetector:
    """Watches one run, in the process of its algorithm. Owned by the loop that supervises the run."""

    policy: StallPolicy
    work: OpenWork
    gateway: Any = None
    """The gateway of the run, if it has one."""
    position: Callable[[], list[str]] | None = None
    """Returns the algorithm's stack, if it is not a task of this loop."""

    async def watch(self) -> None:
        """Report each stall once. Return only if the store has no change feed.

        Raises:
            StalledError: the run stalls, and the policy is `raise`.
        """
        if self.policy.seconds is None:
            return
        view, run_id = self.work.view, self.work.run_id
        cursor: str | None = None
        recorded: dict[str, object] = {}
        cpu, reported = 0.0, False
        moved_at = looked_at = time.monotonic()
        while True:
            try:
                page = None if cursor is None else await view.query_events(after=cursor, limit=PAGE, run_id=run_id)
                moved = page is None or bool(page.events)
                for run in () if page is None else page.runs:  # a record is progress, a heartbeat is none
                    moved = moved or recorded.get(run.run_id, {}) != run.records
                    recorded[run.run_id] = run.records
                if moved:
                    cursor = (await view.query_events(limit=1, run_id=run_id)).cursor
                else:  # has this process computed since the last such look?
                    cursor = page.cursor if page is not None else None
                    used, now = time.process_time(), time.monotonic()
                    computes = used - cpu > COMPUTING_SHARE * max(now - looked_at, 1e-9)
                    cpu, looked_at = used, now
                    moved = computes and not await self.work.count()
                if moved:
                    moved_at, reported = time.monotonic(), False
                elif not reported and time.monotonic() - moved_at >= self.policy.seconds:
                    reported = True
                    await self._report()
            except NotImplementedError:
                logger.warning("The store has no change feed, so stalls are not detected")
                return
            except OSError as error:  # the callers of an unreachable store report it
                logger.debug("Could not check for progress: %s", error)
            await asyncio.sleep(self.policy.look_seconds())

    async def _report(self) -> None:
        if self.position:
            stack = self.position()
        else:  # its thread if it is synchronous, else its task
            task = next((task for task in asyncio.all_tasks() if task.get_name() == "algorithm"), None)
            stack = thread_stack("algorithm") or (task_stack(task) if task is not None else [])
        gateway = None if self.gateway is None else self.gateway.stats()
        report = await stall_report(self.work.view, self.work.run_id, algorithm=stack, gateway=gateway)
        text = f"No progress for {self.policy.seconds:g} s (stall_timeout). What each part waits for:\n{report}"
        if self.policy.on_stall == "raise":
            raise StalledError(text)
        logger.warning("%s", text)


SHOWN = 20
"""Number of rollouts and workers to list; the others are only counted."""
_LOOKED_BACK = 200
"""Number of ended rollouts to search for the last one of each worker."""


async def stall_report(
    store: LightningStore, run_id: str | None, *, algorithm: Sequence[str], gateway: dict[str, Any] | None
) -> str:
    """Return the lines for the queue, each runner, the gateway and the algorithm.

    `store` is the run's view; `algorithm` holds the lines at which it waits; `gateway` holds its counters, None if it
    is not used.
    """
    now = time.time()
    lines = [f"  queue: {await _queue(store, now)}"]
    workers = [w for w in await store.query_workers() if not w.worker_id.startswith(CONTROL_PREFIX)]
    mine = [worker for worker in workers if worker.run_id == run_id]
    if mine:
        running = await store.query_rollouts(status_in=sorted(RUNNING), sort_by="start_time", limit=_LOOKED_BACK)
        ended = await store.query_rollouts(sort_by="end_time", sort_order="desc", limit=_LOOKED_BACK)
        at_work = _by_worker(list(running))
        last = _by_worker([rollout for rollout in ended if rollout.end_time is not None])
        shown = mine[:SHOWN]
        lines += [f"  {_runner(w, at_work.get(w.worker_id), last.get(w.worker_id), now)}" for w in shown]
        lines += [f"  ... and others: {len(mine) - SHOWN}"] if len(mine) > SHOWN else []
    else:
        lines.append("  runners: none has requested work of this run")
    calls = "not in use"
    if gateway is not None:
        in_flight, waiting = counted(gateway["in_flight"], "call"), gateway["waiting"]
        calls = f"{in_flight} at model servers, {waiting} waiting for a weight change"
    lines.append(f"  gateway: {calls}")
    lines.append(f"  algorithm: {' > '.join(algorithm) if algorithm else 'its position is unknown'}")
    return "\n".join(lines)


async def _queue(store: LightningStore, now: float) -> str:
    page = await store.query_rollouts(status_in=sorted(QUEUING), sort_by="start_time", limit=1)
    if not page.total:
        return "empty"
    oldest = page.items[0]
    if oldest.not_before is not None and oldest.not_before > now:
        wait = oldest.not_before - now
        return f"{counted(page.total, 'rollout')}; {oldest.rollout_id} can be claimed in {wait:.0f} s"
    age = now - oldest.start_time
    return f"{counted(page.total, 'unclaimed rollout')}; {oldest.rollout_id} has waited longest, for {age:.0f} s"


def _by_worker(rollouts: Sequence[AttemptedRollout | Rollout]) -> dict[str, AttemptedRollout]:
    """Return the first rollout of each worker."""
    rollout_by_worker: dict[str, AttemptedRollout] = {}
    for rollout in rollouts:
        if isinstance(rollout, AttemptedRollout) and rollout.attempt.worker_id is not None:
            rollout_by_worker.setdefault(rollout.attempt.worker_id, rollout)
    return rollout_by_worker


def _runner(worker: Worker, at_work: AttemptedRollout | None, last: AttemptedRollout | None, now: float) -> str:
    last_sign = max(worker.last_heartbeat_time or 0.0, worker.last_dequeue_time or 0.0)
    sign = f"last heartbeat {now - last_sign:.0f} s ago" if last_sign else "no heartbeat"
    if at_work is not None:
        attempt = at_work.attempt
        work = f"runs {at_work.rollout_id} (attempt {attempt.sequence_id}) for {now - attempt.start_time:.0f} s"
    elif last is not None:
        work = f"waits for work; its last rollout {last.rollout_id} ended {now - (last.end_time or now):.0f} s ago"
    else:
        work = "waits for work; it has completed no rollout"
    return f"runner {worker.worker_id}: {work}; {sign}"
