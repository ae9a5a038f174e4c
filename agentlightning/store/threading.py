"""LightningStoreThreaded, which makes any store usable from all threads and event loops of one process."""

from __future__ import annotations

import asyncio

from typing_extensions import override

from agentlightning.store.base import LightningStore, LightningStoreCapabilities, request_token
from agentlightning.store.operations import OPERATIONS, forward_operations
from agentlightning.store.wrappers import StoreWrapper, complete
from agentlightning.utils.concurrency.threads import BackgroundLoop


@forward_operations
class LightningStoreThreaded(StoreWrapper):
    """Pass calls to a thread-safe store; run any other store on a separate event loop, one call at a time.

    Waits and long polls run concurrently with other calls, which can end them. A waiting thread holds no lock.
    The owner must call `close`.
    """

    def __init__(self, store: LightningStore) -> None:
        super().__init__(store)
        self._direct = bool(store.capabilities.get("thread_safe"))
        self._whole = complete(store, one_at_a_time=not self._direct)
        self._owner = BackgroundLoop("agl-store-owner")
        self._turn: asyncio.Lock | None = None

    @property
    @override
    def capabilities(self) -> LightningStoreCapabilities:
        return {**self.store.capabilities, "async_safe": True, "thread_safe": True}

    @override
    async def close(self) -> None:
        """Stop the event loop of the wrapper. The wrapped store stays open; its creator closes it."""
        self._owner.stop()

    async def _call(self, operation: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if self._direct or self._owner.is_current():
            return await getattr(self._whole, operation)(*args, **kwargs)
        token = request_token.get()
        waits = OPERATIONS[operation].waits and bool(kwargs.get("timeout", operation == "wait_for_rollouts"))

        async def call() -> object:
            request_token.set(token)
            if waits:
                return await getattr(self._whole, operation)(*args, **kwargs)
            if self._turn is None:
                self._turn = asyncio.Lock()
            async with self._turn:
                return await getattr(self._whole, operation)(*args, **kwargs)

        return await asyncio.wrap_future(self._owner.submit(call()))
