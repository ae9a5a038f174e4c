"""Ctrl+C as an awaitable event, even when a synchronous call blocks the event loop."""

from __future__ import annotations

import _thread
import asyncio
import ctypes
import os
import signal
import threading
from types import FrameType
from typing import Any, Self

from agentlightning.exit_codes import ExitCode

REACTION_SECONDS = 1.0
"""Seconds that a loop may ignore Ctrl+C before the call that blocks it is interrupted."""
LAST_SECONDS = 3.0
"""Further seconds that a loop outside the main thread may ignore Ctrl+C before the process ends."""


class TerminateAsInterrupt:
    """A handler of SIGTERM that raises SIGINT, for the time in which no `Interrupts` handles it."""

    def __init__(self) -> None:
        self.received = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        signal.raise_signal(signal.SIGINT)


class Interrupts:
    """Ctrl+C (SIGINT) while a loop runs on the main thread: the first requests an end, the second a fast end.

    After `runs_in`, it also works for a loop on another thread. On other threads, and if the user ignores SIGINT, it
    delivers nothing unless `always=True`. With `terminable=True`, SIGTERM counts as well, unless the user has installed
    a handler for it other than `TerminateAsInterrupt`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, always: bool = False, terminable: bool = False) -> None:
        self._loop = loop
        self._always = always
        self._terminable = terminable
        self.terminated = False
        """True once SIGTERM was received."""
        self.drains = False
        """If set, the first SIGTERM only sets `draining`, so that its waiters can finish their work."""
        self._draining = asyncio.Event()
        self._asked = asyncio.Event()
        self._hurried = asyncio.Event()
        self._count = 0
        """Number of Ctrl+C presses, counted by the handler: a `KeyboardInterrupt` may precede the loop's reaction."""
        self._watchdog: _Watchdog | None = None
        self._previous: Any = None
        self._previous_term: Any = None

    async def asked(self) -> None:
        """Wait for the first Ctrl+C."""
        await self._asked.wait()

    def is_asked(self) -> bool:
        """Return True once Ctrl+C was pressed."""
        return self._asked.is_set()

    async def hurried(self) -> None:
        """Wait for the second Ctrl+C."""
        await self._hurried.wait()

    async def draining(self) -> None:
        """Wait for the first SIGTERM if `drains` is set."""
        await self._draining.wait()

    def ask(self) -> None:
        """Request an end because of a `KeyboardInterrupt` that left a task. Call it on the loop's thread.

        It counts as a Ctrl+C only if the handler has not counted one: the handler counts the press that caused it.
        """
        self._count = max(self._count, 1)
        self._tell()

    def _tell(self) -> None:
        if self._count:
            self._asked.set()
        if self._count > 1:
            self._hurried.set()

    def __enter__(self) -> Self:
        on_main = threading.current_thread() is threading.main_thread()
        if on_main and (self._always or signal.getsignal(signal.SIGINT) is not signal.SIG_IGN):
            self._watchdog = _Watchdog()
            self._previous = signal.signal(signal.SIGINT, self._on_sigint)
            handler = signal.getsignal(signal.SIGTERM)
            if self._terminable and (handler is signal.SIG_DFL or isinstance(handler, TerminateAsInterrupt)):
                self._previous_term = signal.signal(signal.SIGTERM, self._on_sigterm)
        return self

    def runs_in(self, thread: threading.Thread) -> None:
        """Record that the loop runs in this thread instead of the main thread. Call it once the thread runs."""
        if self._watchdog is not None:
            self._watchdog.loop_thread = thread.ident

    @property
    def count(self) -> int:
        """Number of times that Ctrl+C was pressed."""
        return self._count

    def __exit__(self, *_: object) -> None:
        if self._watchdog is not None:
            signal.signal(signal.SIGINT, signal.SIG_DFL if self._previous is None else self._previous)
            if self._previous_term is not None:
                signal.signal(signal.SIGTERM, self._previous_term)
            self._watchdog.close()

    def _on_sigint(self, _signum: int, _frame: FrameType | None) -> None:
        assert self._watchdog is not None
        if self._watchdog.fired:
            self._watchdog.fired = False
            raise KeyboardInterrupt
        self._count += 1
        if self._loop.is_closed():  # it ended in this moment
            raise KeyboardInterrupt
        self._watchdog.arm()
        self._loop.call_soon_threadsafe(self._react)

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        first, self.terminated = not self.terminated, True
        if first and self.drains:
            self._loop.call_soon_threadsafe(self._draining.set)
        else:
            self._on_sigint(signum, frame)

    def _react(self) -> None:
        if self._watchdog is not None:
            self._watchdog.disarm()
        self._tell()


def raise_in(thread: int, error: type[BaseException]) -> None:
    """Raise an exception in the thread with this ident, at its next Python instruction."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


class _Watchdog:
    """Interrupts a synchronous call that blocks the loop after Ctrl+C.

    A signal handler may not start threads or take locks, so the thread exists from the start and is woken by a byte in
    a pipe. It sends SIGINT again; the handler then raises inside the blocking call. For a loop outside the main thread,
    it raises the error itself, and ends the process if that has no effect: no signal ends a system call there.
    """

    def __init__(self) -> None:
        self.fired = False
        self.loop_thread: int | None = None
        self._disarmed = threading.Event()
        self._closed = False
        self._reader, self._writer = os.pipe()
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="agl-interrupts", daemon=True)
        self._thread.start()

    def arm(self) -> None:
        """Start the clock. Called by the signal handler."""
        os.write(self._writer, b"!")

    def disarm(self) -> None:
        """Stop the clock: the loop has reacted."""
        self._disarmed.set()

    def close(self) -> None:
        """End the thread by a byte, since the end of the pipe is not read while a forked process has it open."""
        self._closed = True
        self._disarmed.set()
        os.write(self._writer, b".")
        self._thread.join()
        os.close(self._writer)
        os.close(self._reader)

    def _watch(self) -> None:
        while os.read(self._reader, 1) == b"!":
            if self._disarmed.wait(REACTION_SECONDS) or self._closed:
                pass
            elif self.loop_thread is not None:
                raise_in(self.loop_thread, KeyboardInterrupt)
                if not self._disarmed.wait(LAST_SECONDS):
                    os._exit(ExitCode.INTERRUPTED)
            else:
                self.fired = True
                if hasattr(signal, "pthread_kill"):
                    signal.pthread_kill(self._main, signal.SIGINT)
                else:  # Windows
                    _thread.interrupt_main(signal.SIGINT)
            if not self._closed:
                self._disarmed.clear()
