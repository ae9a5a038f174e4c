"""Child processes: their tasks, their start, their reports. No child outlives its parent.

Every child runs `child_main`, with any start method. It is a module-level function and its task is a plain object, so
that a child can be spawned as well as forked. Processes that agents start end with their runner.

Forking a process that has threads copies locks that no thread will release. So a fork server is forked before the first
thread is started, stays single-threaded, and forks every runner. It ends with its parent, and the runners end with it.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import multiprocessing.util
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, cast

from agentlightning.base.process_secrets import Handed
from agentlightning.errors import StoreUnreachableError, UnauthorizedError
from agentlightning.execution.base import exit_code_of
from agentlightning.execution.events import ExecutionEvent
from agentlightning.execution.subreaper import go_below_subreaper
from agentlightning.runner.base import worker_label
from agentlightning.utils.concurrency.interrupts import Interrupts
from agentlightning.utils.concurrency.loops import run
from agentlightning.utils.descendants import (
    KILL,
    end_descendants,
    helpers_of_python,
    join,
    killed_with_parent,
    pidfd_of,
    wait_for,
)

logger = logging.getLogger(__name__)

TRACEBACK_BYTES = 8192
LOOK_SECONDS = 0.1
"""Seconds between checks of the children on systems that do not report the end of a process."""
CLOSE_SECONDS = 4.0
"""Seconds that a killed child may take to end its remaining processes; its subreaper takes up to 2.5 s."""

ProcessContext = ForkContext | SpawnContext | ForkServerContext


class ChildTask(Protocol):
    """The task of the children; `index` is the child's number. Must be picklable if children are spawned.

    If its attribute `wants_main_thread` is true, its event loop runs on a thread other than the main thread.
    """

    async def __call__(self, index: int, event: ExecutionEvent) -> Any:
        """Work until done or until `event` is set."""


@dataclass(frozen=True)
class Begun:
    """The first message of a child."""

    pid: int
    """Id of the process that does the work. The process that the parent started is its subreaper."""


@dataclass(frozen=True)
class ChildReport:
    """The message that a child sends when its task has ended."""

    result: Any = None
    """The return value of the task, if it can be pickled."""
    cause: str | None = None
    """Class and message of the exception that ended it; None if it returned."""
    traceback: str | None = None
    """The last frames, at most 8 KiB."""
    restart_helps: bool = True
    """False if a restart would end in the same way."""
    interrupted: bool = False
    """True if SIGINT ended it, so that it has no result."""


@dataclass(frozen=True)
class ChildExit:
    """The end of a child process."""

    index: int
    name: str
    exitcode: int | None
    """The exit code as in `multiprocessing`: the negative signal number for a killed child. None if it is unknown."""
    report: ChildReport | None
    begun: bool = True
    """False if it ended during its start, before its task began."""
    pid: int | None = None
    """Id of the process that did the work, if it had begun."""

    @property
    def worker_id(self) -> str | None:
        """The label of its worker in the store; None if it had not begun, or its host is unknown."""
        return None if self.pid is None else worker_label(socket.gethostname(), self.pid, self.index)

    @property
    def finished(self) -> bool:
        """True if its task returned or was ended by SIGINT; it then holds no attempt."""
        return self.report is not None and self.report.cause is None

    def describe(self) -> str:
        """Return the name with the exit code, and the signal by its name."""
        code = self.exitcode
        is_signal = code is not None and code < 0 and -code in set(signal.Signals)
        return f"{self.name} (exitcode={code}{', ' + signal.Signals(-code).name if is_signal and code else ''})"

    def may_restart(self) -> bool:
        """True if starting it again could help."""
        return self.exitcode is not None and (self.report is None or self.report.restart_helps)

    def explain(self) -> str:
        """Return `describe` and, if the child reported them, the exception and its traceback."""
        if self.report is None or self.report.cause is None:
            return f"{self.describe()}: no traceback available"
        return f"{self.describe()}: {self.report.cause}\n{self.report.traceback}"


def child_main(
    _secrets: Handed,
    task: ChildTask,
    index: int,
    event: ExecutionEvent,
    reports: Connection,
    parent_pid: int,
    parents_folder: str | None = None,
    ends_descendants: bool = False,
) -> None:
    """Run the task in this process and report how it ended; exit with 0 when it returned or was interrupted.

    `_secrets` is the first argument, so that a spawned child has them before it unpickles the others. With
    `ends_descendants`, all descendants of this process end with it, however it ends.
    """
    if ends_descendants and go_below_subreaper(parent_pid, parents_folder):
        parent_pid = os.getppid()
    begin_child(parent_pid, parents_folder)
    reports.send(Begun(os.getpid()))
    name = multiprocessing.current_process().name
    try:
        result = run(
            lambda interrupts: _until_interrupted(task, index, event, interrupts),
            always_interruptible=True,
            beside=getattr(task, "wants_main_thread", False),
        )
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the exit remains
        logger.warning("%s was interrupted", name)
        reports.send(ChildReport(interrupted=True))
    except BaseException as error:  # boundary: the parent gets the cause, and the exit code reports the failure
        logger.error("%s failed", name, exc_info=error)
        reports.send(_report_failure(error))
        sys.exit(exit_code_of(error))
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as above
        reports.send(_report_result(name, result))
    finally:
        if ends_descendants:  # before the exit, which joins the processes that `multiprocessing` has started
            pids = end_descendants(os.getpid(), spared=helpers_of_python())
            if pids:
                logger.warning("Could not end these processes, which the agent started: %s", pids)


async def _until_interrupted(task: ChildTask, index: int, event: ExecutionEvent, interrupts: Interrupts) -> Any:
    working = asyncio.create_task(task(index, event), name="task")
    interruption = asyncio.create_task(interrupts.asked())
    await asyncio.wait([working, interruption], return_when=asyncio.FIRST_COMPLETED)
    if not interruption.done():
        interruption.cancel()
        return await working
    working.cancel()
    hurried = asyncio.create_task(interrupts.hurried())
    await asyncio.wait([working, hurried], return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if working.done() and not working.cancelled() and (error := working.exception()) is not None:
        logger.warning("The interrupted task failed while it was ending", exc_info=error)
    raise KeyboardInterrupt


def _report_failure(error: BaseException) -> ChildReport:
    frames = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    # The store was unreachable for long enough, or refuses a token that a restarted child would hold too.
    restart_helps = not isinstance(error, (StoreUnreachableError, UnauthorizedError))
    return ChildReport(None, f"{type(error).__name__}: {error}", frames[-TRACEBACK_BYTES:], restart_helps)


def _report_result(name: str, result: object) -> ChildReport:
    try:
        pickle.dumps(result)
    except Exception as error:  # any class may refuse to be pickled, with any exception
        logger.warning("Could not send the result of %s to the parent process: %s", name, error)
        return ChildReport()
    return ChildReport(result=result)


def begin_child(parent_pid: int, parents_folder: str | None = None) -> None:
    """Release the resources that a forked process inherited and does not own, and make it end with its parent."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The exit would join the parent's worker threads, which do not exist here and may include this thread.
    executors = sys.modules.get("concurrent.futures.thread")
    getattr(executors, "_threads_queues", {}).clear()
    die_with_parent(parent_pid, parents_folder)


