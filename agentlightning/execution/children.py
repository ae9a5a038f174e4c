"""Child processes: how one is described and started, what it reports, and that it never outlives its parent.

`child_main` is what every child runs, whatever its start method. It is a module-level function and its task is a plain
object, so that a child can be spawned as well as forked.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import multiprocessing
import multiprocessing.util
import os
import pickle
import shutil
import signal
import sys
import threading
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, cast

from agentlightning.errors import StoreUnreachableError
from agentlightning.execution.events import ExecutionEvent
from agentlightning.execution.exit_codes import exit_code_of
from agentlightning.execution.interrupts import Interrupts
from agentlightning.execution.loops import run

logger = logging.getLogger(__name__)

TRACEBACK_BYTES = 8192
BEGUN = "begun"
"""What a child says first."""
_PR_SET_PDEATHSIG = 1

ProcessContext = ForkContext | SpawnContext | ForkServerContext


class ChildTask(Protocol):
    """What children do; `index` says which one this is. Picklable if children are to be spawned."""

    async def __call__(self, index: int, event: ExecutionEvent) -> Any:
        """Work until done or until `event` is set."""


@dataclass(frozen=True)
class ChildReport:
    """What a child said when its task ended."""

    result: Any = None
    """What the task returned, if it can be pickled."""
    cause: str | None = None
    """Class and message of the exception that ended it; None if it returned."""
    traceback: str | None = None
    """The last frames, at most 8 KiB."""
    restart_helps: bool = True
    """False if another start would end in the same way."""


@dataclass(frozen=True)
class ChildExit:
    """How a child ended."""

    index: int
    name: str
    exitcode: int | None
    """As in `multiprocessing`: minus the signal number for a killed child. None if it could not be learnt."""
    report: ChildReport | None
    begun: bool = True
    """False if it ended before it came to its task: while it was starting."""

    def describe(self) -> str:
        """Return the name with the exit code, and the signal by its name."""
        code = self.exitcode
        known = code is not None and code < 0 and -code in set(signal.Signals)
        return f"{self.name} (exitcode={code}{', ' + signal.Signals(-code).name if known and code else ''})"

    def may_restart(self) -> bool:
        """True if starting it again could help."""
        return self.exitcode is not None and (self.report is None or self.report.restart_helps)

    def explain(self) -> str:
        """Return `describe` and, if the child could tell, the exception and its traceback."""
        if self.report is None or self.report.cause is None:
            return f"{self.describe()}: it left no traceback"
        return f"{self.describe()}: {self.report.cause}\n{self.report.traceback}"


def child_main(
    task: ChildTask,
    index: int,
    event: ExecutionEvent,
    reports: Connection,
    parent_pid: int,
    parents_folder: str | None = None,
) -> None:
    """Run the task in this process and report how it ended; exit with 0 when it returned or was interrupted."""
    begin_child(parent_pid, parents_folder)
    reports.send(BEGUN)
    name = multiprocessing.current_process().name
    try:
        result = run(lambda interrupts: _until_interrupted(task, index, event, interrupts), always_interruptible=True)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is left to do is the exit
        logger.warning("%s was interrupted", name)
    except BaseException as error:  # boundary: the parent gets the cause, and the exit code says that there is one
        logger.error("%s failed", name, exc_info=error)
        reports.send(_report_failure(error))
        sys.exit(exit_code_of(error))
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as above
        reports.send(_report_result(name, result))


async def _until_interrupted(task: ChildTask, index: int, event: ExecutionEvent, interrupts: Interrupts) -> Any:
    working = asyncio.create_task(task(index, event), name="task")
    asked = asyncio.create_task(interrupts.asked())
    await asyncio.wait([working, asked], return_when=asyncio.FIRST_COMPLETED)
    if not asked.done():
        asked.cancel()
        return await working
    working.cancel()
    hurried = asyncio.create_task(interrupts.hurried())
    await asyncio.wait([working, hurried], return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if working.done() and not working.cancelled() and (error := working.exception()) is not None:
        logger.warning("An error while the interrupted task was ending", exc_info=error)
    raise KeyboardInterrupt


def _report_failure(error: BaseException) -> ChildReport:
    frames = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    restart_helps = not isinstance(error, StoreUnreachableError)  # the child has waited long enough for the store
    return ChildReport(None, f"{type(error).__name__}: {error}", frames[-TRACEBACK_BYTES:], restart_helps)


def _report_result(name: str, result: Any) -> ChildReport:
    try:
        pickle.dumps(result)
    except Exception as error:  # any class may refuse to be pickled, with any exception
        logger.warning("The result of %s cannot be sent to the parent process: %s", name, error)
        return ChildReport()
    return ChildReport(result=result)


def begin_child(parent_pid: int, parents_folder: str | None = None) -> None:
    """Put off what a forked process has inherited and does not own, and tie it to its parent."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The parent's worker threads do not exist here, yet the exit would join them, this thread perhaps among them.
    executors = sys.modules.get("concurrent.futures.thread")
    getattr(executors, "_threads_queues", {}).clear()
    die_with_parent(parent_pid, parents_folder)


