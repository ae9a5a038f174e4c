"""The course of a run and of its end, the same for threads and processes.

A run ends when the algorithm has ended, a bundle or a watcher fails, the stop event is set, every runner has ended
while rollouts are open, or Ctrl+C is pressed. With `max_rollouts`, rollouts that are open when all runners have ended
are cancelled, and the run ends when the algorithm enqueues more. To end it, algorithm and runners are requested to
stop, interrupted, terminated and killed, each step with its own time. After Ctrl+C these times are shorter, and after a
second Ctrl+C they are zero.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from agentlightning.base.terminal import counted
from agentlightning.errors import NoScoredRolloutError, NotFoundError
from agentlightning.execution.base import OpenWork, StrandedWorkError
from agentlightning.execution.events import ExecutionEvent
from agentlightning.execution.run_state import are_served_elsewhere, stop_run
from agentlightning.store.base import LightningStore
from agentlightning.utils.concurrency.interrupts import Interrupts
from agentlightning.utils.concurrency.loops import within

logger = logging.getLogger(__name__)

T = TypeVar("T")

FAILURE_GRACE_SECONDS = 1.0
"""Seconds from the stop event to the cancellation of the algorithm, when a runner has failed."""
NOTICE_SECONDS = 0.1
"""Seconds that a cancelled task may take to clean up before its owner continues."""
STRANDED_POLL_SECONDS = 0.25
"""Seconds between queries for open work once every runner has ended."""
CANCEL_POLL_SECONDS = 0.02
"""The same while an algorithm enqueues rollouts that are cancelled."""
IDLE_SECONDS = 3.0
"""Seconds without an enqueued rollout after which another one counts as a new batch."""
LAST_CANCEL_SECONDS = 2.0
"""Seconds that the store may take to cancel the last rollouts of an ended algorithm."""
ENQUEUING_SECONDS = 10.0
"""Seconds that an algorithm may continue to enqueue rollouts that are cancelled."""


@dataclass(frozen=True)
class Patience:
    """Seconds for each step of the end of a run."""

    ask: float
    """After the stop event."""
    interrupt: float
    """After SIGINT, or after the cancellation of a coroutine."""
    terminate: float = 0.0
    """After SIGTERM; for threads, the last join."""
    kill: float = 0.0
    """After SIGKILL."""


INTERRUPTED = Patience(ask=1.0, interrupt=1.5, terminate=0.5, kill=0.5)
"""Patience after Ctrl+C, which may take 5 s in total; the remainder is for the store server and the exit."""


class Team(Protocol):
    """The runners of one run, wherever they run."""

    store: LightningStore | None
    """The run's store, once it is known."""

    async def watch(self) -> None:
        """Return when every runner has ended normally.

        Raises:
            Exception: a runner failed permanently.
        """

    async def end(self, patience: Patience) -> None:
        """End every runner.

        Raises:
            RuntimeError: a runner ended unexpectedly.
        """

    def abandon(self) -> None:
        """Kill immediately every runner that can be killed; abandon the others."""