def die_with_parent(parent_pid: int, parents_folder: str | None = None) -> None:
    """Make this process end when its parent ends for any reason.

    On Linux the kernel sends SIGKILL when the parent ends. On other systems, and in a child of a fork server, a thread
    waits for the parent's end and removes the folder that a killed parent leaves behind.
    """
    if os.getppid() == parent_pid and killed_with_parent(parent_pid):
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
    ended: int | None
    """Descriptor that becomes readable when the process ends; None if the system does not support it."""
    owns_ended: bool
    report: ChildReport | None = None
    pid: int | None = None
    """Id of the process that does the work, once it has begun."""

    def read(self) -> None:
        """Read the pending messages, and close a pipe that is at its end."""
        while self.reports is not None and self.reports.poll():
            try:
                message = self.reports.recv()
            except EOFError:
                self.reports.close()
                self.reports = None
            else:
                if isinstance(message, Begun):
                    self.pid = message.pid
                else:
                    self.report = message

    def close(self) -> None:
        """Release the descriptors."""
        if self.reports is not None:
            self.reports.close()
        if self.ended is not None and self.owns_ended:
            os.close(self.ended)


@dataclass
class ChildProcesses:
    """Children of this process, by index. Owned by one thread.

    `filenos` become readable when `collect` has something to return. If `look_seconds` is not None, call `collect` at
    that interval as well.
    """

    ctx: ProcessContext
    task: ChildTask
    event: ExecutionEvent
    prefix: str
    """`runner-` names the children runner-0, runner-1, ...; a prefix without a final dash is the whole name."""
    ends_descendants: bool = False
    """True to end all descendants of a child with it."""
    _children: dict[int, _Child] = field(default_factory=dict[int, _Child], init=False)

    @property
    def look_seconds(self) -> float | None:
        """Seconds between calls of `collect` without a readable descriptor; None if they are not needed."""
        return LOOK_SECONDS if any(child.ended is None for child in self._children.values()) else None

    def start(self, index: int) -> None:
        """Start child `index`.

        Raises:
            TypeError: the child is to be spawned, and a part of its task cannot be pickled.
        """
        reader, writer = cast("tuple[Connection, Connection]", self.ctx.Pipe(duplex=False))
        # Python removes the folder of a fork server's socket at its exit, but not when it is killed.
        folder = multiprocessing.util.get_temp_dir() if isinstance(self.ctx, ForkServerContext) else None
        process = self.ctx.Process(
            target=child_main,
            args=(Handed(), self.task, index, self.event, writer, os.getpid(), folder, self.ends_descendants),
            name=name_of(self.prefix, index),
        )
        process.start()
        writer.close()
        if isinstance(self.ctx, ForkServerContext):  # not a child of this process: the server reports its end
            self._children[index] = _Child(process, reader, process.sentinel, owns_ended=False)
        else:
            assert process.pid is not None
            self._children[index] = _Child(process, reader, pidfd_of(process.pid), owns_ended=True)

    def filenos(self) -> list[int]:
        children = self._children.values()
        ends = [child.ended for child in children if child.ended is not None]
        return ends + [child.reports.fileno() for child in children if child.reports is not None]

    def collect(self) -> list[ChildExit]:
        """Read the pending reports, and return the children that have ended since the last call."""
        for child in self._children.values():
            child.read()
        ended = [index for index, child in self._children.items() if child.process.exitcode is not None]
        return [self._reap(index) for index in ended]

    def signal(self, index: int, signum: int) -> None:
        child = self._children.get(index)
        if child is not None and child.process.exitcode is None and child.process.pid is not None:
            child.read()
            try:
                os.kill(child.pid or child.process.pid, signum)
            except ProcessLookupError:  # it has ended; its subreaper ends next
                return
            except OSError as error:  # an error for one child must not spare the others
                logger.warning("Could not send signal %s to %s: %s", signum, child.process.name, error)

    def close(self) -> None:
        for index in self._children:
            self.signal(index, KILL)
        deadline = time.monotonic() + CLOSE_SECONDS
        for index in list(self._children):
            process = self._children[index].process
            if not join(process, deadline - time.monotonic()):
                process.kill()
                join(process, 1.0)
            self._reap(index)

    def _reap(self, index: int) -> ChildExit:
        child = self._children.pop(index)
        child.read()
        child.close()
        name, exitcode = child.process.name, child.process.exitcode
        if exitcode is not None:
            child.process.close()
        return ChildExit(index, name, exitcode, child.report, child.pid is not None, child.pid)


