"""Eight threads and four processes claim at once, out of a pile and out of a trickle: each rollout is claimed once."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import Counter
from typing import Any

import pytest

from agentlightning.store import LightningStore
from agentlightning.types import EnqueueRolloutRequest
from tests.chaos.processes import CONTEXT
from tests.chaos.stores import Place, open_store

pytestmark = pytest.mark.slow
THREADS, PROCESSES = 8, 4
COUNTS = {"mongo": 500}
"""Number of rollouts, where it is not 5,000."""
Taken = list[tuple[str, str, str]]
"""(rollout id, attempt id, worker)."""

_barrier: Any = None


def _meet_at(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


async def claim_all(store: LightningStore, worker: str, limit: int) -> Taken:
    """Claim until nothing has come for a while."""
    claims_made: Taken = []
    while claims := await store.dequeue_many_rollouts(limit=limit, worker_id=worker, timeout=1.0):
        claims_made += [(claim.rollout_id, claim.attempt.attempt_id, worker) for claim in claims]
    return claims_made


def claim_in_process(spec: str, worker: str, limit: int) -> Taken:
    async def work() -> Taken:
        store = open_store(spec)
        try:
            await asyncio.to_thread(_barrier.wait, 60)
            return await claim_all(store, worker, limit)
        finally:
            await store.close()

    return asyncio.run(work())


async def enqueue(store: LightningStore, first: int, count: int) -> None:
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=first + i) for i in range(count)])


async def trickle(store: LightningStore, first: int, count: int) -> None:
    for start in range(first, first + count, 20):
        await enqueue(store, start, min(20, first + count - start))
        await asyncio.sleep(0.002)


async def test_threads_and_processes_claim_each_rollout_once(place: Place) -> None:
    count = COUNTS.get(place.name, 5000)
    async with place.opened() as store:
        await enqueue(store, 0, count // 2)
        claims = await race(place, store, count)
        await _check(store, claims, count)


async def race(place: Place, store: LightningStore, count: int) -> Taken:
    """Let all claim at once while the second half of the rollouts arrives slowly; return the claims."""
    barrier = CONTEXT.Barrier(THREADS + PROCESSES + 1)

    def claim_in_thread(worker: str, limit: int) -> Taken:
        barrier.wait(60)
        return asyncio.run(claim_all(store, worker, limit))

    limits = (1, 1, 1, 7)
    async with place.everywhere(store) as spec:
        with (
            concurrent.futures.ThreadPoolExecutor(THREADS) as threads,
            concurrent.futures.ProcessPoolExecutor(PROCESSES, CONTEXT, _meet_at, (barrier,)) as processes,
        ):
            futures = [threads.submit(claim_in_thread, f"thread-{i}", limits[i % 4]) for i in range(THREADS)]
            futures += [
                processes.submit(claim_in_process, spec, f"process-{i}", limits[i % 4]) for i in range(PROCESSES)
            ]
            claiming = asyncio.gather(*map(asyncio.wrap_future, futures))
            await asyncio.to_thread(barrier.wait, 60)
            await trickle(store, count // 2, count - count // 2)
            return [claim for claims in await claiming for claim in claims]


async def _check(store: LightningStore, claims: Taken, count: int) -> None:
    rollouts = {rollout.rollout_id: rollout for rollout in await store.query_rollouts()}
    assert Counter(rollout_id for rollout_id, _, _ in claims) == Counter(dict.fromkeys(rollouts, 1))
    assert sorted(rollout.input for rollout in rollouts.values()) == list(range(count))
    for rollout_id, attempt_id, worker in claims:
        rollout: Any = rollouts[rollout_id]
        state = (rollout.status, rollout.attempt.attempt_id, rollout.attempt.sequence_id, rollout.attempt.worker_id)
        assert state == ("preparing", attempt_id, 1, worker)
    assert any(worker.startswith("thread") for _, _, worker in claims)
    assert any(worker.startswith("process") for _, _, worker in claims)
    statistics = await store.statistics()
    assert (statistics.get("total_rollouts"), statistics.get("total_attempts")) == (count, count)
    assert statistics.get("total_workers") == THREADS + PROCESSES
