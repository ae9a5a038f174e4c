"""The course of a run and of its ending, the same for threads and processes.

A run ends when the algorithm is done, a bundle or a watcher fails, someone sets the stop event, every runner has ended
while work is open, or Ctrl+C. Where runners end after `max_rollouts`, what is open then is cancelled instead, and the
run ends when the algorithm asks for more. Then algorithm and runners are asked, interrupted, terminated and killed,
each step with a time of its own. Ctrl+C uses a shorter patience, and a second one uses none.
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
"""How long an algorithm may see the stop event before it is cancelled, when a runner has failed."""
NOTICE_SECONDS = 0.1
"""How long a cancelled task may take to run its clean-up before its owner goes on."""
STRANDED_POLL_SECONDS = 0.25
"""How often a store is asked for open work once every runner has ended."""
CANCEL_POLL_SECONDS = 0.02
"""The same while an algorithm enqueues what is cancelled."""
IDLE_SECONDS = 3.0
"""An algorithm that has enqueued nothing for so long, and then does, asks for more than what is left of a batch."""
LAST_CANCEL_SECONDS = 2.0
"""How long the store may take to cancel what the algorithm has enqueued up to its end."""
ENQUEUING_SECONDS = 10.0
"""How long an algorithm may go on enqueuing what is cancelled."""


@dataclass(frozen=True)
class Patience:
    """Seconds that an ending gives to each of its steps."""

    ask: float
    """After the stop event was set."""
    interrupt: float
    """After SIGINT, or after the cancellation of a coroutine."""
    terminate: float = 0.0
    """After SIGTERM; for threads, the last join."""
    kill: float = 0.0
    """After SIGKILL."""


INTERRUPTED = Patience(ask=1.0, interrupt=1.5, terminate=0.5, kill=0.5)
"""Ctrl+C has five seconds in all; the rest is for the store server and the exit."""


class Team(Protocol):
    """The runners of one run, wherever they are."""

    store: LightningStore | None
    """That of the run, once it is known."""

    async def watch(self) -> None:
        """Return when every runner has ended in an ordinary way.

        Raises:
            Exception: a runner failed for good.
        """

    async def end(self, patience: Patience) -> None:
        """Bring every runner to its end.

        Raises:
            RuntimeError: one of them ended in an unexpected way.
        """

    def abandon(self) -> None:
        """Kill what can be killed, now; leave the rest behind."""


@dataclass
class Supervision:
    """Supervises one run: the team of runners, and everything that may end the run."""

    team: Team
    event: ExecutionEvent
    interrupts: Interrupts
    patience: Patience
    hasty: Patience
    """The patience after Ctrl+C."""
    poll_interval: float = 0.05
    """How often the stop event is looked at, in seconds."""
    open_work: OpenWork | None = None
    """The rollouts that are not at an end; None before they are known, and where others may run them."""
    watchers: Sequence[Callable[[], Coroutine[object, object, None]]] = ()
    """Run beside algorithm and runners. What one raises ends the run; one that returns ends nothing."""
    on_interrupt: Callable[[], None] | None = None
    """Called when Ctrl+C or SIGTERM ends the run."""
    interrupted: bool = field(default=False, init=False)
    _spent: bool = field(default=False, init=False)
    """True once every runner has run its `max_rollouts` and what was left was cancelled."""

    async def conduct(self, algorithm: Coroutine[object, object, T]) -> T | None:
        """Run the algorithm beside the team, bring both to an end, and return the algorithm's result.

        The result is None when the algorithm was cancelled, by the stop event or by Ctrl+C (`interrupted`).
        What failed first is raised; a later failure is logged.
        """
        algorithm_task = asyncio.create_task(algorithm, name="algorithm")
        runners = asyncio.create_task(self._until_runners_end(), name="runners")
        asked = asyncio.create_task(self.interrupts.asked(), name="asked")
        flagged = asyncio.create_task(until_set(self.event, self.poll_interval), name="flagged")
        watched = asyncio.create_task(_until_one_fails(self.watchers), name="watched")
        try:
            await asyncio.wait([algorithm_task, runners, asked, flagged, watched], return_when=asyncio.FIRST_COMPLETED)
            first = self._failure_of(algorithm_task) or failure_of(runners) or failure_of(watched)
            self._note_interrupt(first)
            self.event.set()
            ask = self.patience.ask
            last = await self._end(algorithm_task, min(FAILURE_GRACE_SECONDS, ask) if first or runners.done() else ask)
            self._note_interrupt(failure_of(algorithm_task))
            if self._spent and self.open_work and not self.interrupted:  # what was enqueued since
                with contextlib.suppress(Exception):  # the store was that of the algorithm's process, and ended with it
                    await within(LAST_CANCEL_SECONDS, self.open_work.cancel())
            return self._verdict(algorithm_task, first, last)
        except asyncio.CancelledError:  # this process is to end: the algorithm may still clean up
            algorithm_task.cancel()
            await _wait([algorithm_task], self.hasty.interrupt)
            raise
        finally:
            await cancel_all([algorithm_task, runners, asked, flagged, watched])

    def _note_interrupt(self, failure: BaseException | None) -> None:
        if not self.interrupted and (self.interrupts.is_asked() or isinstance(failure, KeyboardInterrupt)):
            what = "SIGTERM" if self.interrupts.terminated else "KeyboardInterrupt"
            logger.warning("%s received on main thread: ending the run (again: at once)", what)
            self.interrupted = True
            if self.on_interrupt is not None:
                self.on_interrupt()
            atexit.register(gc.freeze)  # else the last collection of the interpreter walks over all that torch has made

    def _failure_of(self, algorithm_task: asyncio.Task[Any]) -> BaseException | None:
        error = failure_of(algorithm_task)
        if not (self._spent and isinstance(error, NoScoredRolloutError)):
            return error
        logger.warning("max_rollouts left the algorithm too little: %s", error)
        return None

    async def _until_runners_end(self) -> None:
        """Return when every runner has run its `max_rollouts` and the algorithm asks for more than that.

        What is open when they have ended is cancelled; an algorithm that is still enqueuing it may go on.

        Raises:
            Exception: a runner has failed.
            StrandedWorkError: nobody is left to do the work that is open, and there is no `max_rollouts`.
        """
        await self.team.watch()
        began = latest = 0.0
        while True:
            # With the stop event set they have ended because the run ends; the store may then be gone already.
            work = None if self.event.is_set() else self.open_work
            count, now = await work.count() if work is not None else 0, time.monotonic()
            if work is not None and count and await are_served_elsewhere(work.view, work.run_id):
                count = 0
            if work is not None and count and not self.event.is_set():
                if work.max_rollouts is None:
                    raise StrandedWorkError(
                        f"Every runner has ended, and {count} rollout(s) are still open that nobody would run. "
                        "Raise n_runners, or give the algorithm less to do."
                    )
                reason = f"every runner has run max_rollouts={work.max_rollouts}"
                if not self._spent:
                    logger.info("%s; what is open is cancelled", reason.capitalize())
                    self._spent, began, latest = True, now, now
                asks_for_more = now - latest > IDLE_SECONDS or now - began > ENQUEUING_SECONDS
                if asks_for_more:
                    logger.info("%s, and the algorithm asks for more; the run ends", reason.capitalize())
                    with contextlib.suppress(NotImplementedError, NotFoundError):
                        await stop_run(work.view, work.run_id, reason=reason)
                await work.cancel()
                if asks_for_more:
                    return
                latest = time.monotonic()
            await asyncio.sleep(CANCEL_POLL_SECONDS if now - latest < IDLE_SECONDS else STRANDED_POLL_SECONDS)

    async def _end(self, algorithm_task: asyncio.Task[object], grace: float) -> BaseException | None:
        """End algorithm and runners and return what went wrong with the team while it ended."""
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
                    logger.warning("The run was interrupted; besides: %s", error)
            return None
        for error in failures[1:]:
            if error is not failures[0]:
                logger.warning("The run has failed already; besides: %s", error)
        if failures:
            raise failures[0]
        gave = algorithm_task.done() and not algorithm_task.cancelled() and algorithm_task.exception() is None
        return algorithm_task.result() if gave else None


class TaskTeam:
    """A `Team` of coroutines in this loop (some of which may stand for threads), by name."""

    store: LightningStore | None = None

    def __init__(self, members: Mapping[str, Coroutine[Any, Any, Any]]) -> None:
        self._tasks = [asyncio.create_task(work, name=name) for name, work in members.items()]
        for task in self._tasks:  # looked at, so that no failure beside the first is reported as never retrieved
            task.add_done_callback(failure_of)

    async def watch(self) -> None:
        """Return when all have ended; raise what the first to fail raised. Being cancelled is no failure."""
        if not self._tasks:
            await asyncio.Event().wait()  # no runner of ours to wait for
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = self._failure()
        if failed is not None:
            raise failed
        await asyncio.wait(self._tasks)

    async def end(self, patience: Patience) -> None:
        """Wait for those that see the event, cancel the others, and leave behind what does not react."""
        before = self._failure()
        if await _wait(self._tasks, patience.ask):
            logger.debug("Every runner finished by itself during grace period")
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
        """Cancel every one of them."""
        for task in self._tasks:
            task.cancel()

    def _failure(self) -> BaseException | None:
        return next((e for task in self._tasks if (e := failure_of(task)) is not None), None)


async def until_set(event: ExecutionEvent, poll_interval: float) -> None:
    """Return once the event is set. It is polled: it may be set by another thread or process."""
    while not event.is_set():  # noqa: ASYNC110 -- see above
        await asyncio.sleep(poll_interval)


def failure_of(task: asyncio.Future[Any]) -> BaseException | None:
    """Return what the task raised; None if it runs, has returned or was cancelled."""
    return task.exception() if task.done() and not task.cancelled() else None


async def cancel_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel what still runs and give it a moment to take notice; what refuses is left to itself."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=NOTICE_SECONDS)
    for task in tasks:
        failure_of(task)  # looked at, so that it is not reported as never retrieved


async def _until_one_fails(watchers: Sequence[Callable[[], Coroutine[object, object, None]]]) -> None:
    """Run all of them beside each other; never return, but raise what the first to fail raises."""
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
    seconds = patience.interrupt + patience.terminate + patience.kill  # it gets no signals: one step instead of three
    if not await _wait([algorithm_task], seconds if grace else seconds + patience.ask):
        logger.error("%s did not stop after cancellation; abandoning task", algorithm_task.get_name())


async def _wait(tasks: Sequence[asyncio.Task[object]], seconds: float) -> bool:
    """Wait up to `seconds` for all of them and return whether all are done."""
    if not all(task.done() for task in tasks) and seconds > 0:
        await asyncio.wait(tasks, timeout=seconds)
    return all(task.done() for task in tasks)
