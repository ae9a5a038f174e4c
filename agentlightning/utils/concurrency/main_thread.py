"""Calls on the main thread, while an event loop runs on another thread or the main thread's loop is blocked.

Signal handlers, debuggers and some libraries only work on the main thread. Only calls on it can be interrupted: by a
signal with a handler that raises, which also ends a waiting system call.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import signal
import socket
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from selectors import BaseSelector
from types import FrameType
from typing import Any

AGAIN_SECONDS = 1.0
"""Seconds before a call that continues is interrupted again."""
RESEND_SECONDS = 0.1
"""Seconds after which a signal is sent again if its handler has not run."""
SIGNAL_SECONDS = 0.5
"""Longest time in seconds that a signal of another thread waits for its handler, which runs on the main thread."""
SIGNAL: int = getattr(signal, "SIGURG", 0)
"""The signal that interrupts a call. Programs rarely use it, and without a handler it does nothing."""
KEPT_SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.Signals(SIGNAL)] if SIGNAL else []))
"""Signals with handlers that are restored after a call has replaced them."""


@dataclass(slots=True)
class Done:
    """The result of a call: a value, or an exception of any class."""

    value: Any = None
    error: BaseException | None = None


class Interrupted(KeyboardInterrupt):
    """Raised in a call on the main thread to end it.

    It is raised like Ctrl+C, so that no `except Exception` and no event loop within the call catches it.
    """


class MainCall(asyncio.Future[Done]):
    """A call on the main thread, as a future of the loop on the other thread."""

    def __init__(self, main_thread: MainThread, call: Callable[[], object], kept_signals: Sequence[int]) -> None:
        super().__init__(loop=main_thread.loop)
        self.kept_signals = kept_signals
        self.was_interrupted = False
        self._main_thread = main_thread
        self._call = call
        self._context = contextvars.copy_context()

    def interrupt(self) -> None:
        """Raise `Interrupted` in the call, if it has not ended; from any thread but the main one."""
        self.was_interrupted = True
        self._main_thread.interrupt(self)

    def run(self) -> Any:
        """Run the call in the context of its creation."""
        return self._context.run(self._call)

    def deliver(self, done: Done) -> None:
        """Set the result; on the loop."""
        if not self.done():
            self.set_result(done)


class MainThread:
    """An executor of calls on the main thread, one at a time. The main thread runs `serve`; the loop uses `call`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.served = threading.Event()
        """Set shortly before `serve` returns."""
        self._jobs: SimpleQueue[MainCall | None] = SimpleQueue()
        self._latest: MainCall | None = None
        self._running: MainCall | None = None
        self._unwanted: MainCall | None = None

    @property
    def is_free(self) -> bool:
        """True if no call is in progress."""
        return self._latest is None or self._latest.done()

    def call(self, call: Callable[[], object], kept_signals: Sequence[int] = KEPT_SIGNALS) -> MainCall:
        """Run `call` with a copy of the context. Use it only while `is_free`."""
        assert self.is_free
        self._latest = MainCall(self, call, kept_signals)
        self._jobs.put(self._latest)
        return self._latest

    async def until_free(self, seconds: float) -> bool:
        """Interrupt an earlier call repeatedly and return whether it has ended within `seconds`."""
        end = self.loop.time() + seconds
        while self._latest is not None and not self._latest.done() and (remaining := end - self.loop.time()) > 0:
            self._latest.interrupt()
            await asyncio.wait({self._latest}, timeout=min(remaining, AGAIN_SECONDS))
        return self.is_free

    def interrupt(self, call: MainCall | None = None) -> None:
        """Raise `Interrupted` in this call; without an argument, in the call in progress."""
        self._unwanted = unwanted = call or self._running
        if SIGNAL and unwanted is not None:
            signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self.loop.call_soon_threadsafe(self.loop.call_later, RESEND_SECONDS, self._resend, unwanted)

    def _resend(self, call: MainCall) -> None:
        """Send the signal again until it is handled: a signal that arrives right before a system call of the main
        thread is only handled when that call ends."""
        if self._unwanted is call and not call.done():
            self.interrupt(call)

    def open(self) -> None:
        """Register this executor for the loop, until `close`."""
        _beside[self.loop] = self

    def serve(self) -> None:
        """Run calls until `close`."""
        try:
            with _handling(SIGNAL, self._on_signal):
                while (call := self._next_job()) is not None:
                    done = self._perform(call)
                    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                        self.loop.call_soon_threadsafe(call.deliver, done)
        finally:
            self.served.set()

    def _next_job(self) -> MainCall | None:
        """Wait for the next call in short pieces: a signal that another thread received is handled between them."""
        while True:
            with contextlib.suppress(Empty):
                return self._jobs.get(timeout=SIGNAL_SECONDS)

    def call_now(self, call: Callable[[], object], limit: float | None) -> MainCall:
        """Run a call on this thread and return it when it is done. It blocks the loop of this thread.

        After `limit` seconds it is interrupted repeatedly. Ctrl+C raises in the call.
        """
        now, ended = MainCall(self, call, KEPT_SIGNALS), threading.Event()
        is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN

        def watch() -> None:
            pause = limit
            while not ended.wait(pause):
                now.interrupt()
                pause = AGAIN_SECONDS

        if limit is not None:
            threading.Thread(target=watch, name="agl-limit", daemon=True).start()
        with (
            outside_of_running_loop(),
            _handling(SIGNAL, self._on_signal),
            _handling(signal.SIGINT, signal.SIG_IGN if is_ignored else signal.default_int_handler),
        ):
            try:
                done = self._perform(now)
            finally:
                ended.set()
        now.deliver(done)
        return now

    def close(self) -> None:
        """Let `serve` return after the call in progress."""
        _beside.pop(self.loop, None)
        self._jobs.put(None)

    def _perform(self, call: MainCall) -> Done:
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
        return done

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        unwanted, self._unwanted = self._unwanted, None
        if unwanted is not None and unwanted is self._running:
            raise Interrupted("the call has to end")


