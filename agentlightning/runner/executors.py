"""Calls of an agent within a time limit: a coroutine as a task, a plain function on the main or another thread."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from typing import Any, Literal, Protocol

from agentlightning.litagent.litagent import LitAgent
from agentlightning.runner.outcome import AgentCancelled, TimeLimitExceeded
from agentlightning.types import AttemptedRollout, NamedResources
from agentlightning.utils.concurrency.main_thread import Done, Interrupted, MainCall
from agentlightning.utils.concurrency.threads import Threads
from agentlightning.utils.exceptions import readable

logger = logging.getLogger(__name__)

UNWIND_SECONDS = 0.5
"""Seconds in which a cancelled coroutine or an interrupted call has to end before it is abandoned."""


async def invoke(call: Callable[[], object], *, threads: Threads | None, limit: float | None, label: str) -> Any:
    """Call `call` and return its result; an awaitable is awaited. Its exceptions are raised.

    With `threads` the call runs in one of them, or on the main thread, with a copy of the context. On the main thread
    `Interrupted` is raised in a call that exceeds the limit (seconds) or is cancelled. Other threads cannot be ended
    from outside. A call that continues to run is abandoned, with a warning, and its result is ignored.

    Raises:
        TimeLimitExceeded: it did not end within `limit` seconds.
    """
    loop = asyncio.get_running_loop()
    end = None if limit is None else loop.time() + limit
    value = await _settle(threads.call(call, label, limit), limit, end, label) if threads is not None else call()
    if not inspect.isawaitable(value):
        return value

    async def caught() -> Done:  # no exception leaves the task, so that `SystemExit` does not tear down the loop
        try:
            return Done(await value)
        except BaseException as error:  # as in `Threads`
            return Done(error=error)

    return await _settle(asyncio.create_task(caught(), name=label), limit, end, label)


async def call_agent(
    agent: LitAgent[Any],
    rollout: AttemptedRollout,
    resources: NamedResources,
    threads: Threads,
    limit: float | None = None,
) -> Any:
    """Call the agent's method for a rollout; raises as `invoke` does."""
    method = agent.method_for(rollout.mode)
    return await invoke(
        lambda: method(rollout.input, resources=resources, rollout=rollout),
        threads=None if inspect.iscoroutinefunction(method) else threads,
        limit=limit,
        label=rollout.rollout_id,
    )


async def _settle(future: asyncio.Future[Done], limit: float | None, end: float | None, label: str) -> Any:
    """Wait for a call until `end` (loop time). Cancel it at that time, or when the waiter is cancelled."""
    remaining = None if end is None else max(0.0, end - asyncio.get_running_loop().time())
    try:
        await asyncio.wait({future}, timeout=remaining)
    except asyncio.CancelledError:
        await _end(future, label, "was cancelled")
        raise
    in_time = future.done() and not (isinstance(future, MainCall) and future.was_interrupted)
    if not in_time:
        if not future.done():
            await _end(future, label, f"exceeded its limit of {limit} s")
        error = TimeLimitExceeded(f"The attempt exceeded timeout_seconds={limit} of its rollout")
        if isinstance(future, MainCall) and future.done() and isinstance(cause := future.result().error, Interrupted):
            error = error.with_traceback(cause.__traceback__)  # the place of the interruption
        raise error
    return outcome_of(future.result())


def outcome_of(done: Done) -> Any:
    """Return the result of a call, or raise its exception."""
    error = None if done.error is None else readable(done.error)
    if isinstance(error, asyncio.CancelledError):
        raise AgentCancelled("The agent raised CancelledError, but the attempt was not cancelled") from error
    if error is not None:
        raise error
    return done.value


async def _end(future: asyncio.Future[Done], label: str, why: str) -> None:
    future.interrupt() if isinstance(future, MainCall) else future.cancel()
    if isinstance(future, (asyncio.Task, MainCall)):
        await asyncio.wait({future}, timeout=UNWIND_SECONDS)
        if future.done():
            return
    logger.warning("[%s] the agent %s and does not end; it is abandoned and its result is ignored", label, why)


Isolation = Literal["thread", "process"]
FREE_SECONDS = 5.0
"""Seconds that a runner waits for an interrupted agent to release the main thread."""


class AgentExecutor(Protocol):
    """Calls the agent for attempts."""

    @property
    def prepares(self) -> bool:
        """True if a lane must call `prepare` before it claims, so that no claimed attempt waits for a process."""
        ...

    async def prepare(self) -> None:
        """Get ready for one more attempt.

        Raises:
            AgentProcessDied: no process can load the agent.
        """

    def spare(self) -> None:
        """Undo one `prepare` that was not followed by an attempt."""

    async def call(self, rollout: AttemptedRollout, resources: NamedResources) -> Any:
        """Call the agent within the time limit of the rollout and return its result.

        Raises:
            TimeLimitExceeded: it did not end in time.
            BaseException: the agent's exception.
        """
        ...

    @property
    def threads(self) -> Threads:
        """The threads for other blocking calls."""
        ...

    def close(self) -> None:
        """End all threads and processes of the executor. May be called twice."""


class ThreadExecutor:
    """Runs agents in this process: coroutines on the event loop, others on the main thread if it is free, else in a
    thread each. The main thread is free if the loop runs on another thread and the runner runs one rollout at a
    time."""

    def __init__(self, agent: LitAgent[Any], concurrency: int = 1) -> None:
        self._agent = agent
        self.threads = Threads(on_main=concurrency == 1)

    @property
    def prepares(self) -> bool:
        """True while an interrupted agent still has the main thread."""
        return (main_thread := self.threads.main_thread) is not None and not main_thread.is_free

    async def prepare(self) -> None:
        """Wait briefly for the main thread; after that agents run in threads until it is free."""
        main_thread = self.threads.main_thread
        if main_thread is not None and not await main_thread.until_free(FREE_SECONDS):
            logger.warning("The agent does not release the main thread; rollouts run in other threads until it does")

    def spare(self) -> None:
        """Do nothing."""

    async def call(self, rollout: AttemptedRollout, resources: NamedResources) -> Any:
        return await call_agent(self._agent, rollout, resources, self.threads, rollout.config.timeout_seconds)

    def close(self) -> None:
        self.threads.close()
