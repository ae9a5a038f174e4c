"""One event loop on one daemon thread: start, submit, stop. For parts whose callers are threads or foreign loops."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """An event loop that runs on a thread of its own.

    Started by the first `submit`, from any thread. After a fork the child starts a fresh one. `stop` ends the thread
    and may be called twice; the owner must call it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the running loop; starts the thread if there is none in this process."""
        with self._lock:
            if self._loop is None or self._pid != os.getpid():
                self._loop, self._pid = asyncio.new_event_loop(), os.getpid()
                self._thread = threading.Thread(target=self._run, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            return self._loop

    def submit(self, coroutine: Coroutine[object, object, T]) -> concurrent.futures.Future[T]:
        """Schedule a coroutine on the loop, from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop())

    def is_current(self) -> bool:
        """True if the caller is the loop's own thread."""
        return self._thread is threading.current_thread()

    def stop(self, timeout: float = 5.0) -> None:
        """Cancel what still runs, end the thread and close the loop; waits up to `timeout` seconds."""
        with self._lock:
            loop, thread, same = self._loop, self._thread, self._pid == os.getpid()
            self._loop = self._thread = None
        if loop is None or thread is None or not same:
            return
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout)

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()
