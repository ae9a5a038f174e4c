"""The groups in flight: one task of the loop for each, started, taken when it has ended, cancelled at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from agentlightning.training.flight.plan import GroupKey
from agentlightning.types import Rollout

Start = Callable[[GroupKey, Callable[[Sequence[Rollout]], None]], Coroutine[Any, Any, list[Rollout]]]
"""Runs a group and returns its rollouts at their end; tells the second argument of those that were enqueued."""


class Flight:
    """Belongs to the collection; used on its loop alone."""

    def __init__(self) -> None:
        self._tasks: dict[GroupKey, asyncio.Task[list[Rollout]]] = {}
        self._rollouts: dict[GroupKey, set[str]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, key: object) -> bool:
        return key in self._tasks

    @property
    def keys(self) -> list[GroupKey]:
        """The groups in flight, those that have ended and were not taken among them, in the order of the plan."""
        return sorted(self._tasks, key=lambda key: (key.place, key.take or ""))

    @property
    def rollouts(self) -> set[str]:
        """Their rollouts."""
        return {rollout_id for ids in self._rollouts.values() for rollout_id in ids}

    def start(self, key: GroupKey, start: Start) -> None:
        """Let a group run."""
        ids = self._rollouts[key] = set[str]()

        def note(rollouts: Sequence[Rollout]) -> None:
            ids.update(rollout.rollout_id for rollout in rollouts)

        self._tasks[key] = asyncio.ensure_future(start(key, note))

    async def take(self, among: Collection[GroupKey] | None = None) -> tuple[GroupKey, list[Rollout]]:
        """Return the next group that has ended, the first of the plan if there are several; it is in flight no longer.

        `among` waits for one of these. Raises what the group raised, such as an error of the store.
        """
        waiting = [key for key in self.keys if among is None or key in among]
        await asyncio.wait([self._tasks[key] for key in waiting], return_when=asyncio.FIRST_COMPLETED)
        key = next(key for key in waiting if self._tasks[key].done())
        task = self._tasks.pop(key)
        self._rollouts.pop(key)
        return key, task.result()

    async def quiet(self) -> None:
        """Return when every group has ended; they stay to be taken."""
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    async def close(self) -> None:
        """Cancel every group, and with it its rollouts, and wait until that is done."""
        tasks, self._tasks = list(self._tasks.values()), {}
        self._rollouts = {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
