"""Threads for calls that block: started when needed, reused, and abandoned when their call does not return."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

CLOSE_SECONDS = 0.5


@dataclass(slots=True)
class Done:
    """What a call gave: a value, or an exception of any class."""

    value: Any = None
    error: BaseException | None = None


_Job = Callable[[], None]
_Jobs = SimpleQueue[_Job | None]


class Threads:
    """As many daemon threads as calls run at the same time. A pool would not do: its threads keep the process alive,
    and one that never returns would be missed by the others.

    `call` belongs to an event loop; `close` ends the threads that have nothing to do, and may be called twice.
    """

    def __init__(self) -> None:
        self._idle: list[tuple[_Jobs, threading.Thread]] = []
        self._closed = False
        self._lock = threading.Lock()

    def call(self, call: Callable[[], object], label: str) -> asyncio.Future[Done]:
        """Call `call` in a thread with a copy of the context, and return what it will give."""
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
        """End the threads that have nothing to do; a busy one ends when its call returns."""
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
