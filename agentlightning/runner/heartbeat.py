"""Heartbeats: of a worker, with a snapshot of its host and the attempts that it holds; and of single attempts.

A worker's heartbeat renews the leases of the attempts that it names. What the store holds for the worker beside them
was claimed with a reply that never arrived, or has an end that could not be reported: its lease runs out. An attempt
has heartbeats of its own where its rollout limits the silence of an attempt (`unresponsive_seconds`)."""

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
    """Return the mode if it is one."""
    for known in get_args(HeartbeatMode):
        if mode == known:
            return known
    raise ValueError(f"Unsupported heartbeat launch mode: {mode!r}; expected 'thread' or 'asyncio'")


class Heartbeat:
    """Beats from `start` to `stop`, at once and then every `interval` seconds, more or less `jitter`; every second time
    while the worker holds nothing, when its questions for work say that it lives.

    Mode `thread` beats on an event loop in a thread of its own, so an agent that blocks the runner's loop does not
    lose its lease; mode `asyncio` beats on the runner's loop. An interval of 0 or less means no heartbeats.
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
        """Say once, before the first claim, that this worker lives: the claim of a worker that never beat has no lease.

        A store that is away is not waited for; the claim that follows notices. One that keeps no workers gets no more.
        """
        if self._interval > 0:
            try:
                await within(self._interval, self._store.update_worker(self._worker_id, attempts=self._held.ids()))
            except NotImplementedError:
                logger.warning("[%s] the store takes no heartbeats: a lost worker is not noticed", self._worker_id)
                self._interval = 0.0
            except Exception as error:  # as above: the claim that follows meets the same store and reports it
                logger.warning("[%s] heartbeat: not announced: %s: %s", self._worker_id, type(error).__name__, error)

    async def stop(self) -> None:
        """End the beats and what runs them."""
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
        except Exception as error:  # figures are a courtesy; the sign of life is what counts
            logger.warning("[%s] heartbeat: system_snapshot failed: %s", self._worker_id, error)
        try:
            beat = store.update_worker(self._worker_id, stats, attempts=self._held.ids())
            await within(self._interval, beat)
        except Exception as error:  # the next beat may get through; the lease tells if none does
            logger.warning("[%s] heartbeat: update failed: %s: %s", self._worker_id, type(error).__name__, error)


class HeldAttempts:
    """The attempts of one worker. Filled by the runner's loop, read by the thread of the heartbeats: each method is
    one operation on a set, which no other thread can interrupt."""

    def __init__(self) -> None:
        self._attempts: set[str] = set()

    def add(self, rollout: AttemptedRollout) -> None:
        """Name this attempt from now on."""
        self._attempts.add(rollout.attempt.attempt_id)

    def discard(self, rollout: AttemptedRollout) -> None:
        """Name it no longer: its end was reported, or could not be, and then its lease runs out."""
        self._attempts.discard(rollout.attempt.attempt_id)

    def ids(self) -> list[str]:
        """Return the ids of the attempts."""
        return list(self._attempts)


SHORTEST_INTERVAL = 0.05
SHORTEST_TRY = 1.0


class AttemptHeartbeats:
    """Renews the heartbeats of attempts while their agents run; like the worker's own, from a thread of its own or on
    the runner's loop. The thread starts with the first attempt that needs it; `close` ends it."""

    def __init__(self, store: LightningStore, name: str, mode: HeartbeatMode) -> None:
        self._store = store
        self._store_thread = StoreThread(store, f"{name}-attempts") if mode == "thread" else None

    @contextlib.asynccontextmanager
    async def during(self, rollout: AttemptedRollout) -> AsyncGenerator[None]:
        """Renew the heartbeat of this attempt within the block."""
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
