"""Daemon threads, which never block the exit: one that runs an event loop, and others that run blocking calls.

The loop is for parts that are called from threads or other loops. The threads for calls are started when needed,
reused, and abandoned if their call does not return.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import os
import threading
from collections.abc import Callable, Coroutine
from queue import SimpleQueue
from typing import TypeVar

from agentlightning.utils.concurrency.main_thread import Done, MainThread, can_serve, main_thread_beside

T = TypeVar("T")
CLOSE_SECONDS = 0.5


class BackgroundLoop:
    """An event loop that runs on a separate thread.

    The first `submit` from any thread starts it. After a fork, the child starts a new one. The owner must call `stop`,
    which ends the thread and may be called twice.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the running loop; start the thread if this process has none."""
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
        """Return True if the caller is the loop's own thread."""
        return self._thread is threading.current_thread()

    def stop(self, timeout: float = 5.0) -> None:
        """Cancel the running tasks, end the thread and close the loop; wait up to `timeout` seconds."""
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


_Job = Callable[[], None]
_Jobs = SimpleQueue[_Job | None]


class Threads:
    """Daemon threads, one for each call in progress. A pool is unsuitable: its threads keep the process alive, and a
    thread that never returns would be missing for later calls.

    With `on_main`, the main thread is used first: if the event loop runs on another thread and no other call occupies
    the main thread, or if the loop runs on it and may be blocked (`may_hold_loop`). Use `call` from an event loop;
    `close` ends the idle threads, and may be called twice.
    """

    def __init__(self, *, on_main: bool = False) -> None:
        self._on_main = on_main
        self.may_hold_loop = False
        """Set by the owner while nothing else needs the loop of the calls."""
        self._idle: list[tuple[_Jobs, threading.Thread]] = []
        self._closed = False
        self._lock = threading.Lock()

    @property
    def main_thread(self) -> MainThread | None:
        """The main thread, if calls of this loop may run on it."""
        return main_thread_beside(asyncio.get_running_loop()) if self._on_main else None

    def call(self, call: Callable[[], object], label: str, limit: float | None = None) -> asyncio.Future[Done]:
        """Run `call` in a thread with a copy of the context, and return a future of its result.

        `limit` (seconds) is for a call that blocks the loop; any other call is ended by its waiter.
        """
        if self._on_main and self.may_hold_loop and can_serve():
            return MainThread(asyncio.get_running_loop()).call_now(call, limit)
        if (main_thread := self.main_thread) is not None and main_thread.is_free:
            return main_thread.call(call)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Done] = loop.create_future()
        context = contextvars.copy_context()

        def deliver(done: Done) -> None:
            if not future.done():
                future.set_result(done)

        def job() -> None:
            threading.current_thread().name = f"agent-{label}"
            try:
                done = Done(context.run(call))
            except BaseException as error:  # passed to the waiter, who turns it into an outcome
                done = Done(error=error)
            with self._lock:
                closed = self._closed
                if not closed:
                    self._idle.append((jobs, thread))
            if closed:
                jobs.put(None)
            if not loop.is_closed():
                loop.call_soon_threadsafe(deliver, done)

        with self._lock:
            idle = self._idle.pop() if self._idle else None
        jobs, thread = idle or _start()
        jobs.put(job)
        return future

    def close(self) -> None:
        """End the idle threads; a busy one ends when its call returns."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for jobs, _ in idle:
            jobs.put(None)
        for _, thread in idle:
            thread.join(CLOSE_SECONDS)


def _start() -> tuple[_Jobs, threading.Thread]:
    jobs: _Jobs = SimpleQueue()

    def work() -> None:
        while (job := jobs.get()) is not None:
            job()

    thread = threading.Thread(target=work, name="agent", daemon=True)
    contextvars.Context().run(thread.start)  # the thread is nobody's: each call brings its own context
    return jobs, thread
