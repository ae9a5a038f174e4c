"""The call in progress: its token and its ids, concurrent copies of the same call, and heartbeats that share a
commit."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from functools import partial

from agentlightning.store.base import call_token
from agentlightning.store.rules.idempotency import Call
from agentlightning.store.rules.tx import Ids
from agentlightning.store.rules.values import given
from agentlightning.utils.id import count_id, derive_id, generate_id

_MANY_BEATS, _BEATS_TOGETHER_SECONDS = 32, 0.25
"""Heartbeats of idle workers per second above which they are grouped, and seconds that a heartbeat may wait."""


def call_of(operation: str, **arguments: object) -> Call | None:
    """Return the call that starts now, or None if it has no token."""
    token = call_token(operation)
    return None if token is None else Call.of(operation, token, given(**arguments))


def call_ids(length: int, token: str | None) -> Ids:
    """Return a function for the ids of a call. They are derived from its token or from one random id, so that a
    repeated script creates the same ids."""
    if token is not None:
        return partial(derive_id, token, length=length)
    return partial(count_id, int(generate_id(length), 16), length=length)


class Repeats:
    """Run the copies of a call one after the other. Usable from any thread and any event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, concurrent.futures.Future[None]] = {}

    @contextlib.asynccontextmanager
    async def turn(self, token: str) -> AsyncGenerator[None, None]:
        """Wait until no other copy is running."""
        mine: concurrent.futures.Future[None] = concurrent.futures.Future()
        while True:
            with self._lock:
                before = self._running.setdefault(token, mine)
            if before is mine:
                break
            await asyncio.wait([asyncio.wrap_future(before)])
        try:
            yield
        finally:
            with self._lock:
                del self._running[token]
            mine.set_result(None)


async def until_tick(seconds: float, now: float) -> None:
    """Wait for the next multiple of `seconds`, so that one commit serves all waiting callers.
    `now` is the time of a clock that all of them use."""
    await asyncio.sleep(seconds - now % seconds)


class IdleBeats:
    """Group the heartbeats of idle workers if there are many, because in a durable store a transaction takes five
    times as long as a heartbeat in it. Usable from any event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = deque[float](maxlen=_MANY_BEATS)

    async def gather(self) -> None:
        """Return immediately if few heartbeats arrived in the last second, else together with other heartbeats."""
        now = self._clock()
        many = len(self._last) == _MANY_BEATS and now - self._last[0] < 1.0
        self._last.append(now)
        if many:
            await until_tick(_BEATS_TOGETHER_SECONDS, now)