@dataclass
class Supervision:
    """Supervises one run: the algorithm, the team of runners, and every event that may end the run."""

    team: Team
    event: ExecutionEvent
    interrupts: Interrupts
    patience: Patience
    hasty: Patience
    """The patience after Ctrl+C."""
    poll_interval: float = 0.05
    """Seconds between checks of the stop event."""
    open_work: OpenWork | None = None
    """The open rollouts; None before they are known, and if other processes may run them."""
    watchers: Sequence[Callable[[], Coroutine[object, object, None]]] = ()
    """Coroutines that run next to algorithm and runners. An exception from one ends the run; a return does not."""
    on_interrupt: Callable[[], None] | None = None
    """Called when Ctrl+C or SIGTERM ends the run."""
    interrupted: bool = field(default=False, init=False)
    _spent: bool = field(default=False, init=False)
    """True once every runner has run its `max_rollouts` and the remaining rollouts are cancelled."""

    async def conduct(self, algorithm: Coroutine[object, object, T]) -> T | None:
        """Run the algorithm together with the team, end both, and return the algorithm's result.

        The result is None when the algorithm was cancelled, by the stop event or by Ctrl+C (`interrupted`).
        The first failure is raised; later ones are logged.
        """
        algorithm_task = asyncio.create_task(algorithm, name="algorithm")
        runners = asyncio.create_task(self._until_runners_end(), name="runners")
        ctrl_c = asyncio.create_task(self.interrupts.asked(), name="asked")
        flagged = asyncio.create_task(until_set(self.event, self.poll_interval), name="flagged")
        watched = asyncio.create_task(_until_one_fails(self.watchers), name="watched")
        try:
            await asyncio.wait([algorithm_task, runners, ctrl_c, flagged, watched], return_when=asyncio.FIRST_COMPLETED)
            first = self._failure_of(algorithm_task) or failure_of(runners) or failure_of(watched)
            self._note_interrupt(first)
            self.event.set()
            ask = self.patience.ask
            last = await self._end(algorithm_task, min(FAILURE_GRACE_SECONDS, ask) if first or runners.done() else ask)
            self._note_interrupt(failure_of(algorithm_task))
            if self._spent and self.open_work and not self.interrupted:  # rollouts enqueued since
                with contextlib.suppress(Exception):  # the store was in the algorithm's process and ended with it
                    await within(LAST_CANCEL_SECONDS, self.open_work.cancel())
            return self._verdict(algorithm_task, first, last)
        except asyncio.CancelledError:  # this process has to end: the algorithm may still clean up
            algorithm_task.cancel()
            await _wait([algorithm_task], self.hasty.interrupt)
            raise
        finally:
            await cancel_all([algorithm_task, runners, ctrl_c, flagged, watched])

    def _note_interrupt(self, failure: BaseException | None) -> None:
        if not self.interrupted and (self.interrupts.is_asked() or isinstance(failure, KeyboardInterrupt)):
            what = "SIGTERM" if self.interrupts.terminated else "KeyboardInterrupt"
            logger.warning("%s received on main thread: ending the run (repeat to end immediately)", what)
            self.interrupted = True
            if self.on_interrupt is not None:
                self.on_interrupt()
            atexit.register(gc.freeze)  # else the interpreter's last garbage collection visits every object of torch

    def _failure_of(self, algorithm_task: asyncio.Task[Any]) -> BaseException | None:
        error = failure_of(algorithm_task)
        if not (self._spent and isinstance(error, NoScoredRolloutError)):
            return error
        logger.warning("max_rollouts ended the run before the algorithm had enough rollouts: %s", error)
        return None

    async def _until_runners_end(self) -> None:
        """Return when every runner has run its `max_rollouts` and the algorithm enqueues more rollouts.

        Rollouts that are open when the runners end are cancelled; an algorithm that is still enqueuing may continue.

        Raises:
            Exception: a runner has failed.
            StrandedWorkError: rollouts are open, no runner remains, and `max_rollouts` is not set.
        """
        await self.team.watch()
        began = latest = 0.0
        while True:
            # With the stop event set they ended because the run ends; the store may then have ended already.
            work = None if self.event.is_set() else self.open_work
            count, now = await work.count() if work is not None else 0, time.monotonic()
            if work is not None and count and await are_served_elsewhere(work.view, work.run_id):
                count = 0
            if work is not None and count and not self.event.is_set():
                if work.max_rollouts is None:
                    raise StrandedWorkError(
                        f"Every runner has ended, with {counted(count, 'rollout')} still open. "
                        "See the log for the reason why the runners ended."
                    )
                reason = f"every runner has run max_rollouts={work.max_rollouts}"
                if not self._spent:
                    logger.info("%s; open rollouts are cancelled", reason.capitalize())
                    self._spent, began, latest = True, now, now
                asks_for_more = now - latest > IDLE_SECONDS or now - began > ENQUEUING_SECONDS
                if asks_for_more:
                    logger.info("%s, and the algorithm enqueues more; the run ends", reason.capitalize())
                    with contextlib.suppress(NotImplementedError, NotFoundError):
                        await stop_run(work.view, work.run_id, reason=reason)
                await work.cancel()
                if asks_for_more:
                    return
                latest = time.monotonic()
            await asyncio.sleep(CANCEL_POLL_SECONDS if now - latest < IDLE_SECONDS else STRANDED_POLL_SECONDS)

    async def _end(self, algorithm_task: asyncio.Task[object], grace: float) -> BaseException | None:
        """End algorithm and runners, and return the error that the team raised while it ended, if any."""
        while True:
            patience = self.hasty if self.interrupted else self.patience
            closing = _end_algorithm(algorithm_task, 0.0 if self.interrupted else grace, patience)
            both = asyncio.gather(closing, self.team.end(patience), return_exceptions=True)
            again = self.interrupts.hurried() if self.interrupted else self.interrupts.asked()
            impatience = asyncio.create_task(again, name="impatience")
            await asyncio.wait([both, impatience], return_when=asyncio.FIRST_COMPLETED)
            ended = both.done()
            await cancel_all([impatience, both])
            if ended:
                return next((result for result in both.result() if isinstance(result, BaseException)), None)
            if self.interrupted:
                logger.warning("Interrupted again: not waiting any longer")
                self.team.abandon()
                return None
            self._note_interrupt(KeyboardInterrupt())

    def _verdict(
        self, algorithm_task: asyncio.Task[T], first: BaseException | None, last: BaseException | None
    ) -> T | None:
        failures = [error for error in (first, self._failure_of(algorithm_task), last) if error is not None]
        if self.interrupted:
            for error in failures:
                if not isinstance(error, KeyboardInterrupt):
                    logger.warning("The run was interrupted; another error followed: %s", error)
            return None
        for error in failures[1:]:
            if error is not failures[0]:
                logger.warning("The run has already failed; another error followed: %s", error)
        if failures:
            raise failures[0]
        gave = algorithm_task.done() and not algorithm_task.cancelled() and algorithm_task.exception() is None
        return algorithm_task.result() if gave else None


