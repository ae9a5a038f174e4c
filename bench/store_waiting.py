"""The time until a waiter or an idle runner is woken while spans arrive; the cost of a long wait on an idle store."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from agentlightning.store.base import LightningStore
from agentlightning.store.client_server import LightningStoreClient
from agentlightning.store.engine.store import EngineStore
from agentlightning.store.http.operations import POLL_SECONDS
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.store.sqlite import SQLiteLightningStore
from agentlightning.types import EnqueueRolloutRequest
from bench.store_children import Child, ClientPart
from bench.store_figures import Figure, percentile
from bench.store_server import StoreServer
from bench.store_spans import model_calls

SPANS_PER_SECOND = 1_000
IDS = 10_000
_BATCH = 10
_SETTLE_SECONDS = 5.0
"""Seconds after a change until frequent polling has slowed down."""


class SpanSource(ClientPart):
    """Adds spans to a store at an even pace, in batches of ten as an exporter does."""

    async def open(self) -> None:
        await super().open()
        self._work = asyncio.create_task(add_spans(self._store))

    async def close(self) -> None:
        self._work.cancel()
        await asyncio.gather(self._work, return_exceptions=True)
        await super().close()


async def add_spans(store: LightningStore) -> None:
    """Add spans until cancelled."""
    claim = await store.start_rollout({"task": "spans"}, worker_id="source")
    number, due = 1, time.monotonic()
    while True:
        await store.add_many_spans(model_calls(claim, number, _BATCH))
        number += _BATCH
        due += _BATCH / SPANS_PER_SECOND
        await asyncio.sleep(max(0.0, due - time.monotonic()))


class Sleeper(ClientPart):
    """Waits at a store for a rollout to end, or for work; reports its wake-up time (monotonic, equal in all
    processes)."""

    _store: LightningStore

    async def until_end(self, rollout_id: str) -> float:
        [_] = await self._store.wait_for_rollouts(rollout_ids=[rollout_id], timeout=20)
        return time.monotonic()

    async def until_work(self) -> tuple[float, str]:
        claim = await self._store.dequeue_rollout(worker_id="sleeper", timeout=20)
        assert claim is not None
        return time.monotonic(), claim.rollout_id

    async def wait_for(self, rollout_ids: list[str], seconds: float) -> None:
        assert await self._store.wait_for_rollouts(rollout_ids=rollout_ids, timeout=seconds) == []


async def _wake_ups(store: LightningStore, sleeper: Any, count: int, pause: float) -> dict[str, list[float]]:
    """Return the milliseconds from an end to the waiter and from new work to the runner.

    `sleeper(method, ...)` begins a call of a `Sleeper` and returns a function that returns its answer.
    """
    delays: dict[str, list[float]] = {"waiter": [], "idle runner": []}
    for _ in range(count):
        runner = sleeper("until_work")
        await asyncio.sleep(pause)
        began = time.monotonic()
        await store.enqueue_rollout({"task": 1})
        woken, rollout_id = await runner
        delays["idle runner"].append(1e3 * (woken - began))
        waiter = sleeper("until_end", rollout_id)
        await asyncio.sleep(pause)
        began = time.monotonic()
        await store.update_attempt(rollout_id, "latest", status="succeeded")
        delays["waiter"].append(1e3 * (await waiter - began))
    return delays


async def _wake_ups_in_process(count: int) -> dict[str, list[float]]:
    store = InMemoryLightningStore()
    inside = Sleeper("")
    inside._store = store  # the same calls, without a server in between
    source = asyncio.create_task(add_spans(store))
    delays = await _wake_ups(store, lambda method, *a: asyncio.create_task(getattr(inside, method)(*a)), count, 0.01)
    source.cancel()
    await asyncio.gather(source, return_exceptions=True)
    await store.close()
    return delays


async def wake_ups_over_http(endpoint: str, sleeper: Child, count: int) -> dict[str, list[float]]:
    """Return the milliseconds for a waiter and for an idle runner; `sleeper` is in a separate process."""
    store = LightningStoreClient(endpoint)
    delays = await _wake_ups(
        store, lambda method, *a: asyncio.create_task(asyncio.to_thread(sleeper.call, method, *a)), count, 0.03
    )
    await store.close()
    return delays


def measure_wake_ups(quick: bool) -> list[Figure]:
    """Measure wake-ups while the store takes 1,000 spans a second: in process, and over HTTP out of another process."""
    count = 30 if quick else 200
    figures = [
        Figure(f"wake-up in process: {who}, {name} ms", value, 10, at_most=True)
        for who, delays in asyncio.run(_wake_ups_in_process(count)).items()
        for name, value in (("median", percentile(delays, 0.5)), ("p99", percentile(delays, 0.99)))
    ]
    for kind in ("memory", "sqlite"):
        with Child(StoreServer, kind) as server, Child(SpanSource, server.opened), Child(Sleeper, server.opened) as one:
            for who, delays in asyncio.run(wake_ups_over_http(server.opened, one, count)).items():
                for name, value, bound in (
                    ("median", percentile(delays, 0.5), 30),
                    ("p99", percentile(delays, 0.99), 60),
                ):
                    figures.append(Figure(f"wake-up over http, {kind}: {who}, {name} ms", value, bound, at_most=True))
    return figures


@contextlib.asynccontextmanager
async def _opened(kind: str) -> AsyncIterator[EngineStore]:
    with tempfile.TemporaryDirectory() as folder:
        store = InMemoryLightningStore() if kind == "memory" else SQLiteLightningStore(Path(folder) / "bench.db")
        yield store
        await store.close()


async def _enqueue(store: LightningStore) -> list[str]:
    requests = [EnqueueRolloutRequest(input={"task": number}) for number in range(IDS)]
    pages = [await store.enqueue_many_rollouts(requests[first : first + 1000]) for first in range(0, IDS, 1000)]
    return [rollout.rollout_id for page in pages for rollout in page]


async def _cost_in_process(kind: str, seconds: float) -> tuple[float, float, float]:
    """Return the CPU milliseconds per second of a store without a wait and with one, and those to begin the wait."""
    async with _opened(kind) as store:
        rollout_ids = await _enqueue(store)
        await asyncio.sleep(_SETTLE_SECONDS)
        rested = time.process_time()
        await asyncio.sleep(seconds)
        before = time.process_time()
        waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=rollout_ids))
        await asyncio.sleep(_SETTLE_SECONDS)
        begun = time.process_time()
        await asyncio.sleep(seconds)
        cost = time.process_time() - begun
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return 1e3 * (before - rested) / seconds, 1e3 * cost / seconds, 1e3 * (begun - before)


async def _ids_over_http(endpoint: str) -> list[str]:
    store = LightningStoreClient(endpoint)
    rollout_ids = await _enqueue(store)
    await store.close()
    return rollout_ids


def measure_long_waits(quick: bool) -> list[Figure]:
    """Measure the cost of a wait for 10,000 rollouts: in process, and over HTTP at both ends, with renewed polls."""
    figures: list[Figure] = []
    for kind in ("memory", "sqlite"):
        idle, cost, begin = asyncio.run(_cost_in_process(kind, 5.0 if quick else 15.0))
        note = f"idle store {idle:.2f}; {begin:.0f} ms to begin"
        figures.append(
            Figure(f"wait for {IDS:,} ids, {kind} in process: CPU ms per s", cost - idle, 2.0, at_most=True, note=note)
        )
    window = (1 if quick else 2) * POLL_SECONDS
    with contextlib.ExitStack() as stack:
        ends = {kind: stack.enter_context(Child(StoreServer, kind)) for kind in ("memory", "sqlite")}
        waiters = {kind: stack.enter_context(Child(Sleeper, server.opened)) for kind, server in ends.items()}
        rollout_ids = {kind: asyncio.run(_ids_over_http(server.opened)) for kind, server in ends.items()}
        idle_costs = _cpu_ms(ends, waiters, window)
        for kind in ends:
            waiters[kind].ask("wait_for", rollout_ids[kind], window + _SETTLE_SECONDS + 7.0)
        for kind, (server_ms, client_ms) in _cpu_ms(ends, waiters, window).items():
            added = server_ms + client_ms - sum(idle_costs[kind])
            note = f"server {server_ms:.2f} (idle {idle_costs[kind][0]:.2f}), client {client_ms:.2f}"
            name = f"wait for {IDS:,} ids, {kind} over http: CPU ms per s"
            figures.append(Figure(name, added, 2.0, at_most=True, note=note))
        for child in waiters.values():
            child.answer()
    return figures


def _cpu_ms(servers: dict[str, Child], clients: dict[str, Child], window: float) -> dict[str, tuple[float, float]]:
    """Return the CPU milliseconds per second of each server and its client in so many seconds from soon on."""
    time.sleep(_SETTLE_SECONDS)
    before = {kind: (servers[kind].cpu_seconds(), clients[kind].cpu_seconds()) for kind in servers}
    time.sleep(window)
    return {
        kind: (
            1e3 * (servers[kind].cpu_seconds() - server) / window,
            1e3 * (clients[kind].cpu_seconds() - client) / window,
        )
        for kind, (server, client) in before.items()
    }
