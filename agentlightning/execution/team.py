"""A team of child processes: watched, restarted with growing pauses, and killed if they do not end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

from agentlightning.errors import ConflictError, NotFoundError, RunnerDiedError
from agentlightning.execution.base import error_with
from agentlightning.execution.children import ChildExit, ChildProcesses, ChildTask, ForkServer, ProcessContext, name_of
from agentlightning.execution.events import ExecutionEvent
from agentlightning.execution.subreaper import uses_accelerator
from agentlightning.execution.supervisor import Patience
from agentlightning.store.base import RUNNING, UNSET, LightningStore, Unset
from agentlightning.store.rules.lifecycle import RUNNER_DIED, STOPPED
from agentlightning.store.wrappers import complete
from agentlightning.types import AttemptedRollout, AttemptError
from agentlightning.utils.backoff import doubled
from agentlightning.utils.concurrency.loops import within
from agentlightning.utils.descendants import KILL

logger = logging.getLogger(__name__)

StartMethod = Literal["fork", "spawn", "forkserver"]

RESTART_PAUSE_SECONDS = 0.1
"""Seconds before a child is restarted; doubled for each further death in quick succession, up to the ceiling."""
RESTART_PAUSE_CEILING_SECONDS = 10.0
CALM_SECONDS = 10.0
"""Seconds after which a child's death does not count as one in quick succession."""
SETTLE_SECONDS = 5.0
"""Seconds that the store may take to end the attempts of a dead child."""
SETTLE_STOPPED_SECONDS = 0.5
"""The same at the end of the run, which may take 5 s in total after Ctrl+C."""


class Starter(Protocol):
    """Starts the children of a team: `ChildProcesses`, `ForkServer`, or `RayActors`. Owned by one thread."""

    @property
    def look_seconds(self) -> float | None:
        """Seconds between calls of `collect` without a readable descriptor; None if they are not needed."""
        ...

    def start(self, index: int) -> None:
        """Start child `index`."""

    def filenos(self) -> list[int]:
        """Return the descriptors to wait for."""
        ...

    def collect(self) -> list[ChildExit]:
        """Return the children that have ended since the last call."""
        ...

    def signal(self, index: int, signum: int) -> None:
        """Send a signal to a live child."""

    def close(self) -> None:
        """Kill the remaining children, and wait for their end. May be called twice."""


def default_start_method() -> StartMethod:
    """Return `fork` on Linux, `spawn` elsewhere."""
    return "fork" if sys.platform == "linux" else "spawn"


def make_starter(
    method: StartMethod,
    task: ChildTask,
    event: ExecutionEvent,
    prefix: str,
    *,
    restarts: bool,
    ends_descendants: bool = False,
) -> Starter:
    """Return the starter of one run's children. With `fork` and restarts it is a process that must be started first.

    With `ends_descendants`, all descendants of a child end with it.

    Raises:
        TypeError: children are to be spawned and a part of the task cannot be pickled.
    """
    ctx = cast(ProcessContext, multiprocessing.get_context(method))
    if method == "fork" and restarts:
        return ForkServer(ctx, task, event, prefix, ends_descendants=ends_descendants)
    if method != "fork":
        check_picklable(task, method)
    return ChildProcesses(ctx, task, event, prefix, ends_descendants)


def restart_pause(hasty_deaths: int) -> float:
    """Return the seconds before a restart of a child that has died this often in quick succession."""
    return doubled(hasty_deaths + 1, RESTART_PAUSE_SECONDS, RESTART_PAUSE_CEILING_SECONDS)


