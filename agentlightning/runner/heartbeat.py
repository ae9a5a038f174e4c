"""Heartbeats of a worker, with a snapshot of its host and its current attempts, and of single attempts.

A worker's heartbeat renews the leases of the attempts that it lists. The leases of other attempts of the worker run
out: the reply to their claim never arrived, or their end could not be reported. An attempt has its own heartbeats if
its rollout limits the time without one (`unresponsive_seconds`). As often as it sends heartbeats, the worker asks the
store for the rollouts of its longer attempts, and ends those whose result can no longer count, so that their programs
and sandboxes do not run on."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from functools import partial
from typing import Literal

from agentlightning.runner.outcome import AttemptOver
from agentlightning.store.base import LightningStore
from agentlightning.tracer.store_thread import StoreThread
from agentlightning.types import AttemptedRollout
from agentlightning.utils.concurrency.loops import within
from agentlightning.utils.id import SYSTEM_RANDOM
from agentlightning.utils.system_snapshot import system_snapshot

logger = logging.getLogger(__name__)

HeartbeatMode = Literal["thread", "asyncio"]
SHORTEST_WAIT = 0.01
SHORTEST_INTERVAL = 0.05
SHORTEST_TRY = 1.0


class Heartbeats:
    """Sends the heartbeats of a worker during `of_worker`: immediately, then every `interval` seconds plus or minus
    `jitter`, and half as often while the worker is idle, because its requests for work also show that it is alive. With
    an interval of 0 or less there are no such heartbeats. During `of_attempt` it sends those of one attempt.

    Mode `thread` uses an event loop in its own thread, so an agent that blocks the runner's loop keeps its lease; mode
    `asyncio` uses the runner's loop.
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
        self.held = set[str]()
        """Ids of the worker's current attempts, which its heartbeats list. The runner's loop changes it, and operations
        on a set are atomic."""
        self._running: dict[str, tuple[AttemptedRollout, Callable[[str], object]]] = {}
        """By the id of an attempt: its rollout, and what ends the attempt."""
        self._clock_offset = 0.0
        """Seconds by which the store's clock is ahead of this machine's, from the last response to a heartbeat."""
        self._interval = interval
        self._jitter = jitter
        self._include_gpu = include_gpu
        self._store_thread = StoreThread(store, f"{worker_id}-heartbeat") if mode == "thread" else None

    @contextlib.asynccontextmanager
    async def of_worker(self) -> AsyncGenerator[None]:
        """Send heartbeats of the worker during the block, and end the thread with it.

        The first one is sent before the first claim, because the claim of a worker without a heartbeat has no lease. It
        does not wait for an unreachable store; the next claim reports that. A store without workers gets no more of
        them.
        """
        beats = self._interval > 0
        if beats:
            try:
                await within(self._interval, self._send(self._store))
            except NotImplementedError:
                logger.warning("[%s] the store has no heartbeats: lost workers are not detected", self._worker_id)
                beats = False
            except Exception as error:  # as above: the next claim reports it
                logger.warning("[%s] first heartbeat failed: %s: %s", self._worker_id, type(error).__name__, error)
        works = [self._begin(work) for work in (self._beat, self._watch)] if beats else []
        try:
            yield
        finally:
            for work in works:
                work.cancel()
            if tasks := {work for work in works if isinstance(work, asyncio.Task)}:
                await asyncio.wait(tasks)
            await asyncio.to_thread(self.close)

    @contextlib.contextmanager
    def holding(self, rollout: AttemptedRollout) -> Generator[None]:
        """List an attempt in the heartbeats during the block. After it, the end is reported, or the lease runs out."""
        self.held.add(rollout.attempt.attempt_id)
        try:
            yield
        finally:
            self.held.discard(rollout.attempt.attempt_id)

    @contextlib.asynccontextmanager
    async def of_attempt(self, rollout: AttemptedRollout) -> AsyncGenerator[None]:
        """Send heartbeats of this attempt during the block, and end the block when its result can no longer count.

        Raises:
            AttemptOver: the rollout has ended, or a later attempt of it has started.
        """
        silence, id, why = rollout.config.unresponsive_seconds, rollout.attempt.attempt_id, list[str]()
        loop, limit = asyncio.get_running_loop(), asyncio.timeout(None)

        def end(reason: str) -> None:
            if id in self._running and not why:
                why.append(reason)
                limit.reschedule(loop.time())

        renewing = None
        if silence is not None:
            renewing = self._begin(partial(self._renew, rollout, max(silence / 3, SHORTEST_INTERVAL)))
        try:
            async with limit:
                self._running[id] = (rollout, partial(loop.call_soon_threadsafe, end))
                try:
                    yield
                finally:
                    del self._running[id]
        except TimeoutError as error:
            if not why:
                raise
            raise AttemptOver(why[0]) from error
        finally:
            if renewing is not None:
                renewing.cancel()

    def close(self) -> None:
        """End the thread, if there is one. May be called twice; a later heartbeat starts another one."""
        if self._store_thread is not None:
            self._store_thread.close()

    def _begin(
        self, work: Callable[[LightningStore], Coroutine[object, None, None]]
    ) -> asyncio.Task[None] | concurrent.futures.Future[None]:
        if self._store_thread is not None:
            return self._store_thread.call(work)
        return asyncio.create_task(work(self._store), name=f"{self._worker_id}-heartbeat")

    async def _beat(self, store: LightningStore) -> None:
        rested = True
        while True:
            rested = not rested and not self.held
            if not rested:
                await self._beat_once(store)
            await asyncio.sleep(max(SHORTEST_WAIT, self._interval + SYSTEM_RANDOM.uniform(-self._jitter, self._jitter)))

    async def _beat_once(self, store: LightningStore) -> None:
        stats: dict[str, object] = {}
        try:
            if self._store_thread is not None:
                stats = system_snapshot(self._include_gpu)
            else:
                stats = await within(self._interval, asyncio.to_thread(system_snapshot, self._include_gpu))
        except Exception as error:  # the figures are optional; the heartbeat itself counts
            logger.warning("[%s] heartbeat without system snapshot: %s", self._worker_id, error)
        try:
            await within(self._interval, self._send(store, stats))
        except Exception as error:  # the next one may get through; otherwise the lease runs out
            logger.warning("[%s] heartbeat failed: %s: %s", self._worker_id, type(error).__name__, error)

    async def _watch(self, store: LightningStore) -> None:
        before = set[str]()
        while True:
            await asyncio.sleep(max(SHORTEST_WAIT, self._interval))
            running = dict(self._running)
            longer = [running[id] for id in before & running.keys()]
            before = set(running)
            try:
                if longer:
                    await within(max(self._interval, SHORTEST_TRY), _end_over(longer, store))
            except NotImplementedError:
                text = "[%s] the store has no query_rollouts: attempts of cancelled rollouts run to their end"
                logger.warning(text, self._worker_id)
                return
            except Exception as error:  # the next one may get through
                logger.debug("[%s] query for ended rollouts failed: %s", self._worker_id, error)

    async def _send(self, store: LightningStore, *stats: dict[str, object]) -> None:
        before = time.time()
        worker = await store.update_worker(self._worker_id, *stats, attempts=list(self.held))
        noted = getattr(worker, "last_heartbeat_time", None)  # a user's store may return nothing
        if noted is not None:
            self._clock_offset = noted - (before + time.time()) / 2

    async def _renew(self, rollout: AttemptedRollout, interval: float, store: LightningStore) -> None:
        attempt = rollout.attempt
        while True:
            await asyncio.sleep(interval)
            try:
                alive_at = time.time() + self._clock_offset
                sign = store.update_attempt(rollout.rollout_id, attempt.attempt_id, last_heartbeat_time=alive_at)
                await within(max(interval, SHORTEST_TRY), sign)
            except Exception as error:  # the next one may get through
                logger.debug("[Rollout %s] heartbeat of the attempt failed: %s", rollout.rollout_id, error)


async def _end_over(running: list[tuple[AttemptedRollout, Callable[[str], object]]], store: LightningStore) -> None:
    """End those of the running attempts whose result can no longer count."""
    ids = sorted({rollout.rollout_id for rollout, _ in running})
    rollouts = {each.rollout_id: each for each in await store.query_rollouts(rollout_id_in=ids)}
    for own, end in running:
        found = rollouts.get(own.rollout_id)
        if found is None:
            continue
        if found.status in ("cancelled", "failed"):
            end(f"The rollout has ended ({found.status})")
        elif isinstance(found, AttemptedRollout) and found.attempt.sequence_id > own.attempt.sequence_id:
            end("A later attempt of the rollout has started")
