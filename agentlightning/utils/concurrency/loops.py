"""Event loops that always end: `run` for a coroutine on this thread, the executor of such a loop, a time limit.

`run` is `asyncio.run` with three differences. Ctrl+C does not cancel the task but is delivered as `Interrupts`. A loop
that a synchronous call blocks is interrupted. Tasks that do not end are abandoned instead of awaited. It can also
reserve the main thread for synchronous agents, and run the loop on another thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import TypeVar

from typing_extensions import override

from agentlightning.exit_codes import ExitCode
from agentlightning.utils.concurrency.interrupts import Interrupts
from agentlightning.utils.concurrency.main_thread import AGAIN_SECONDS, MainThread, can_serve
from agentlightning.utils.concurrency.where_blocked import thread_stack

T = TypeVar("T")
logger = logging.getLogger(__name__)

LEFTOVERS_SECONDS = 1.0
"""Seconds that cancelled tasks may take to end after the main coroutine has ended."""

TERMINATED = ExitCode.TERMINATED
"""Exit code of a program that ended normally after SIGTERM, by the convention of shells."""


def run(
    main: Callable[[Interrupts], Coroutine[object, object, T]],
    *,
    always_interruptible: bool = False,
    terminable: bool = False,
    beside: bool = False,
) -> T:
    """Run `main(interrupts)` on a fresh event loop of this thread and return its result.

    With `beside`, and on the main thread, the loop runs on another thread and this one runs calls (`MainThread`). If a
    call does not end, this function does not return: Ctrl+C then ends the process, and a child
    (`always_interruptible`) ends without it.

    Raises:
        RuntimeError: a loop is already running in this thread.
        SystemExit: with `terminable`, SIGTERM was received; raised after `main` has cleaned up as after Ctrl+C.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise RuntimeError(
            "An event loop is already running in this thread, but a run needs a separate one. "
            "Call it from another thread, for example: await asyncio.to_thread(trainer.fit, agent, ...)"
        )
    loop = asyncio.new_event_loop()
    loop.set_default_executor(DaemonExecutor())
    if beside and can_serve():
        with Interrupts(loop, always=always_interruptible, terminable=terminable) as interrupts:
            result = _beside(loop, main, interrupts, always_interruptible)
        if interrupts.terminated:
            raise SystemExit(TERMINATED)
        return result
    try:
        asyncio.set_event_loop(loop)
        with Interrupts(loop, always=always_interruptible, terminable=terminable) as interrupts:
            result = _complete(loop, loop.create_task(main(interrupts)), interrupts)
    finally:
        _close(loop)
        asyncio.set_event_loop(None)
    if interrupts.terminated:
        raise SystemExit(TERMINATED)
    return result


def _beside(
    loop: asyncio.AbstractEventLoop,
    main: Callable[[Interrupts], Coroutine[object, object, T]],
    interrupts: Interrupts,
    is_child: bool,
) -> T:
    main_thread = MainThread(loop)
    main_thread.open()
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def complete() -> T:
        interrupts.runs_in(threading.current_thread())
        asyncio.set_event_loop(loop)
        try:
            return _complete(loop, loop.create_task(main(interrupts)), interrupts)
        finally:
            _close(loop)

    def work() -> None:
        fulfil(future, complete, (), {})
        main_thread.close()
        if not main_thread.served.wait(AGAIN_SECONDS):
            _wrest(main_thread, interrupts, is_child)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), name="agl-loop", daemon=True)
    thread.start()
    main_thread.serve()
    thread.join()
    return future.result()


def _wrest(main_thread: MainThread, interrupts: Interrupts, is_child: bool) -> None:
    """Interrupt a call that still occupies the main thread, until it or the process ends."""
    where = " > ".join(thread_stack("MainThread"))
    logger.error("Waiting for a call of the agent on the main thread; press Ctrl+C to end the process: %s", where)
    while not main_thread.served.is_set():
        if is_child:  # all that matters was reported
            os.kill(os.getpid(), signal.SIGTERM)
        elif interrupts.count:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(TERMINATED if interrupts.terminated else ExitCode.INTERRUPTED)
        main_thread.interrupt()
        main_thread.served.wait(AGAIN_SECONDS)


def _complete(loop: asyncio.AbstractEventLoop, task: asyncio.Task[T], interrupts: Interrupts) -> T:
    while True:
        try:
            return loop.run_until_complete(task)
        except (
            KeyboardInterrupt,
            SystemExit,
        ) as error:  # it left one of the tasks; the main task continues to clean up
            if task.done():
                raise
            if isinstance(error, KeyboardInterrupt):
                interrupts.ask()


def _close(loop: asyncio.AbstractEventLoop) -> None:
    try:
        leftovers = asyncio.all_tasks(loop)
        for task in leftovers:
            task.cancel()
        if leftovers:
            loop.run_until_complete(asyncio.wait(leftovers, timeout=LEFTOVERS_SECONDS))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


async def within(seconds: float, work: Coroutine[object, object, T]) -> T:
    """Return the result of `work`; when the time is up or the caller is cancelled, cancel it and wait for its end.

    Unlike `asyncio.wait_for` before Python 3.12, it never swallows a cancellation.

    Raises:
        asyncio.TimeoutError: `work` did not end within `seconds`.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        in_time = task.done()
        if not in_time:
            task.cancel()
            await asyncio.wait({task})
    if not in_time:
        raise TimeoutError(f"not done within {seconds:g} s")
    return task.result()


class DaemonExecutor(concurrent.futures.ThreadPoolExecutor):
    """Runs each call on a separate daemon thread, so that a call which never ends cannot block the exit."""

    @override
    def submit(  # pyright: ignore[reportIncompatibleMethodOverride] -- same call, the base spells it with ParamSpec
        self, fn: Callable[..., T], /, *args: object, **kwargs: object
    ) -> concurrent.futures.Future[T]:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        threading.Thread(target=fulfil, args=(future, fn, args, kwargs), name="agl-call", daemon=True).start()
        return future

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Return immediately: this executor has no pool."""


def fulfil(
    future: concurrent.futures.Future[T],
    function: Callable[..., T],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> None:
    """Call the function and set its result or error on the future."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function(*args, **kwargs)
    except StopIteration as error:  # a future of asyncio cannot hold one
        future.set_exception(RuntimeError(f"the call raised {error!r}"))
    except BaseException as error:  # boundary: the waiter of the future gets it
        future.set_exception(error)
    else:
        future.set_result(result)
