"""Stop events for threads and for processes. Both sides of a run can set them, any number of times."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext


class ExecutionEvent(Protocol):
    """A flag that requests a bundle to stop."""

    def set(self) -> None:
        """Raise the flag. May be called again."""

    def clear(self) -> None:
        """Lower the flag."""

    def is_set(self) -> bool:
        """True once the flag is up."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the flag is up or `timeout` seconds have passed; return whether it is up."""
        ...


class ThreadingEvent:
    """An `ExecutionEvent` for the threads of one process."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Raise the flag."""
        self._event.set()

    def clear(self) -> None:
        """Lower the flag."""
        self._event.clear()

    def is_set(self) -> bool:
        """True once the flag is up."""
        return self._event.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the flag is up or time is up."""
        return self._event.wait(timeout)


class MultiprocessingEvent:
    """An `ExecutionEvent` for several processes: a pipe that is never emptied, so a byte in it is the flag.

    A pipe has no lock: a process that is killed while it reads the flag blocks no other. (The semaphores of
    `multiprocessing.Event` would stay locked.) Inherited by forked children, and picklable for children that are being
    spawned. `ctx` is the context of `multiprocessing` that makes the pipe; None is the default one.
    """

    __slots__ = ("_reader", "_writer")

    def __init__(self, *, ctx: BaseContext | None = None) -> None:
        from multiprocessing import get_context  # a program that only has threads does not need it

        self._reader, self._writer = (ctx or get_context()).Pipe(duplex=False)

    def set(self) -> None:
        """Raise the flag."""
        if not self.is_set():
            self._writer.send_bytes(b"!")

    def clear(self) -> None:
        """Lower the flag. Only for the process that made the event, while no other sets it."""
        while self._reader.poll():
            self._reader.recv_bytes()

    def is_set(self) -> bool:
        """True once the flag is up."""
        return self._reader.poll()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the flag is up or time is up."""
        return self._reader.poll(timeout)