def die_with_parent(parent_pid: int, parents_folder: str | None = None) -> None:
    """Make this process end when its parent does, however that ends.

    On Linux the kernel sends SIGKILL when the parent goes. Elsewhere, and for a child that a fork server made, a thread
    waits for the parent's end, and removes the folder that a killed parent leaves behind.
    """
    if sys.platform == "linux" and os.getppid() == parent_pid:
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0:
            if os.getppid() != parent_pid:  # it went before the request
                os._exit(1)
            return
    threading.Thread(target=_watch_parent, args=(parents_folder,), name="agl-parent-watch", daemon=True).start()


def _watch_parent(parents_folder: str | None) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    if parents_folder is not None:
        shutil.rmtree(parents_folder, ignore_errors=True)
    os._exit(1)


@dataclass
class _Child:
    process: BaseProcess
    reports: Connection | None
    report: ChildReport | None = None
    begun: bool = False

    def read(self) -> None:
        """Take what it has said; a pipe at its end is closed."""
        while self.reports is not None and self.reports.poll():
            try:
                said = self.reports.recv()
            except EOFError:
                self.reports.close()
                self.reports = None
            else:
                self.begun = True
                self.report = self.report if said == BEGUN else said


@dataclass
class Crew:
    """Children of this process, by index. Owned by one thread.

    `filenos` become readable when there is something to `collect`.
    """

    ctx: ProcessContext
    task: ChildTask
    event: ExecutionEvent
    prefix: str
    """`runner-` names the children runner-0, runner-1, ...; without a dash at its end it is the name itself."""
    _children: dict[int, _Child] = field(default_factory=dict[int, _Child], init=False)

    def start(self, index: int) -> None:
        """Start child `index`.

        Raises:
            TypeError: the child is to be spawned, and something that it needs cannot be pickled; names it.
        """
        reader, writer = cast("tuple[Connection, Connection]", self.ctx.Pipe(duplex=False))
        # The socket of a fork server lies in a folder that Python removes at its exit, but not when it is killed.
        folder = multiprocessing.util.get_temp_dir() if isinstance(self.ctx, ForkServerContext) else None
        process = self.ctx.Process(
            target=child_main,
            args=(self.task, index, self.event, writer, os.getpid(), folder),
            name=name_of(self.prefix, index),
        )
        process.start()
        writer.close()
        self._children[index] = _Child(process, reader)

    def filenos(self) -> list[int]:
        """What to wait for."""
        children = self._children.values()
        ends = [child.process.sentinel for child in children]
        return ends + [child.reports.fileno() for child in children if child.reports is not None]

    def collect(self) -> list[ChildExit]:
        """Read the reports that have come, and return those children that have ended, each once."""
        for child in self._children.values():
            child.read()
        ended = [index for index, child in self._children.items() if child.process.exitcode is not None]
        return [self._bury(index) for index in ended]

    def signal(self, index: int, signum: int) -> None:
        """Send a signal to a child that is alive."""
        child = self._children.get(index)
        if child is not None and child.process.exitcode is None and child.process.pid is not None:
            try:
                os.kill(child.process.pid, signum)
            except OSError as error:  # one that cannot be signalled must not keep us from the others
                logger.warning("Could not send signal %s to %s: %s", signum, child.process.name, error)

    def close(self) -> None:
        """Kill what is left, and wait until it is gone. May be called twice."""
        for index in self._children:
            self.signal(index, signal.SIGKILL)
        for index in list(self._children):
            self._children[index].process.join(1.0)
            self._bury(index)

    def _bury(self, index: int) -> ChildExit:
        child = self._children.pop(index)
        child.read()
        if child.reports is not None:
            child.reports.close()
        exit_ = ChildExit(index, child.process.name, child.process.exitcode, child.report, child.begun)
        if exit_.exitcode is not None:
            child.process.close()
        return exit_


def name_of(prefix: str, index: int) -> str:
    """Return the name of a child."""
    return f"{prefix}{index}" if prefix.endswith("-") else prefix