@dataclass
class ProcessTeam:
    """A `Team` of child processes.

    A child that ends with a code that is not allowed, or while it holds attempts, is restarted, up to `max_restarts`
    times; then the team fails. Deaths with the same rollout count once, because the rollout has its own limit of
    retries. Owned by the loop that watches it, except `start`.
    """

    starter: Starter
    size: int
    event: ExecutionEvent
    prefix: str = "runner-"
    allowed_exit_codes: Sequence[int] = (0, -15)
    max_restarts: int = 3
    error: Callable[[str], Exception] = RunnerDiedError
    """The exception to raise when a child has failed permanently."""
    alone: bool = False
    """True if the children alone decide the result of this process: an allowed exit code is then a normal end only if
    the child's task has ended, and an error with its own exit code is also raised here."""
    store: LightningStore | None = None
    """The store in which to end the attempts of a child that died."""
    result: Any = field(default=None, init=False)
    """Result of the child that returned last."""
    _alive: set[int] = field(default_factory=set[int], init=False)
    _due: dict[int, float] = field(default_factory=dict[int, float], init=False)
    """Time of each child's next restart, on the monotonic clock."""
    _restarts: dict[int, int] = field(default_factory=dict[int, int], init=False)
    _begun: dict[int, float] = field(default_factory=dict[int, float], init=False)
    """Time of each child's last start, on the monotonic clock."""
    _hasty_deaths: dict[int, int] = field(default_factory=dict[int, int], init=False)
    """Number of each child's deaths in quick succession."""
    _sent: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]], init=False)
    """Child and signal, for each signal that this team sent."""
    _blamed: set[str] = field(default_factory=set[str], init=False)
    """Rollouts that children held when they died."""
    _failed: list[ChildExit] = field(default_factory=list[ChildExit], init=False)

    def start(self) -> None:
        """Start every child. With `fork`: before this process has threads."""
        for index in range(self.size):
            self._start(index)

    async def watch(self) -> None:
        """Return when every child has ended normally; restart those that did not.

        Raises:
            Exception: `error`; a child did not end normally and may not be restarted again.
        """
        while self._alive or self._due:
            await self._collect(min(self._due.values()) - time.monotonic() if self._due else None)
            if self._failed:
                raise self._died()
            for index in [index for index, due in self._due.items() if due <= time.monotonic()]:
                del self._due[index]
                self._start(index)

    async def end(self, patience: Patience) -> None:
        """Request the children to stop, then interrupt, terminate and kill those that are still alive.

        A child that another process kills during this time, and that could have been restarted, is not a failure.

        Raises:
            Exception: `error`; a child ended with a code that is not allowed during this time.
        """
        before = len(self._failed)
        self.event.set()
        self._due.clear()
        steps = ((0, patience.ask), (signal.SIGINT, patience.interrupt))
        steps += ((signal.SIGTERM, patience.terminate), (KILL, patience.kill))
        for signum, seconds in steps:
            if signum and self._alive:
                names = ", ".join(name_of(self.prefix, index) for index in sorted(self._alive))
                logger.warning("Still running: %s; sending %s", names, signal.Signals(signum).name)
                for index in self._alive:
                    self.starter.signal(index, signum)
                    self._sent.add((index, signum))
            deadline = time.monotonic() + seconds
            while self._alive and (remaining := deadline - time.monotonic()) > 0:
                await self._collect(remaining)
        for index in sorted(self._alive):
            logger.error("%s is still alive after SIGKILL", name_of(self.prefix, index))
        if len(self._failed) > before:
            raise self._died()

    def abandon(self) -> None:
        """Kill every child."""
        for index in self._alive:
            self.starter.signal(index, KILL)

    def _start(self, index: int) -> None:
        self._alive.add(index)
        self._begun[index] = time.monotonic()
        self.starter.start(index)

    async def _collect(self, timeout: float | None) -> None:
        """Wait until a child has ended or the time is up, and handle the children that have ended."""
        waits = [seconds for seconds in (timeout, self.starter.look_seconds) if seconds is not None]
        await until_readable(self.starter.filenos(), min(waits, default=None))
        for exit_ in self.starter.collect():
            self._alive.discard(exit_.index)
            self._judge(exit_, await self._settle(exit_))

    async def _settle(self, exit_: ChildExit) -> frozenset[str]:
        """End the attempts that a child held when it ended; return the rollouts if the run continues.

        Rollouts of a child that died are requeued, up to `infrastructure_retries` times; rollouts of a child that ended
        with its run are not retried.
        """
        if exit_.finished or exit_.worker_id is None or self.store is None:
            return frozenset()
        stopped, trace = self.event.is_set(), None
        message = f"{exit_.describe()} {'ended with its run' if stopped else 'died'} during this attempt"
        if exit_.report is not None and not stopped:
            trace = exit_.report.traceback
        try:
            settling = end_attempts(self.store, {exit_.worker_id}, message, trace, stopped=stopped)
            held = await within(SETTLE_STOPPED_SECONDS if stopped else SETTLE_SECONDS, settling)
        except Exception as error:  # the store is unreachable, or does not know the operation
            if stopped:  # the end of the run does not wait for it
                logger.debug("could not end the attempts of %s: %r", exit_.describe(), error)
            else:
                text = "%s died, and its attempts could not be ended; their leases will expire: %r"
                logger.warning(text, exit_.describe(), error)
            return frozenset()
        return frozenset() if stopped else held

    def _judge(self, exit_: ChildExit, held: frozenset[str]) -> None:
        """Handle a child's end; `held` are the rollouts that it held, if it was not requested to end."""
        done = exit_.finished or self.event.is_set() or not self.alone
        if done and not held and exit_.exitcode is not None and exit_.exitcode in self.allowed_exit_codes:
            if exit_.report is not None and not exit_.report.interrupted:
                self.result = exit_.report.result
            logger.debug("%s has ended", exit_.describe())
            return
        signum = -exit_.exitcode if exit_.exitcode is not None and exit_.exitcode < 0 else None
        obeyed = signum == signal.SIGINT and (exit_.index, signum) in self._sent
        if obeyed or (self.event.is_set() and not exit_.begun):  # it ended while it was starting, or during its exit
            logger.debug("%s has ended outside its task", exit_.describe())
            return
        is_known = not self._blamed.isdisjoint(held)
        self._blamed |= held
        used = self._restarts.get(exit_.index, 0) + (0 if is_known else 1)
        was_killed = signum is not None or exit_.exitcode is None  # None: a Ray actor died, or the code is unknown
        killed_by_another = was_killed and (exit_.index, signum) not in self._sent
        if not exit_.may_restart() or used > self.max_restarts or (self.event.is_set() and not killed_by_another):
            self._failed.append(exit_)
            return
        if self.event.is_set():  # without the end of the run it would have been restarted
            logger.warning("%s was killed while the run was ending; the results of the run are kept", exit_.describe())
            return
        calm = time.monotonic() - self._begun[exit_.index] >= CALM_SECONDS
        hasty = self._hasty_deaths[exit_.index] = 0 if calm else self._hasty_deaths.get(exit_.index, -1) + 1
        self._restarts[exit_.index] = used
        self._due[exit_.index] = time.monotonic() + restart_pause(hasty)
        with_what = f" during {', '.join(sorted(held))}" if held else ""
        logger.warning(
            "%s ended unexpectedly%s; restart %d of %d", exit_.describe(), with_what, used, self.max_restarts
        )

    def _died(self) -> Exception:
        names = ", ".join(exit_.describe() for exit_ in self._failed)
        causes = "\n".join(exit_.explain() for exit_ in self._failed)
        codes = [exit_.exitcode for exit_ in self._failed if self.alone and exit_.report is not None]
        error = error_with(codes[0]) if codes else None
        text = f"Subprocesses failed with unexpected exit codes: {names}{self._restarted()}\n{causes}"
        return (error or self.error)(text)

    def _restarted(self) -> str:
        """Return the restarts of the failed children for a message; empty without restarts."""
        spent = max((self._restarts.get(exit_.index, 0) for exit_ in self._failed), default=0)
        return f" (restarts: {spent}; the limit is max_runner_restarts={self.max_restarts})" if spent else ""