def name_of(prefix: str, index: int) -> str:
    """Return the name of a child."""
    return f"{prefix}{index}" if prefix.endswith("-") else prefix


class ForkServer:
    """A `ChildProcesses` in its own process: the same calls, sent over a pipe. Owned by one thread."""

    look_seconds: float | None = None
    """None: `collect` needs no calls without a readable descriptor; see `ChildProcesses`."""

    def __init__(
        self,
        ctx: ProcessContext,
        task: ChildTask,
        event: ExecutionEvent,
        prefix: str,
        *,
        ends_descendants: bool = False,
    ) -> None:
        self._prefix = prefix
        self._running: set[int] = set()
        self._pipe, far_end = ctx.Pipe()
        args = (ChildProcesses(ctx, task, event, prefix, ends_descendants), far_end, self._pipe, os.getpid())
        self._process: BaseProcess | None = ctx.Process(target=fork_server_main, args=args, name="agl-fork-server")
        self._process.start()
        assert self._process.pid is not None
        self._ended = pidfd_of(self._process.pid)
        far_end.close()

    def start(self, index: int) -> None:
        self._running.add(index)
        self._send("start", index)

    def filenos(self) -> list[int]:
        return [self._pipe.fileno()] if self._ended is None else [self._pipe.fileno(), self._ended]

    def collect(self) -> list[ChildExit]:
        exits: list[ChildExit] = []
        killed = False
        try:
            while self._pipe.poll():
                exits.append(self._pipe.recv())
        except (EOFError, OSError):
            killed = True
        if killed or (self._ended is not None and wait_for(self._ended, 0.0)):  # its children were killed with it
            exits += [ChildExit(index, name_of(self._prefix, index), None, None) for index in sorted(self._running)]
        self._running -= {exit_.index for exit_ in exits}
        return exits

    def signal(self, index: int, signum: int) -> None:
        self._send("signal", index, signum)

    def close(self) -> None:
        if self._process is None:
            return
        self._send("close")
        if not join(self._process, CLOSE_SECONDS):
            self._process.kill()
            join(self._process, CLOSE_SECONDS)
        self._pipe.close()
        if self._ended is not None:
            os.close(self._ended)
        self._process.close()
        self._process = None

    def _send(self, *command: object) -> None:
        try:
            self._pipe.send(command)
        except OSError as error:  # it was killed: `collect` reports it
            logger.debug("The fork server has closed its pipe: %s", error)


def fork_server_main(children: ChildProcesses, commands: Connection, far_end: Connection, parent_pid: int) -> None:
    """Execute commands and report children that ended, until the command to close or the parent's end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C reaches the whole group; the parent handles it
    begin_child(parent_pid)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as above; it ends with its parent
    far_end.close()
    try:
        while True:
            ready = wait([commands, *children.filenos()], children.look_seconds)
            for exit_ in children.collect():
                commands.send(exit_)
            if commands not in ready:
                continue
            match commands.recv():
                case ("start", int(index)):
                    children.start(index)
                case ("signal", int(index), int(signum)):
                    children.signal(index, signum)
                case _:
                    return
    except (EOFError, ConnectionError) as error:
        logger.debug("The parent of the fork server has ended: %s", error)
    finally:
        children.close()
