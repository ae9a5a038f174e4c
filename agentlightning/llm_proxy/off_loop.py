"""Runs long work on threads, so that the serving loop continues with other calls; short work runs on the loop.

Because the interpreter runs one thread at a time, this does not make the work faster. But the interpreter switches
threads every few milliseconds, and the work consists of shorter parts, or of one pass over some megabytes.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LARGE_BYTES: Final = 128 * 1024
"""Size in bytes from which work is done on a thread; work of this size takes about a millisecond."""
_THREADS: Final = 2
"""Number of large bodies processed at a time; others wait and are not decoded yet."""
HUGE_BYTES: Final = 1024 * 1024
"""Size in bytes from which a process handles one body at a time."""
_turn = threading.Lock()
"""Held while a huge body is processed."""


class OffLoop:
    """Threads for long work. Owned by the serving loop; they start when needed and end with `close`.

    A function that runs here must return a value and have no side effects: its caller may be gone before it ends.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="agl-gateway-work")
        self._huge = ThreadPoolExecutor(1, thread_name_prefix="agl-gateway-huge")
        self.handed_over = 0
        """Number of functions run on a thread so far."""

    async def run(self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the function's result; `size` is the number of bytes that it processes."""
        if size < LARGE_BYTES:
            return function(*args, **kwargs)
        self.handed_over += 1

        def work() -> T:
            with _turn if size >= HUGE_BYTES else nullcontext():
                return function(*args, **kwargs)

        threads = self._threads if size < HUGE_BYTES else self._huge
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def close(self) -> None:
        """End the threads after their current work, without waiting. May be called twice."""
        for threads in (self._threads, self._huge):
            threads.shutdown(wait=False, cancel_futures=True)


def _forget_turn() -> None:
    """Reset the threads in a forked child, which has none of its parent's threads."""
    global _turn
    _turn = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_turn)
