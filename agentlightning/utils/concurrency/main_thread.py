"""Calls on the main thread, while an event loop runs beside it in a thread of its own.

Signal handlers, debuggers and some libraries work on the main thread alone. Only there can a call be broken off: by a
signal whose handler raises, which ends a system call that waits, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

AGAIN_SECONDS = 1.0
"""How often a call that goes on is interrupted again."""
SIGNAL: int = getattr(signal, "SIGURG", 0)
"""What interrupts a call. Programs rarely use it, and without a handler it does nothing."""
KEPT_SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.Signals(SIGNAL)] if SIGNAL else []))
"""Signals whose handlers are put back after a call has replaced them."""


@dataclass(slots=True)
class Done:
    """What a call gave: a value, or an exception of any class."""

    value: Any = None
    error: BaseException | None = None


class Interrupted(KeyboardInterrupt):
    """Raised in a call on the main thread that is to end.

    It is raised as Ctrl+C is, so that no `except Exception` and no event loop that the call runs holds it up.
    """


class MainCall(asyncio.Future[Done]):
    """One call on the main thread, as a future of the loop beside it."""

    def __init__(self, main_thread: MainThread, call: Callable[[], object], kept_signals: Sequence[int]) -> None:
        super().__init__(loop=main_thread.loop)
        self.kept_signals = kept_signals
        self._main_thread = main_thread
        self._call = call
        self._context = contextvars.copy_context()

    def interrupt(self) -> None:
        """Raise `Interrupted` in the call, if it has not ended; from any thread but the main one."""
        self._main_thread.interrupt(self)

    def run(self) -> Any:
        """Run the call in the context in which it was made."""
        return self._context.run(self._call)

    def deliver(self, done: Done) -> None:
        """Set the result; on the loop."""
        if not self.done():
            self.set_result(done)


class MainThread:
    """The main thread as a place for calls, one at a time. Made and served by it; called by the loop beside it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.served = threading.Event()
        """Set once `serve` is about to return."""
        self._jobs: SimpleQueue[MainCall | None] = SimpleQueue()
        self._latest: MainCall | None = None
        self._running: MainCall | None = None
        self._unwanted: MainCall | None = None
        self._previous: Any = None
        _beside[loop] = self

    @property
    def is_free(self) -> bool:
        """True if no call is under way."""
        return self._latest is None or self._latest.done()

    def call(self, call: Callable[[], object], kept_signals: Sequence[int] = KEPT_SIGNALS) -> MainCall:
        """Call `call` with a copy of the context; only while it `is_free`."""
        assert self.is_free
        self._latest = MainCall(self, call, kept_signals)
        self._jobs.put(self._latest)
        return self._latest

    async def until_free(self, seconds: float) -> bool:
        """Interrupt what is left of an earlier call until it has ended; return whether it has, within `seconds`."""
        end = self.loop.time() + seconds
        while self._latest is not None and not self._latest.done() and (left := end - self.loop.time()) > 0:
            self._latest.interrupt()
            await asyncio.wait({self._latest}, timeout=min(left, AGAIN_SECONDS))
        return self.is_free

    def interrupt(self, call: MainCall | None = None) -> None:
        """Raise `Interrupted` in this call, else in whichever is under way."""
        self._unwanted = call or self._running
        if SIGNAL and self._unwanted is not None:
            signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)

    def serve(self) -> None:
        """Run calls until `close`."""
        self._previous = signal.signal(SIGNAL, self._on_signal)
        try:
            while (call := self._jobs.get()) is not None:
                self._perform(call)
        finally:
            signal.signal(SIGNAL, signal.SIG_DFL if self._previous is None else self._previous)
            self.served.set()

    def close(self) -> None:
        """Let `serve` return, after the call that is under way."""
        self._jobs.put(None)

    def _perform(self, call: MainCall) -> None:
        handlers = [(signum, signal.getsignal(signum)) for signum in call.kept_signals]
        try:
            try:
                self._running = call
                done = Done(call.run())
            finally:
                self._running = None
        except BaseException as error:  # passed to the waiter, who turns it into an outcome
            self._running = None  # the interrupt may come in the `finally`
            done = Done(error=error)
        for signum, handler in handlers:
            if signal.getsignal(signum) is not handler and handler is not None:
                signal.signal(signum, handler)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(call.deliver, done)

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        unwanted, self._unwanted = self._unwanted, None
        if unwanted is not None and unwanted is self._running:
            raise Interrupted("the call is to end")


_beside: WeakKeyDictionary[asyncio.AbstractEventLoop, MainThread] = WeakKeyDictionary()


def main_thread_beside(loop: asyncio.AbstractEventLoop) -> MainThread | None:
    """Return the main thread as a place for the calls of a loop that runs beside it; None for any other loop."""
    return _beside.get(loop)


async def on_main_thread(call: Callable[[], object]) -> None:
    """Run a short call on the main thread, where it may set signal handlers: beside this loop, or that of this loop."""
    main_thread = main_thread_beside(asyncio.get_running_loop())
    if main_thread is None:
        call()
    elif (error := (await main_thread.call(call, kept_signals=())).error) is not None:
        raise error


def can_serve() -> bool:
    """True if this thread is the main one, and its calls can be interrupted on this system."""
    return bool(SIGNAL) and hasattr(signal, "pthread_kill") and threading.current_thread() is threading.main_thread()
