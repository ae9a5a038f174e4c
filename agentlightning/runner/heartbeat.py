"""Heartbeats of a worker, with a snapshot of its host and the attempts that it holds, and of single attempts.

A worker's heartbeat renews the leases of the attempts that it names. Other attempts of the worker in the store were
claimed with a reply that never arrived, or have an end that could not be reported: their leases run out. An attempt has
its own heartbeats if its rollout limits the silence of an attempt (`unresponsive_seconds`)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from typing import Literal, get_args

from agentlightning.store.base import LightningStore
from agentlightning.tracer.store_thread import StoreThread
from agentlightning.types import AttemptedRollout
from agentlightning.utils.concurrency.loops import within
from agentlightning.utils.id import SYSTEM_RANDOM
from agentlightning.utils.system_snapshot import system_snapshot

logger = logging.getLogger(__name__)

HeartbeatMode = Literal["thread", "asyncio"]
SHORTEST_WAIT = 0.01


def check_mode(mode: str) -> HeartbeatMode:
    """Return the mode if it is valid."""
    for choice in get_args(HeartbeatMode):
        if mode == choice:
            return choice
    raise ValueError(f"Unsupported heartbeat launch mode: {mode!r}; expected 'thread' or 'asyncio'")


class Heartbeat:
    """Sends heartbeats from `start` to `stop`, at once and then every `interval` seconds, plus or minus `jitter`; only
    every second one while the worker is idle, because its requests for work also show that it is alive.

    Mode `thread` uses an event loop in its own thread, so an agent that blocks the runner's loop keeps its lease; mode
    `asyncio` uses the runner's loop. An interval of 0 or less means no heartbeats.
    """

    def __init__(
        self,
        store: LightningStore,
        worker_id: str,
        held: HeldAttempts,
        *,
        interval: float,
        jitter: float,
        mode: HeartbeatMode,
        include_gpu: bool,
    ) -> None:
        self._store = store
        self._worker_id = worker_id
        self._held = held
        self._interval = interval
        self._jitter = jitter
        self._mode = mode
        self._include_gpu = include_gpu
        self._store_thread: StoreThread | None = None
        self._beating: asyncio.Task[None] | concurrent.futures.Future[None] | None = None

    def start(self) -> None:
        """Begin; needs a running event loop."""
        if self._interval <= 0:
            return
        if self._mode == "asyncio":
            self._beating = asyncio.create_task(self._beat(self._store), name=f"{self._worker_id}-heartbeat")
            return
        self._store_thread = StoreThread(self._store, f"{self._worker_id}-heartbeat")
        self._beating = self._store_thread.call(self._beat)

    async def announce(self) -> None:
        """Send one heartbeat before the first claim: the claim of a worker without a heartbeat has no lease.

        Do not wait for an unreachable store; the next claim reports it. A store without workers gets no further ones.
        """
        if self._interval > 0:
            try:
                await within(self._interval, self._store.update_worker(self._worker_id, attempts=self._held.ids()))
            except NotImplementedError:
                logger.warning("[%s] the store takes no heartbeats: a lost worker is not noticed", self._worker_id)
                self._interval = 0.0
            except Exception as error:  # as above: the next claim reports it
                logger.warning("[%s] heartbeat: not announced: %s: %s", self._worker_id, type(error).__name__, error)

    async def stop(self) -> None:
        """Stop the heartbeats and their thread or task."""
        beating, store_thread = self._beating, self._store_thread
        self._beating = self._store_thread = None
        if beating is not None:
            beating.cancel()
        if isinstance(beating, asyncio.Task):
            await asyncio.wait({beating})
        if store_thread is not None:
            await asyncio.to_thread(store_thread.close)

    async def _beat(self, store: LightningStore) -> None:
        rested = True
        while True:
            rested = not rested and not self._held.ids()
            if not rested:
                await self._beat_once(store)
            await asyncio.sleep(max(SHORTEST_WAIT, self._interval + SYSTEM_RANDOM.uniform(-self._jitter, self._jitter)))

    async def _beat_once(self, store: LightningStore) -> None:
        stats: dict[str, object] = {}
        try:
            if self._mode == "thread":
                stats = system_snapshot(self._include_gpu)
            else:
                stats = await within(self._interval, asyncio.to_thread(system_snapshot, self._include_gpu))
        except Exception as error:  # the figures are optional; the heartbeat itself counts
            logger.warning("[%s] heartbeat: system_snapshot failed: %s", self._worker_id, error)
        try:
            beat = store.update_worker(self._worker_id, stats, attempts=self._held.ids())
            await within(self._interval, beat)
        except Exception as error:  # the next one may get through; otherwise the lease runs out
            logger.warning("[%s] heartbeat: update failed: %s: %s", self._worker_id, type(error).__name__, error)


class HeldAttempts:
    """The attempts of one worker. The runner's loop writes it, the heartbeat thread reads it: each method is one
    operation on a set, which no other thread can interrupt."""

    def __init__(self) -> None:
        self._attempts: set[str] = set()

    def add(self, rollout: AttemptedRollout) -> None:
        """Name this attempt in heartbeats from now on."""
        self._attempts.add(rollout.attempt.attempt_id)

    def discard(self, rollout: AttemptedRollout) -> None:
        """Stop naming it: its end was reported, or could not be, so that its lease runs out."""
        self._attempts.discard(rollout.attempt.attempt_id)

    def ids(self) -> list[str]:
        """Return the ids of the attempts."""
        return list(self._attempts)


SHORTEST_INTERVAL = 0.05
SHORTEST_TRY = 1.0


class AttemptHeartbeats:
    """Sends heartbeats of attempts while their agents run; like the worker's, from its own thread or on the runner's
    loop. The thread starts with the first attempt that needs it; `close` ends it."""

    def __init__(self, store: LightningStore, name: str, mode: HeartbeatMode) -> None:
        self._store = store
        self._store_thread = StoreThread(store, f"{name}-attempts") if mode == "thread" else None

    @contextlib.asynccontextmanager
    async def during(self, rollout: AttemptedRollout) -> AsyncGenerator[None]:
        """Send heartbeats of this attempt during the block."""
        silence = rollout.config.unresponsive_seconds
        if silence is None:
            yield
            return
        interval = max(silence / 3, SHORTEST_INTERVAL)
        if self._store_thread is not None:
            renewing = self._store_thread.call(lambda store: _renew(store, rollout, interval))
        else:
            renewing = asyncio.create_task(_renew(self._store, rollout, interval))
        try:
            yield
        finally:
            renewing.cancel()

    def close(self) -> None:
        """End the thread, if there is one. May be called twice."""
        if self._store_thread is not None:
            self._store_thread.close()


async def _renew(store: LightningStore, rollout: AttemptedRollout, interval: float) -> None:
    while True:
        await asyncio.sleep(interval)
        try:
            sign = store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, last_heartbeat_time=time.time())
            await within(max(interval, SHORTEST_TRY), sign)
        except Exception as error:  # the next one may get through
            logger.debug("[Rollout %s] heartbeat of the attempt failed: %s", rollout.rollout_id, error)
