"""A process that does nothing but fork: so that a runner can be restarted when its grandparent has threads.

Forking a process that has threads copies locks that nobody will release. The nursery is forked before the first thread
is started, stays single-threaded, and forks every runner, the first as well as the later ones. It dies with its parent
and the runners die with it.
"""

from __future__ import annotations

import logging
import os
import signal
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from agentlightning.execution.children import ChildExit, ChildTask, Crew, ProcessContext, begin_child, name_of
from agentlightning.execution.events import ExecutionEvent

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0


class Nursery:
    """A `Crew` in a process of its own: the same calls, carried over a pipe. Owned by one thread."""

    def __init__(self, ctx: ProcessContext, task: ChildTask, event: ExecutionEvent, prefix: str) -> None:
        self._prefix = prefix
        self._running: set[int] = set()
        self._pipe, far_end = ctx.Pipe()
        args = (Crew(ctx, task, event, prefix), far_end, self._pipe, os.getpid())
        self._process: BaseProcess | None = ctx.Process(target=nursery_main, args=args, name="agl-nursery")
        self._process.start()
        far_end.close()

    def start(self, index: int) -> None:
        """Have child `index` forked."""
        self._running.add(index)
        self._send("start", index)

    def filenos(self) -> list[int]:
        """What to wait for."""
        return [self._pipe.fileno()]

    def collect(self) -> list[ChildExit]:
        """Return those children that have ended, each once."""
        exits: list[ChildExit] = []
        try:
            while self._pipe.poll():
                exits.append(self._pipe.recv())
        except (EOFError, OSError):  # the nursery was killed, and its children with it
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
        self._process.join(CLOSE_SECONDS)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join(CLOSE_SECONDS)
        self._pipe.close()
        self._process.close()
        self._process = None

    def _send(self, *command: Any) -> None:
        try:
            self._pipe.send(command)
        except OSError as error:  # it was killed: `collect` tells
            logger.debug("The nursery does not listen any more: %s", error)


def nursery_main(crew: Crew, commands: Connection, far_end: Connection, parent_pid: int) -> None:
    """Obey commands and tell which children have ended, until told to close or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C goes to the whole group; the parent decides what follows
    begin_child(parent_pid)
    far_end.close()
    try:
        while True:
            ready = wait([commands, *crew.filenos()])
            for exit_ in crew.collect():
                commands.send(exit_)
            if commands in ready and not _obey(crew, commands.recv()):
                return
    except (EOFError, ConnectionError) as error:
        logger.debug("The parent of the nursery is gone: %s", error)
    finally:
        crew.close()


def _obey(crew: Crew, command: tuple[Any, ...]) -> bool:
    match command:
        case ("start", int(index)):
            crew.start(index)
        case ("signal", int(index), int(signum)):
            crew.signal(index, signum)
        case _:
            return False
    return True
