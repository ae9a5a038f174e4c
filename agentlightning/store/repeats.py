"""Copies of one call: a request that is delivered again while its first copy runs, or after it was answered.

What a call made is found again by its token, in the store. What it did not find leaves nothing there, so an empty
answer is remembered here: a copy of a claim that still waits must not take work that nobody would be told of.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator

_REMEMBERED = 16_384


class Repeats:
    """Lets the copies of a call run one after the other. Usable from any thread and any event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, concurrent.futures.Future[None]] = {}
        self._empty: OrderedDict[str, None] = OrderedDict()

    @contextlib.asynccontextmanager
    async def turn(self, token: str) -> AsyncGenerator[bool, None]:
        """Enter when no other copy runs; gives False if one was answered that there is nothing."""
        mine: concurrent.futures.Future[None] = concurrent.futures.Future()
        while True:
            with self._lock:
                before = self._running.setdefault(token, mine)
            if before is mine:
                break
            await asyncio.wait([asyncio.wrap_future(before)])
        try:
            yield token not in self._empty
        finally:
            with self._lock:
                del self._running[token]
            mine.set_result(None)

    def found_nothing(self, token: str) -> None:
        """Remember that the call with this token was answered, and with nothing."""
        with self._lock:
            self._empty[token] = None
            if len(self._empty) > _REMEMBERED:
                self._empty.popitem(last=False)
