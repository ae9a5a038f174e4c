"""Runs an agent's method: a coroutine as a task, a plain function in a thread of its own, both within a time limit."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from agentlightning.runner.outcome import AgentCancelled, TimeLimitExceeded

logger = logging.getLogger(__name__)

UNWIND_SECONDS = 0.5
"""How long a cancelled coroutine may take to end before it is left behind."""


@dataclass(slots=True)
class Done:
    """What a call gave: a value, or an exception of any class."""

    value: Any = None
    error: BaseException | None = None


async def play(call: Callable[[], Any], *, in_thread: bool, limit: float | None, label: str) -> Any:
    """Call `call` and return what it gives; an awaitable is awaited. Any exception of it is raised.

    With `in_thread` the call runs in a thread with a copy of the context. A thread cannot be ended from outside: one
    that outlives the limit (seconds) or a cancellation is left behind, with a warning.

    Raises:
        TimeLimitExceeded: it did not end within `limit` seconds.
    """
    loop = asyncio.get_running_loop()
    end = None if limit is None else loop.time() + limit
    value = await _settle(_in_thread(call, label), limit, end, label) if in_thread else call()
    if not inspect.isawaitable(value):
        return value
    return await _settle(asyncio.create_task(_caught(value), name=label), limit, end, label)


async def _settle(future: asyncio.Future[Done], limit: float | None, end: float | None, label: str) -> Any:
    """Wait for a call until `end` (loop time); cancel it then, and when the waiter is cancelled."""
    left = None if end is None else max(0.0, end - asyncio.get_running_loop().time())
    try:
        await asyncio.wait({future}, timeout=left)
    except asyncio.CancelledError:
        await _end(future, label, "was cancelled")
        raise
    if not future.done():
        await _end(future, label, f"ran past its limit of {limit} s")
        raise TimeLimitExceeded(f"The attempt ran past the timeout_seconds={limit} of its rollout")
    done = future.result()
    if isinstance(done.error, asyncio.CancelledError):
        raise AgentCancelled("The agent raised CancelledError, but nobody had cancelled the attempt") from done.error
    if done.error is not None:
        raise done.error
    return done.value


async def _end(future: asyncio.Future[Done], label: str, why: str) -> None:
    future.cancel()
    if isinstance(future, asyncio.Task):
        await asyncio.wait({future}, timeout=UNWIND_SECONDS)
        if future.done():
            return
    logger.warning("[%s] the agent %s and does not end; it is left behind and its result ignored", label, why)


async def _caught(awaitable: Awaitable[Any]) -> Done:
    """Await; no exception leaves the task, so that `SystemExit` in an agent does not tear down the loop."""
    try:
        return Done(await awaitable)
    except BaseException as error:  # handed to the waiter, who turns it into an outcome
        return Done(error=error)


def _in_thread(call: Callable[[], Any], label: str) -> asyncio.Future[Done]:
    """Start a daemon thread: an abandoned one must not keep the process alive, as a pool's would."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Done] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(done: Done) -> None:
        if not future.done():
            future.set_result(done)

    def run() -> None:
        try:
            done = Done(context.run(call))
        except BaseException as error:  # as in _caught
            done = Done(error=error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, done)

    threading.Thread(target=run, name=f"agent-{label}", daemon=True).start()
    return future
