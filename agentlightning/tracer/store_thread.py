"""A store on an event loop in a separate thread, for callers that must not depend on the loop of the agents."""

from __future__ import annotations

import concurrent.futures
import contextvars
import pickle
from collections.abc import Callable, Coroutine
from typing import TypeVar

from agentlightning.store.base import LightningStore
from agentlightning.utils.concurrency.threads import BackgroundLoop

T = TypeVar("T")


class StoreThread:
    """Runs coroutines over a store in a thread; the thread starts with the first call and ends with `close`.

    A store that all processes share (`zero_copy`) is pickled into a handle with separate connections, which are closed
    with the thread; any other store is used directly, and must be thread-safe.
    """

    def __init__(self, store: LightningStore, name: str) -> None:
        self._store = store
        self._copied = bool(store.capabilities.get("zero_copy", False))
        self._background = BackgroundLoop(name)
        self._own: LightningStore | None = None

    def call(self, work: Callable[[LightningStore], Coroutine[object, None, T]]) -> concurrent.futures.Future[T]:
        """Start `work(store)` in the thread, in an empty context, so that it is not traced."""

        async def run() -> T:
            if self._copied and self._own is None:
                self._own = pickle.loads(pickle.dumps(self._store))
            return await work(self._own or self._store)

        return contextvars.Context().run(self._background.submit, run())

    def close(self, timeout: float = 3.0) -> None:
        """Cancel pending work, close the connections, end the thread; waits up to `timeout` seconds for each.

        May be called twice. Blocks; on an event loop call it with `asyncio.to_thread`.
        """
        own, self._own = self._own, None
        if own is not None:
            concurrent.futures.wait([self._background.submit(own.close())], timeout)
        self._background.stop(timeout)
