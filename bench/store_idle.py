"""The cost of a thousand waiting runners for a store server, and the time until one of them gets work."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator

from agentlightning.runner.claims import HOLD_SPREAD, LONGEST_HOLD
from agentlightning.store.client_server import LightningStoreClient
from bench.store_children import Child, ClientPart
from bench.store_durable import postgres_server
from bench.store_figures import Figure, percentile
from bench.store_server import StoreServer

POLLS = 1_000
POLL_SECONDS = LONGEST_HOLD
"""Longest time that a runner asks the store to hold its request open."""
_TARGETS = {"memory": 3.0, "sqlite": 3.0, "postgres": 8.0}


class IdleRunners(ClientPart):
    """Many workers of one process that claim and finish all work; reports when each task was claimed (monotonic)."""

    async def open(self) -> None:
        await super().open()
        self._claimed: list[float] = []
        self._polls = [asyncio.create_task(self._poll(f"idle-{number}")) for number in range(POLLS)]

    async def close(self) -> None:
        for poll in self._polls:
            poll.cancel()
        await asyncio.gather(*self._polls, return_exceptions=True)
        await super().close()

    async def claimed(self) -> list[float]:
        return self._claimed

    async def _poll(self, worker_id: str) -> None:
        while True:
            hold = POLL_SECONDS * random.uniform(1 - HOLD_SPREAD, 1)
            claim = await self._store.dequeue_rollout(worker_id=worker_id, timeout=hold)
            if claim is not None:
                self._claimed.append(time.monotonic())
                attempt_id = claim.attempt.attempt_id
                await self._store.update_attempt(claim.rollout_id, attempt_id, status="succeeded")


async def _enqueue_one_by_one(endpoint: str, count: int) -> list[float]:
    """Return the time at which each task was enqueued."""
    store = LightningStoreClient(endpoint)
    began: list[float] = []
    for number in range(count):
        await asyncio.sleep(0.1)
        began.append(time.monotonic())
        await store.enqueue_rollout({"task": number})
    await asyncio.sleep(1.0)
    await store.close()
    return began


@contextlib.contextmanager
def _server(kind: str) -> Iterator[Child]:
    with contextlib.ExitStack() as stack:
        where = stack.enter_context(postgres_server()) if kind == "postgres" else kind
        yield stack.enter_context(Child(StoreServer, where))


def measure_idle_polls(quick: bool) -> list[Figure]:
    """Measure the processor time of a server at which a thousand workers wait for work, and their wake-ups."""
    window, tasks = (10.0, 50) if quick else (30.0, 200)
    figures: list[Figure] = []
    for kind, target in _TARGETS.items():
        name = f"{POLLS:,} idle polls of {POLL_SECONDS:g} s, {kind}"
        try:
            with _server(kind) as server, Child(IdleRunners, server.opened) as runners:
                time.sleep(4 * POLL_SECONDS)  # until all are waiting and spread over time
                before = server.cpu_seconds()
                time.sleep(window)
                share = 100 * (server.cpu_seconds() - before) / window
                began = asyncio.run(_enqueue_one_by_one(server.opened, tasks))
                delays = [1e3 * (end - start) for start, end in zip(began, runners.call("claimed"), strict=True)]
        except LookupError as reason:
            figures.append(Figure(f"{name}: % of a core", None, target, at_most=True, note=str(reason)))
            continue
        slowest = f"slowest {max(delays):.1f}"
        figures.append(Figure(f"{name}: % of a core", share, target, at_most=True))
        figures.append(Figure(f"{name}: wake-up, p99 ms", percentile(delays, 0.99), 60, at_most=True, note=slowest))
    return figures
