"""Sequence ids of rewards, requested from the store when the reward is emitted, so that its number is between those of
the model calls before and after it (see `tracer/scope.py` for the meaning of `sequence_id`)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import logging
import threading
import types
from collections.abc import Coroutine, Generator
from typing import Any

from agentlightning.store.base import LightningStore
from agentlightning.tracer.store_thread import StoreThread

logger = logging.getLogger(__name__)

THREAD_WAIT_SECONDS = 1.0
"""Seconds that a thread waits for the number of a reward."""
LOOP_WAIT_SECONDS = 0.25
"""Seconds that an event loop waits for it; other agents are blocked meanwhile."""

Asked = Coroutine[Any, Any, int]
PendingId = asyncio.Future[int] | concurrent.futures.Future[int]


class SequenceIds:
    """Requests sequence ids for the scopes of one tracer, from any thread. `close` ends its thread, if any."""

    def __init__(self) -> None:
        self._store_thread: StoreThread | None = None
        self._store: LightningStore | None = None
        self._waits = True
        self._lock = threading.Lock()

    def request(
        self, store: LightningStore, rollout_id: str, attempt_id: str, owner: asyncio.AbstractEventLoop
    ) -> PendingId:
        """Request a number from the store, wait for it up to the limits above, and return it or its future.

        `owner` is the loop of the scope. A store of this process is called there; a remote one is called
        over its own connection (about 1.5 ms on one machine). After a timeout it does not wait again.
        """
        here = running_loop() is owner
        if store.capabilities.get("zero_copy", False):
            future = self._thread_of(store).call(lambda own: own.get_next_span_sequence_id(rollout_id, attempt_id))
        else:
            nothing = contextvars.Context()
            coroutine = store.get_next_span_sequence_id(rollout_id, attempt_id)
            if here:
                return nothing.run(_begin_now, coroutine)
            future = nothing.run(asyncio.run_coroutine_threadsafe, coroutine, owner)
        if self._waits:
            seconds = LOOP_WAIT_SECONDS if here else THREAD_WAIT_SECONDS
            concurrent.futures.wait([future], seconds)
            if not future.done():
                self._waits = False
                logger.warning("no sequence_id for a reward within %g s; later rewards do not wait for it", seconds)
        return future

    def close(self) -> None:
        """End the thread; may be used again."""
        with self._lock:
            thread, self._store_thread, self._store = self._store_thread, None, None
        if thread is not None:
            thread.close()

    def _thread_of(self, store: LightningStore) -> StoreThread:
        with self._lock:
            thread, is_current = self._store_thread, self._store is store
            if thread is not None and is_current:
                return thread
            new = self._store_thread = StoreThread(store, "agentlightning-sequence-ids")
            self._store = store
        if thread is not None:
            thread.close()
        return new


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the loop that runs in this thread; None if none does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _begin_now(coroutine: Asked) -> asyncio.Future[int]:
    """Run a coroutine up to its first wait within this call, and the rest, if any, as a task."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[int] = loop.create_future()
    try:
        waits_for = coroutine.send(None)
    except StopIteration as done:
        answer.set_result(done.value)
    except Exception as error:  # raised again from the returned future
        answer.set_exception(error)
    else:

        async def rest() -> int:
            return await _rest(coroutine, waits_for)

        return loop.create_task(rest())
    return answer


@types.coroutine
def _rest(coroutine: Asked, waits_for: object) -> Generator[Any, Any, int]:
    """Run the rest of a coroutine that is already waiting."""
    try:
        yield waits_for
    except BaseException as error:  # cancellation is passed to the coroutine too
        yield coroutine.throw(error)
    return (yield from coroutine.__await__())
