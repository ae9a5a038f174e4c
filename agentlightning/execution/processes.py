"""A team of child processes: watched, restarted with growing pauses, and brought to an end by force if need be."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

from agentlightning.errors import RunnerDiedError
from agentlightning.execution.children import ChildExit, ChildTask, Crew, ProcessContext, name_of
from agentlightning.execution.events import ExecutionEvent
from agentlightning.execution.nursery import Nursery
from agentlightning.execution.supervise import Patience

logger = logging.getLogger(__name__)

StartMethod = Literal["fork", "spawn", "forkserver"]

RESTART_PAUSE_SECONDS = 0.1
"""Pause before a child is restarted; doubled for each further death in short order, up to the ceiling."""
RESTART_PAUSE_CEILING_SECONDS = 10.0
CALM_SECONDS = 10.0
"""A child that has lived for so long did not die in short order."""


class Starter(Protocol):
    """`Crew` or `Nursery`."""

    def start(self, index: int) -> None:
        """Start child `index`."""

    def filenos(self) -> list[int]:
        """What to wait for."""
        ...

    def collect(self) -> list[ChildExit]:
        """Return those that have ended."""
        ...

    def signal(self, index: int, signum: int) -> None:
        """Send a signal."""

    def close(self) -> None:
        """Kill what is left."""


def default_start_method() -> StartMethod:
    """`fork` on Linux, `spawn` elsewhere."""
    return "fork" if sys.platform == "linux" else "spawn"


def make_starter(
    method: StartMethod, task: ChildTask, event: ExecutionEvent, prefix: str, *, restarts: bool
) -> Starter:
    """Return what starts the children of one run. With `fork` and restarts it is a process that must come first.

    Raises:
        TypeError: children are to be spawned and the task cannot be pickled; names the part and the ways out.
    """
    ctx = cast(ProcessContext, multiprocessing.get_context(method))
    if method == "fork" and restarts:
        return Nursery(ctx, task, event, prefix)
    if method != "fork":
        check_picklable(task, method)
    return Crew(ctx, task, event, prefix)


def restart_pause(hasty_deaths: int) -> float:
    """Return the seconds before a child is started again that has died so often in short order before."""
    return min(RESTART_PAUSE_SECONDS * 2 ** min(hasty_deaths, 10), RESTART_PAUSE_CEILING_SECONDS)


@dataclass
class ProcessTeam:
    """A `Team` of child processes.

    A child that ends with a code that is not allowed is restarted, up to `max_restarts` times; then the team fails.
    Owned by the loop that watches it, but for `start`.
    """

    starter: Starter
    size: int
    event: ExecutionEvent
    prefix: str = "runner-"
    allowed_exit_codes: Sequence[int] = (0, -15)
    max_restarts: int = 3
    error: Callable[[str], Exception] = RunnerDiedError
    """What to raise when one has failed for good."""
    result: Any = field(default=None, init=False)
    """What the last child to return sent."""
    _alive: set[int] = field(default_factory=set[int], init=False)
    _due: dict[int, float] = field(default_factory=dict[int, float], init=False)
    """When to restart which child, on the monotonic clock."""
    _restarts: dict[int, int] = field(default_factory=dict[int, int], init=False)
    _begun: dict[int, float] = field(default_factory=dict[int, float], init=False)
    """When each was last started, on the monotonic clock."""
    _hasty_deaths: dict[int, int] = field(default_factory=dict[int, int], init=False)
    """How often each has died in short order."""
    _interrupted: set[int] = field(default_factory=set[int], init=False)
    """Those that were sent SIGINT."""
    _failed: list[ChildExit] = field(default_factory=list[ChildExit], init=False)

    def start(self) -> None:
        """Start every child. With `fork`: before this process has threads."""
        for index in range(self.size):
            self._start(index)

    async def watch(self) -> None:
        """Return when every child has ended in an ordinary way, restarting those that did not.

        Raises:
            Exception: `error`; one ended otherwise and may not be restarted again.
        """
        while self._alive or self._due:
            await self._collect(min(self._due.values()) - time.monotonic() if self._due else None)
            if self._failed:
                raise self._died()
            for index in [index for index, due in self._due.items() if due <= time.monotonic()]:
                del self._due[index]
                self._start(index)

    async def end(self, patience: Patience) -> None:
        """Ask, interrupt, terminate, kill; each step only for those that the one before has not ended.

        Raises:
            Exception: `error`; one ended with a code that is not allowed while this went on.
        """
        before = len(self._failed)
        self.event.set()
        self._due.clear()
        steps = ((0, patience.ask), (signal.SIGINT, patience.interrupt))
        steps += ((signal.SIGTERM, patience.terminate), (signal.SIGKILL, patience.kill))
        for signum, seconds in steps:
            if self._alive:
                await self._step(signum, seconds)
        for index in sorted(self._alive):
            logger.error("%s is alive after SIGKILL", name_of(self.prefix, index))
        if len(self._failed) > before:
            raise self._died()

    def abandon(self) -> None:
        """Kill every child."""
        for index in self._alive:
            self.starter.signal(index, signal.SIGKILL)

    def _start(self, index: int) -> None:
        self._alive.add(index)
        self._begun[index] = time.monotonic()
        self.starter.start(index)

    async def _step(self, signum: int, seconds: float) -> None:
        if signum:
            names = ", ".join(name_of(self.prefix, index) for index in sorted(self._alive))
            logger.warning("Still running: %s; sending %s", names, signal.Signals(signum).name)
            for index in self._alive:
                self.starter.signal(index, signum)
            if signum == signal.SIGINT:
                self._interrupted |= self._alive
        deadline = time.monotonic() + seconds
        while self._alive and (left := deadline - time.monotonic()) > 0:
            await self._collect(left)

    async def _collect(self, timeout: float | None) -> None:
        """Wait until a child has ended or time is up, and judge those that have."""
        await until_readable(self.starter.filenos(), timeout)
        for exit_ in self.starter.collect():
            self._judge(exit_)

    def _judge(self, exit_: ChildExit) -> None:
        self._alive.discard(exit_.index)
        if exit_.exitcode is not None and exit_.exitcode in self.allowed_exit_codes:
            if exit_.report is not None:
                self.result = exit_.report.result
            logger.debug("%s has ended", exit_.describe())
            return
        obeyed = exit_.exitcode == -signal.SIGINT and exit_.index in self._interrupted
        if obeyed or (self.event.is_set() and not exit_.begun):  # the end came while it was starting, or on its way out
            logger.debug("%s has ended, outside its task", exit_.describe())
            return
        used = self._restarts.get(exit_.index, 0)
        if self.event.is_set() or not exit_.may_restart() or used >= self.max_restarts:
            self._failed.append(exit_)
            return
        calm = time.monotonic() - self._begun[exit_.index] >= CALM_SECONDS
        hasty = self._hasty_deaths[exit_.index] = 0 if calm else self._hasty_deaths.get(exit_.index, -1) + 1
        self._restarts[exit_.index] = used + 1
        self._due[exit_.index] = time.monotonic() + restart_pause(hasty)
        logger.warning("%s ended unexpectedly; restart %d of %d", exit_.describe(), used + 1, self.max_restarts)

    def _died(self) -> Exception:
        names = ", ".join(exit_.describe() for exit_ in self._failed)
        causes = "\n".join(exit_.explain() for exit_ in self._failed)
        spent = max((self._restarts.get(exit_.index, 0) for exit_ in self._failed), default=0)
        text = f"Subprocesses failed with unexpected exit codes: {names}"
        if spent:
            text += f" (restarted {spent} times; the limit is max_runner_restarts={self.max_restarts})"
        return self.error(f"{text}\n{causes}")


async def until_readable(filenos: Sequence[int], timeout: float | None) -> None:
    """Return when one of them can be read or `timeout` seconds have passed; None waits without limit."""
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


def check_picklable(task: ChildTask, method: str) -> None:
    """Raise a TypeError that names the part of the task that cannot be pickled, and the ways out."""
    try:
        pickle.dumps(task)
    except Exception as error:  # any class may refuse to be pickled, with any exception
        path = _culprit(task, "", 4) or type(task).__name__
        raise TypeError(
            f"start_method={method!r} sends the parts of the run to the child processes, and {path} cannot be pickled "
            f"({type(error).__name__}: {error}). Ways out: define functions and classes at the top level of a module; "
            "pass a class, factory or dict instead of an instance; use start_method='fork' on Linux; or strategy='shm'."
        ) from error


def _culprit(value: object, path: str, depth: int) -> str | None:
    """Return the path of the smallest part of `value` that cannot be pickled."""
    for name, part in vars(value).items() if hasattr(value, "__dict__") else ():
        try:
            pickle.dumps(part)
        except Exception:  # see above
            inner = f"{path}.{name}".lstrip(".")
            return (_culprit(part, inner, depth - 1) if depth else None) or f"{inner} ({type(part).__name__})"
    return None
