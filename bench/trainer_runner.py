"""One runner process over HTTP: its memory, and its cost while idle and with 200 rollouts at once."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import psutil

import agentlightning as agl
from agentlightning.store.client_server import LightningStoreClient
from agentlightning.types import EnqueueRolloutRequest
from bench.store_children import Child, ClientPart
from bench.store_figures import Figure
from bench.store_server import StoreServer

AT_ONCE = 200


class RunnerProcess(ClientPart):
    """A part that serves the queue of a store as a runner process does."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self._stop = threading.Event()
        self._together = asyncio.Event()
        self._running = 0
        self._peak = 0

    async def open(self) -> None:
        await super().open()
        self._runner = agl.LitAgentRunner[Any](agl.OtelTracer(), concurrency=AT_ONCE)
        self._context = self._runner.run_context(agent=agl.rollout(self._agent), store=self._store)
        self._context.__enter__()
        self._serving = asyncio.create_task(self._runner.iter(event=self._stop))

    async def close(self) -> None:
        self._stop.set()
        await self._serving
        self._context.__exit__(None, None, None)
        await super().close()

    async def memory(self) -> int:
        """Return the resident bytes."""
        return psutil.Process().memory_info().rss

    async def peak(self) -> int:
        """Return the resident bytes while the most rollouts run at once."""
        return self._peak

    async def _agent(self, task: int) -> float:
        for step in range(4):
            agl.emit_annotation({"step": step, "task": task})
        if task >= 0:
            self._running += 1
            if self._running == AT_ONCE:
                self._peak = psutil.Process().memory_info().rss
                self._together.set()
            await self._together.wait()
        return 0.5


def measure_runner(quick: bool) -> list[Figure]:
    """Measure one runner process; the store is a separate process."""
    seconds = 3.0 if quick else 15.0
    with Child(StoreServer, "memory") as server, Child(RunnerProcess, server.opened) as runner:
        asyncio.run(_run_tasks(server.opened, [-1]))
        time.sleep(1.0)
        weight, busy = runner.call("memory"), runner.cpu_seconds()
        time.sleep(seconds)
        share = (runner.cpu_seconds() - busy) / seconds
        began = time.monotonic()
        asyncio.run(_run_tasks(server.opened, list(range(AT_ONCE))))
        took = time.monotonic() - began
        extra = runner.call("peak") - weight
    return [
        Figure("a runner process: MB", weight / 1e6, 120, at_most=True),
        Figure("an idle runner process: % of a core", 100 * share, 1.0, at_most=True),
        Figure(
            f"{AT_ONCE} async rollouts at once in one runner: MiB extra",
            extra / 2**20,
            64,
            at_most=True,
            note=f"all of them in {took:.2f} s",
        ),
    ]


async def _run_tasks(endpoint: str, tasks: list[int]) -> None:
    store = LightningStoreClient(endpoint)
    queued = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=task) for task in tasks])
    done = await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in queued], timeout=60)
    assert [rollout.status for rollout in done] == ["succeeded"] * len(tasks)
    await store.close()