@contextlib.contextmanager
def _handling(signum: int, handler: Any) -> Generator[None]:
    previous = signal.signal(signum, handler)
    try:
        yield
    finally:
        signal.signal(signum, signal.SIG_DFL if previous is None else previous)


@contextlib.contextmanager
def outside_of_running_loop() -> Generator[None]:
    """Let the body run other event loops on this thread although one is already running, as in a notebook.

    The running loop is blocked until the body ends, as by any other long call. The body runs on the same thread, so
    that Ctrl+C (in a notebook: interrupt) reaches it.
    """
    loop: asyncio.AbstractEventLoop | None = None
    with contextlib.suppress(RuntimeError):
        loop = asyncio.get_running_loop()
    if loop is None:
        yield
        return
    task = asyncio.current_task(loop)
    if task is not None:
        asyncio._leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
        asyncio.set_event_loop(loop)  # the body's loops were entered there, and have taken it with them
        if task is not None:
            asyncio._enter_task(loop, task)


_beside: dict[asyncio.AbstractEventLoop, MainThread] = {}
"""The served main threads, by their loops."""


def main_thread_beside(loop: asyncio.AbstractEventLoop) -> MainThread | None:
    """Return the executor of calls on the main thread for a loop on another thread; None for other loops."""
    return _beside.get(loop)


async def on_main_thread(call: Callable[[], object]) -> None:
    """Run a short call on the main thread, where it may set signal handlers, from a loop on this or another thread."""
    main_thread = main_thread_beside(asyncio.get_running_loop())
    if main_thread is None:
        call()
    elif (error := (await main_thread.call(call, kept_signals=())).error) is not None:
        raise error


def has_main_thread_to_itself() -> bool:
    """Return True if the caller's loop is on the main thread, and only the caller's task needs it.

    Other tasks and servers would be blocked while a call occupies the main thread.
    """
    return can_serve() and has_loop_to_itself()


def has_loop_to_itself() -> bool:
    """Return True if the caller's loop has no other task and no server.

    A loop without a selector of Python's own does not list its servers, so it counts as having some.
    """
    loop = asyncio.get_running_loop()
    selector: BaseSelector | None = getattr(loop, "_selector", None)
    if selector is None or len(asyncio.all_tasks(loop)) > 1:
        return False
    return not any(_listens(key.fd) for key in selector.get_map().values())


def _listens(fileno: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(fileno)) as copy:
            return bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:  # no socket
        return False


def can_serve() -> bool:
    """Return True if this thread is the main one, and its calls can be interrupted on this system."""
    return bool(SIGNAL) and hasattr(signal, "pthread_kill") and threading.current_thread() is threading.main_thread()