class TaskTeam:
    """A `Team` of coroutines in this loop (some of which may represent threads), by name."""

    store: LightningStore | None = None

    def __init__(self, members: Mapping[str, Coroutine[Any, Any, Any]]) -> None:
        self._tasks = [asyncio.create_task(work, name=name) for name, work in members.items()]
        for task in self._tasks:  # retrieved, so that asyncio does not report further failures
            task.add_done_callback(failure_of)

    async def watch(self) -> None:
        """Return when all tasks have ended; raise the first failure. A cancellation is not a failure."""
        if not self._tasks:
            await asyncio.Event().wait()  # no local runner to wait for
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = self._failure()
        if failed is not None:
            raise failed
        await asyncio.wait(self._tasks)

    async def end(self, patience: Patience) -> None:
        """Wait for the tasks that obey the event, cancel the others, and abandon those that do not react."""
        before = self._failure()
        if await _wait(self._tasks, patience.ask):
            logger.debug("Every runner finished during the grace period")
        else:
            logger.debug("Graceful delay elapsed: cancelling the runners")
            self.abandon()
            await _wait(self._tasks, patience.interrupt)
        for task in self._tasks:
            if not task.done():
                logger.error("%s did not stop after cancellation; abandoning task", task.get_name())
        failed = self._failure()
        if failed is not None and before is None:
            raise failed

    def abandon(self) -> None:
        """Cancel all tasks."""
        for task in self._tasks:
            task.cancel()

    def _failure(self) -> BaseException | None:
        return next((e for task in self._tasks if (e := failure_of(task)) is not None), None)


async def until_set(event: ExecutionEvent, poll_interval: float) -> None:
    """Return once the event is set. Polls, because another thread or process may set it."""
    while not event.is_set():  # noqa: ASYNC110 -- see above
        await asyncio.sleep(poll_interval)


def failure_of(task: asyncio.Future[Any]) -> BaseException | None:
    """Return the exception of the task; None if it is running, has returned or was cancelled."""
    return task.exception() if task.done() and not task.cancelled() else None


async def cancel_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel the running tasks and wait briefly for them; those that do not react are abandoned."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=NOTICE_SECONDS)
    for task in tasks:
        failure_of(task)  # retrieved, so that asyncio does not report it


async def _until_one_fails(watchers: Sequence[Callable[[], Coroutine[object, object, None]]]) -> None:
    """Run all watchers concurrently. Never return; raise the first failure."""
    tasks = [asyncio.create_task(watcher(), name="watcher") for watcher in watchers]
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
                tasks.remove(task)
        await asyncio.Event().wait()
    finally:
        for task in tasks:
            task.cancel()


async def _end_algorithm(algorithm_task: asyncio.Task[object], grace: float, patience: Patience) -> None:
    if await _wait([algorithm_task], grace):
        return
    logger.debug("Graceful delay elapsed: cancelling the algorithm")
    algorithm_task.cancel()
    seconds = patience.interrupt + patience.terminate + patience.kill  # threads get no signals: one step, not three
    if not await _wait([algorithm_task], seconds if grace else seconds + patience.ask):
        logger.error("%s did not stop after cancellation; abandoning task", algorithm_task.get_name())


async def _wait(tasks: Sequence[asyncio.Task[object]], seconds: float) -> bool:
    """Wait up to `seconds` for all tasks and return whether all are done."""
    if not all(task.done() for task in tasks) and seconds > 0:
        await asyncio.wait(tasks, timeout=seconds)
    return all(task.done() for task in tasks)