async def until_readable(filenos: Sequence[int], timeout: float | None) -> None:
    """Return when one of them is readable or `timeout` seconds have passed; None waits without limit."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not readable.done():
            readable.set_result(None)

    for fileno in filenos:
        loop.add_reader(fileno, wake)
    try:
        await asyncio.wait([readable], timeout=None if timeout is None else max(timeout, 0.0))
    finally:
        for fileno in filenos:
            loop.remove_reader(fileno)


def obstacle_to_children(method: StartMethod, task: ChildTask) -> str | None:
    """Return the reason why this process cannot start children for the task, or None."""
    if method == "fork":
        return "it has opened an accelerator, which cannot be used after a fork" if uses_accelerator() else None
    try:
        check_picklable(task, method)
    except TypeError as error:
        return str(error)
    return None


def check_picklable(task: ChildTask, method: str) -> None:
    """Raise a `TypeError` that names the part of the task that cannot be pickled."""
    try:
        pickle.dumps(task)
    except Exception as error:  # any class may refuse to be pickled, with any exception
        part = part_not_pickled(task, pickle.dumps, depth=5)
        raise TypeError(
            f"start_method={method!r} sends the parts of the run to the child processes, and {part} cannot be pickled "
            f"({type(error).__name__}: {error}). Define functions and classes at the top level of a module, pass a "
            "class, factory or dict instead of an instance, use start_method='fork' on Linux, or use strategy='shm'."
        ) from error


def part_not_pickled(value: object, dumps: Callable[[object], bytes], *, depth: int, path: str = "") -> str:
    """Return the path of the smallest part of `value` that cannot be pickled, at most `depth` attributes deep."""
    for name, part in vars(value).items() if depth and hasattr(value, "__dict__") else ():
        try:
            dumps(part)
        except Exception:  # see above
            return part_not_pickled(part, dumps, depth=depth - 1, path=f"{path}.{name}".lstrip("."))
    return f"{path} ({type(value).__name__})" if path else type(value).__name__


async def end_attempts(
    store: LightningStore,
    worker_ids: Set[str],
    message: str,
    traceback: str | None = None,
    *,
    stopped: bool = False,
    run_id: str | Unset | None = UNSET,
) -> frozenset[str]:
    """End the attempts that workers hold, of one run or of all runs, and return the ids of the rollouts.

    An attempt that was already reported, or has another worker, is not changed. With `stopped`, the attempts are
    cancelled; otherwise they count as lost with their runner and are retried.
    """
    store = complete(store)
    error = AttemptError(type="agentlightning.errors.RunnerDiedError", message=message, traceback=traceback)
    held: set[str] = set()
    for rollout in await store.query_rollouts(status_in=sorted(RUNNING), run_id=run_id):
        if not isinstance(rollout, AttemptedRollout) or rollout.attempt.worker_id not in worker_ids:
            continue
        held.add(rollout.rollout_id)
        with contextlib.suppress(ConflictError, NotFoundError):  # it ended or was deleted in the meantime
            await store.update_attempt(
                rollout.rollout_id,
                rollout.attempt.attempt_id,
                status="failed",
                outcome="cancelled" if stopped else "infrastructure_fault",
                outcome_reason=STOPPED if stopped else RUNNER_DIED,
                error=error,
            )
    return frozenset(held)
