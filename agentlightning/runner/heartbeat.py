"""Heartbeats of a worker: they carry a snapshot of the host and renew the lease of what the worker has claimed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import random
from typing import Any, Literal, get_args

from agentlightning.store.base import LightningStore
from agentlightning.tracer.handle import StoreHandle
from agentlightning.utils.system_snapshot import system_snapshot
from agentlightning.utils.within import within

logger = logging.getLogger(__name__)

HeartbeatMode = Literal["thread", "asyncio"]
SHORTEST_WAIT = 0.01


def check_mode(mode: str) -> HeartbeatMode:
    """Return the mode if it is one.

    Raises:
        ValueError: it is none.
    """
    for known in get_args(HeartbeatMode):
        if mode == known:
            return known
    raise ValueError(f"Unsupported heartbeat launch mode: {mode!r}; expected 'thread' or 'asyncio'")


class Heartbeat:
    """Beats from `start` to `stop`, at once and then every `interval` seconds, more or less `jitter`.

    Mode `thread` beats on an event loop in a thread of its own, so an agent that blocks the runner's loop does not
    lose its lease; mode `asyncio` beats on the runner's loop. An interval of 0 or less means no heartbeats.
    """

    def __init__(
        self,
        store: LightningStore,
        worker_id: str,
        *,
        interval: float,
        jitter: float,
        mode: HeartbeatMode,
        include_gpu: bool,
    ) -> None:
        self._store = store
        self._worker_id = worker_id
        self._interval = interval
        self._jitter = jitter
        self._mode = mode
        self._include_gpu = include_gpu
        self._handle: StoreHandle | None = None
        self._beating: asyncio.Task[None] | concurrent.futures.Future[None] | None = None

    def start(self) -> None:
        """Begin; needs a running event loop."""
        if self._interval <= 0:
            return
        if self._mode == "asyncio":
            self._beating = asyncio.create_task(self._beat(self._store), name=f"{self._worker_id}-heartbeat")
            return
        self._handle = StoreHandle(self._store, f"{self._worker_id}-heartbeat")
        self._beating = self._handle.call(self._beat)

    async def announce(self) -> None:
        """Say once, before the first claim, that this worker lives: the claim of a worker that never beat has no lease.

        A store that is away is not waited for; whoever claims notices. One that keeps no workers is told nothing more.
        """
        if self._interval > 0:
            try:
                await within(self._interval, self._store.update_worker(self._worker_id))
            except NotImplementedError:
                logger.warning("[%s] the store takes no heartbeats: a lost worker is not noticed", self._worker_id)
                self._interval = 0.0
            except Exception as error:  # as above: the claim that follows meets the same store and reports it
                logger.warning("[%s] heartbeat: not announced: %s: %s", self._worker_id, type(error).__name__, error)

    async def stop(self) -> None:
        """End the beats and what runs them."""
        beating, handle = self._beating, self._handle
        self._beating = self._handle = None
        if beating is not None:
            beating.cancel()
        if isinstance(beating, asyncio.Task):
            await asyncio.wait({beating})
        if handle is not None:
            await asyncio.to_thread(handle.close)

    async def _beat(self, store: LightningStore) -> None:
        while True:
            try:
                await within(self._interval, store.update_worker(self._worker_id, await self._snapshot()))
            except Exception as error:  # the next beat may get through; the lease tells if none does
                logger.warning("[%s] heartbeat: update failed: %s: %s", self._worker_id, type(error).__name__, error)
            await asyncio.sleep(max(SHORTEST_WAIT, self._interval + random.uniform(-self._jitter, self._jitter)))

    async def _snapshot(self) -> dict[str, Any]:
        try:
            if self._mode == "thread":
                return system_snapshot(self._include_gpu)
            return await within(self._interval, asyncio.to_thread(system_snapshot, self._include_gpu))
        except Exception as error:  # figures are a courtesy; the sign of life is what counts
            logger.warning("[%s] heartbeat: system_snapshot failed: %s", self._worker_id, error)
            return {}
