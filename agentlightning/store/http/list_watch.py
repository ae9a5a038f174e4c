"""Workers and resources as events: their lists are short and have no numbered changes, so they are compared.

One look a second for all streams together, and none while nobody follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from agentlightning.errors import AgentLightningError
from agentlightning.store.base import LightningStore
from agentlightning.types import ResourcesUpdate, Worker

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
_MOST: Final = 1000
"""Messages that wait for one client; what is told beyond that is told by a later look."""
_OF_WORKER: Final = ("worker_id", "status", "run_id", "current_rollout_id", "current_attempt_id", "last_busy_time")

Told = tuple[str, dict[str, Any]]
"""The name of an event, and its data."""


class ListWatch:
    """Looks at the workers and the resources of a store, and tells those who follow what has changed since."""

    def __init__(self, store: Callable[[], LightningStore], *, look_seconds: float = LOOK_SECONDS) -> None:
        self._store = store
        self._look_seconds = look_seconds
        self._followers: set[asyncio.Queue[Told]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._known: dict[tuple[str, str], dict[str, Any]] = {}

    @asynccontextmanager
    async def follow(self) -> AsyncGenerator[asyncio.Queue[Told]]:
        """Give a queue of what changes from now on. The first look tells who begins to follow where each stands."""
        queue = asyncio.Queue[Told](_MOST)
        self._followers.add(queue)
        for told in self._known.items():
            _offer(queue, (told[0][0], told[1]))
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look())
        try:
            yield queue
        finally:
            self._followers.discard(queue)
            if not self._followers and self._looking is not None:
                looking, self._looking = self._looking, None
                self._known = {}
                looking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await looking

    async def _look(self) -> None:
        while True:
            try:
                self._compare(await self._lists())
            except NotImplementedError:
                return  # a store that has no such lists
            except (AgentLightningError, OSError) as error:
                logger.debug("workers and resources could not be listed for those who follow: %s", error)
            await asyncio.sleep(self._look_seconds)

    async def _lists(self) -> dict[tuple[str, str], dict[str, Any]]:
        store = self._store()
        found = {("worker", worker.worker_id): _of_worker(worker) for worker in await store.query_workers()}
        return found | {
            ("resources", update.resources_id): _of_resources(update) for update in await store.query_resources()
        }

    def _compare(self, found: Mapping[tuple[str, str], dict[str, Any]]) -> None:
        for place, data in found.items():
            if self._known.get(place) != data:
                for queue in self._followers:
                    _offer(queue, (place[0], data))
        self._known = dict(found)


def _offer(queue: asyncio.Queue[Told], told: Told) -> None:
    with contextlib.suppress(asyncio.QueueFull):
        queue.put_nowait(told)


def _of_worker(worker: Worker) -> dict[str, Any]:
    return {name: getattr(worker, name) for name in _OF_WORKER}


def _of_resources(update: ResourcesUpdate) -> dict[str, Any]:
    return {"resources_id": update.resources_id, "version": update.version, "run_id": update.run_id}
