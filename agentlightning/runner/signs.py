"""Signs of life of single attempts, where a rollout limits the silence of an attempt (`unresponsive_seconds`)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import time
from collections.abc import AsyncGenerator

from agentlightning.runner.heartbeat import HeartbeatMode
from agentlightning.store.base import LightningStore
from agentlightning.tracer.handle import StoreHandle
from agentlightning.types import AttemptedRollout

logger = logging.getLogger(__name__)

SHORTEST_INTERVAL = 0.05


class SignsOfLife:
    """Renews the heartbeats of attempts while their agents run; like the worker's own, from a thread of its own or on
    the runner's loop. The thread starts with the first attempt that needs it; `close` ends it."""

    def __init__(self, store: LightningStore, name: str, mode: HeartbeatMode) -> None:
        self._store = store
        self._handle = StoreHandle(store, f"{name}-attempts") if mode == "thread" else None

    @contextlib.asynccontextmanager
    async def during(self, rollout: AttemptedRollout) -> AsyncGenerator[None]:
        """Renew the heartbeat of this attempt within the block."""
        silence = rollout.config.unresponsive_seconds
        if silence is None:
            yield
            return
        renewing = self._start(rollout, max(silence / 3, SHORTEST_INTERVAL))
        try:
            yield
        finally:
            renewing.cancel()

    def close(self) -> None:
        """End the thread, if there is one. May be called twice."""
        if self._handle is not None:
            self._handle.close()

    def _start(
        self, rollout: AttemptedRollout, interval: float
    ) -> asyncio.Task[None] | concurrent.futures.Future[None]:
        if self._handle is not None:
            return self._handle.call(lambda store: _renew(store, rollout, interval))
        return asyncio.create_task(_renew(self._store, rollout, interval))


async def _renew(store: LightningStore, rollout: AttemptedRollout, interval: float) -> None:
    while True:
        await asyncio.sleep(interval)
        try:
            await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, last_heartbeat_time=time.time())
        except Exception as error:  # the next one may get through
            logger.debug("[Rollout %s] heartbeat of the attempt failed: %s", rollout.rollout_id, error)
