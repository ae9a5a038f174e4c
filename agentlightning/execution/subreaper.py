"""A process between a runner and its parent, which ends all descendants of the runner, however the runner ends.

A process that an agent starts may leave its group, its session and its parent. On Linux it cannot leave its subreaper:
orphans become children of the nearest ancestor that is a subreaper. The runner cannot be its own subreaper: it would
have to wait for children that it does not know, and it has already ended when the subreaper is needed.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import threading
import warnings
from types import FrameType
from typing import NoReturn

from agentlightning.utils.descendants import (
    TERMINATE_SECONDS,
    adopt_orphans,
    end_descendants,
    killed_with_parent,
    pidfd_of,
    reap_children,
)

_ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/vfio/")


def _held_back() -> tuple[signal.Signals, ...]:
    """Return the signals to block during the fork."""
    return signal.SIGTERM, signal.SIGINT, signal.SIGCHLD


def go_below_subreaper(parent_pid: int, parents_folder: str | None = None) -> bool:
    """Continue in a new process, which is killed with this one; this one becomes its subreaper and never returns.

    The subreaper ends when the new process does, in the same way, and kills it when `parent_pid` ends. It forwards
    SIGTERM. Return False, in the same process, if the system does not support subreapers, or if a fork is unsafe
    because the import of the user's program in a spawned process has started threads or uses an accelerator.
    """
    if sys.platform != "linux" or threading.active_count() > 1 or uses_accelerator():
        return False
    parent = pidfd_of(parent_pid)
    if parent is None:
        return False
    if not adopt_orphans():
        os.close(parent)
        return False
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _held_back())
    subreaper = os.getpid()
    with warnings.catch_warnings():  # threads stay in the subreaper, which uses nothing that they may lock
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        _Subreaper(child, parent, parents_folder).serve()
    os.close(parent)
    killed_with_parent(subreaper)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return True


def uses_accelerator() -> bool:
    """Return whether this process has opened an accelerator, which cannot be used after a fork. Only on Linux."""
    if sys.platform != "linux":
        return False
    targets: list[str] = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    return any(target.startswith(_ACCELERATORS) for target in targets)


class _Subreaper:
    def __init__(self, child: int, parent: int, parents_folder: str | None) -> None:
        self._child = child
        self._parent = parent
        self._parents_folder = parents_folder
        self._status: int | None = None

    def serve(self) -> NoReturn:
        """Wait for the child or its parent to end, end all remaining processes, and end as the child did."""
        try:
            ended = os.pidfd_open(self._child)
            for name in os.listdir("/proc/self/fd"):  # an open pipe end would block its readers
                if int(name) > 2 and int(name) not in (self._parent, ended):  # keep the standard streams
                    with contextlib.suppress(OSError):  # the descriptor of the listing itself
                        os.close(int(name))
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C reaches the whole group
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, self._pass_on)
            signal.signal(signal.SIGCHLD, self._reap)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _held_back())
            poll = select.poll()
            poll.register(self._parent, select.POLLIN)
            poll.register(ended, select.POLLIN)
            orphaned = self._parent in {fd for fd, _ in poll.poll()}
            if orphaned:
                self._pass_on(signal.SIGKILL)
            end_descendants(os.getpid(), grace=0.0 if orphaned else TERMINATE_SECONDS, reap=True)
            if orphaned and self._parents_folder is not None:
                shutil.rmtree(self._parents_folder, ignore_errors=True)
            self._reap()
        finally:  # without exit handlers
            code = 1 if self._status is None else os.waitstatus_to_exitcode(self._status)
            if code < 0:
                import resource

                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core is enough
                if -code != signal.SIGKILL:
                    signal.signal(-code, signal.SIG_DFL)
                os.kill(os.getpid(), -code)
            os._exit(code if code >= 0 else 128 - code)

    def _pass_on(self, signum: int, _frame: FrameType | None = None) -> None:
        if self._status is None:
            os.kill(self._child, signum)

    def _reap(self, _signum: int = 0, _frame: FrameType | None = None) -> None:
        self._status = reap_children().get(self._child, self._status)
