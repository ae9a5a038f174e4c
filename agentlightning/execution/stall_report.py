"""What each part of a run waits for, in a few lines that a person can act on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from agentlightning.semconv import CONTROL_PREFIX
from agentlightning.store.base import QUEUING, RUNNING, LightningStore
from agentlightning.types import AttemptedRollout, Rollout, Worker

SHOWN = 20
"""Rollouts and workers that are told one by one; of the rest, how many."""
_LOOKED_BACK = 200
"""Ended rollouts among which the last one of each worker is looked for."""


async def stall_report(
    store: LightningStore, run_id: str | None, *, algorithm: Sequence[str], gateway: dict[str, Any] | None
) -> str:
    """Return the lines for the queue, each runner, the gateway and the algorithm.

    `store` is the run's view; `algorithm` the places at which it waits; `gateway` its counters, None if it is not in
    use.
    """
    now = time.time()
    lines = [f"  queue: {await _queue(store, now)}"]
    lines += [f"  {line}" for line in await _runners(store, run_id, now)]
    lines.append(f"  gateway: {_gateway(gateway)}")
    lines.append(f"  algorithm: {' > '.join(algorithm) if algorithm else 'its place is not known'}")
    return "\n".join(lines)


async def _queue(store: LightningStore, now: float) -> str:
    page = await store.query_rollouts(status_in=sorted(QUEUING), sort_by="start_time", limit=1)
    if not page.total:
        return "empty"
    oldest = page.items[0]
    if oldest.not_before is not None and oldest.not_before > now:
        return f"{page.total} rollout(s); {oldest.rollout_id} may be claimed in {oldest.not_before - now:.0f} s"
    age = now - oldest.start_time
    return f"{page.total} rollout(s) that nobody claims, the oldest {oldest.rollout_id} for {age:.0f} s"


async def _runners(store: LightningStore, run_id: str | None, now: float) -> list[str]:
    workers = [w for w in await store.query_workers() if not w.worker_id.startswith(CONTROL_PREFIX)]
    mine = [worker for worker in workers if worker.run_id == run_id]
    if not mine:
        return ["runners: none has ever asked for work of this run"]
    running = await store.query_rollouts(status_in=sorted(RUNNING), sort_by="start_time", limit=_LOOKED_BACK)
    ended = await store.query_rollouts(sort_by="end_time", sort_order="desc", limit=_LOOKED_BACK)
    at_work = _by_worker(list(running))
    last = _by_worker([rollout for rollout in ended if rollout.end_time is not None])
    lines = [_runner(worker, at_work.get(worker.worker_id), last.get(worker.worker_id), now) for worker in mine]
    return lines[:SHOWN] + ([f"... and {len(lines) - SHOWN} more runners"] if len(lines) > SHOWN else [])


def _by_worker(rollouts: Sequence[AttemptedRollout | Rollout]) -> dict[str, AttemptedRollout]:
    """Return the first rollout of each worker."""
    found: dict[str, AttemptedRollout] = {}
    for rollout in rollouts:
        if isinstance(rollout, AttemptedRollout) and rollout.attempt.worker_id is not None:
            found.setdefault(rollout.attempt.worker_id, rollout)
    return found


def _runner(worker: Worker, at_work: AttemptedRollout | None, last: AttemptedRollout | None, now: float) -> str:
    heard = max(worker.last_heartbeat_time or 0.0, worker.last_dequeue_time or 0.0)
    sign = f"last sign of life {now - heard:.0f} s ago" if heard else "no sign of life"
    if at_work is not None:
        attempt = at_work.attempt
        work = f"plays {at_work.rollout_id} (attempt {attempt.sequence_id}) for {now - attempt.start_time:.0f} s"
    elif last is not None:
        work = f"waits for work; its last rollout {last.rollout_id} ended {now - (last.end_time or now):.0f} s ago"
    else:
        work = "waits for work; it has ended no rollout"
    return f"runner {worker.worker_id}: {work}; {sign}"


def _gateway(stats: dict[str, Any] | None) -> str:
    if stats is None:
        return "not in use"
    return f"{stats['in_flight']} call(s) at model servers, {stats['waiting']} waiting for a weight change"
