"""Coroutines and blocking calls on threads, which can be awaited, cancelled and, as a last resort, abandoned."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from agentlightning.utils.concurrency.interrupts import Interrupts, raise_in
from agentlightning.utils.concurrency.loops import DaemonExecutor, run
from agentlightning.utils.concurrency.where_blocked import task_stack

T = TypeVar("T")
logger = logging.getLogger(__name__)


class LoopThread:
    """One coroutine on a separate event loop and daemon thread, awaited and cancelled from another loop."""

    def __init__(self, name: str, main: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self.name = name
        self._main = main
        self._future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def result(self) -> Any:
        """Wait for the coroutine and return its result or raise its error. If cancelled, cancel the coroutine."""
        ended = asyncio.wrap_future(self._future)
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            self.cancel()
            await asyncio.wait([ended])
            if not ended.cancelled() and ended.exception() is not None:
                logger.error("%s failed while it was ending", self.name, exc_info=ended.exception())
            raise

    def cancel(self) -> None:
        """Cancel the coroutine; its thread ends when the coroutine does."""
        self._cancelled = True
        loop, task = self._loop, self._task
        if loop is not None and task is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed: it has ended
                loop.call_soon_threadsafe(task.cancel)

    def stack(self) -> list[str]:
        """Return the lines at which the coroutine waits; an empty list before it has begun."""
        return [] if self._task is None else task_stack(self._task)

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread and return whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        async def main(_: Interrupts) -> Any:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            if self._cancelled:
                raise asyncio.CancelledError
            return await self._main()

        try:
            result = run(main)
        except asyncio.CancelledError:
            self._future.cancel()
            self._future.set_running_or_notify_cancel()
        except BaseException as error:  # boundary: the waiter for the result gets it
            self._future.set_exception(error)
        else:
            self._future.set_result(result)


async def call_in_thread(function: Callable[..., T], *args: object, name: str, grace: float = 2.0) -> T:
    """Run a blocking call on a separate daemon thread and return its result.

    When this coroutine is cancelled, `CancelledError` is raised in the thread at its next Python instruction, so that
    its `finally` blocks run. After `grace` seconds the thread is abandoned.
    """
    idents, cancelled = list[int](), threading.Event()

    def call() -> T:
        threading.current_thread().name = name
        idents.append(threading.get_ident())
        if cancelled.is_set():
            raise asyncio.CancelledError
        return function(*args)

    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    ended = loop.run_in_executor(DaemonExecutor(), context.run, call)
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        cancelled.set()
        if idents and not ended.done():
            raise_in(idents[0], asyncio.CancelledError)
        await asyncio.wait([ended], timeout=grace)
        if not ended.done():
            logger.error("%s did not end when it was cancelled, because of a blocking call; abandoning it", name)
        if not ended.cancel() and not ended.cancelled():
            ended.exception()  # the waiter was cancelled, so nobody else reads it
        raise
