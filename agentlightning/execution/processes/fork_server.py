"""A process that does nothing but fork: so that a runner can be restarted when its grandparent has threads.

Forking a process that has threads copies locks that nobody will release. The fork server is forked before the first
thread is started, stays single-threaded, and forks every runner, the first as well as the later ones. It dies with its
parent and the runners die with it.
"""

from __future__ import annotations

import logging
import os
import signal
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from agentlightning.execution.events import ExecutionEvent
from agentlightning.execution.processes.children import (
    ChildExit,
    ChildProcesses,
    ChildTask,
    ProcessContext,
    begin_child,
    name_of,
)
from agentlightning.utils.descendants import join, pidfd_of, wait_for

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 4.0
"""Longer than a `ChildProcesses` takes."""


class ForkServer:
    """A `ChildProcesses` in a process of its own: the same calls, carried over a pipe. Owned by one thread."""

    look_seconds: float | None = None
    """How often to `collect` without being woken: it need not be; see `ChildProcesses`."""

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
        """Have child `index` forked."""
        self._running.add(index)
        self._send("start", index)

    def filenos(self) -> list[int]:
        """What to wait for."""
        return [self._pipe.fileno()] if self._ended is None else [self._pipe.fileno(), self._ended]

    def collect(self) -> list[ChildExit]:
        """Return those children that have ended, each once."""
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
        """Send a signal to a child that is alive."""
        self._send("signal", index, signum)

    def close(self) -> None:
        """Kill what is left, and wait until it is gone. May be called twice."""
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
        except OSError as error:  # it was killed: `collect` tells
            logger.debug("The fork server does not listen any more: %s", error)


def fork_server_main(children: ChildProcesses, commands: Connection, far_end: Connection, parent_pid: int) -> None:
    """Obey commands and tell which children have ended, until told to close or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C goes to the whole group; the parent decides what follows
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
        logger.debug("The parent of the fork server is gone: %s", error)
    finally:
        children.close()
