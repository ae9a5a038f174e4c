"""Open work: the rollouts that somebody still has to run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from agentlightning.execution.base import AlgorithmBundle
from agentlightning.store.base import QUEUING, RUNNING, LightningStore


def view_of(algorithm: AlgorithmBundle, store: LightningStore) -> LightningStore:
    """Return the store as this run sees it."""
    scope: Callable[[LightningStore], LightningStore] | None = getattr(algorithm, "scope", None)
    return scope(store) if scope is not None else store


def open_work_counter(algorithm: AlgorithmBundle, store: LightningStore) -> Callable[[], Awaitable[int]]:
    """Return a coroutine function that counts the rollouts of this run that are not at an end."""
    view = view_of(algorithm, store)
    unfinished = sorted(QUEUING | RUNNING)

    async def count() -> int:
        try:
            return (await view.query_rollouts(status_in=unfinished, limit=1)).total
        except NotImplementedError:  # a store of the user's that cannot tell
            return 0

    return count
