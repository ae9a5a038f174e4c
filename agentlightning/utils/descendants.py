"""Descendants of a process: waits for their end, and ends them together with all processes that they have started.

`multiprocessing` waits for the end of a pipe, which processes forked by a child also hold open. A pidfd of the kernel
becomes readable as soon as its process has ended; without pidfds, the process is polled.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Collection
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any, Final

TERMINATE_SECONDS = 0.5
"""Seconds that a leftover process may clean up after SIGTERM."""
KILL_SECONDS = 2.0
"""Seconds that SIGKILL may take: it acts immediately except in a system call that cannot be interrupted."""
LOOK_SECONDS = 0.02
"""Seconds between two checks of a process if the system does not signal its end."""
KILL: Final[int] = getattr(signal, "SIGKILL", signal.SIGTERM)
"""The signal that no process survives. Windows has no SIGKILL; `os.kill` with SIGTERM ends a process immediately."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def pidfd_of(pid: int) -> int | None:
    """Return a descriptor that becomes readable once the process has ended; None if the system does not support it.

    The caller closes it. The process must not have been waited for.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux; an old kernel; forbidden in this container
        return None


def adopt_orphans() -> bool:
    """Make every orphaned descendant a child of this process; return False if the system does not support it."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def killed_with_parent(parent_pid: int) -> bool:
    """Request the kernel to kill this process when its parent ends; return False if it does not support that."""
    if not _prctl(_PR_SET_PDEATHSIG, KILL):
        return False
    if os.getppid() != parent_pid:  # it went before the request
        os._exit(1)
    return True


def _prctl(option: int, value: int) -> bool:
    return sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0


def join(process: BaseProcess, seconds: float) -> bool:
    """Wait for the end of a child of this process, even if its own children continue; return whether it ended."""
    end = time.monotonic() + seconds
    if process.exitcode is None and process.pid is not None and (fd := pidfd_of(process.pid)) is not None:
        try:
            wait_for(fd, seconds)
        finally:
            os.close(fd)
    while process.exitcode is None and time.monotonic() < end:
        time.sleep(LOOK_SECONDS)
    return process.exitcode is not None


def wait_for(fd: int, seconds: float) -> bool:
    """Return whether a descriptor became readable within `seconds`; its number is not limited, unlike for `select`."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def end_descendants(
    pid: int, *, grace: float = TERMINATE_SECONDS, spared: Collection[int] = (), reap: bool = False
) -> list[int]:
    """End all descendants of a process, but not the process itself, and return the ids of those that did not end.

    Each gets SIGTERM, and after `grace` seconds SIGKILL; without grace, SIGKILL immediately. With `reap`, which is for
    a subreaper and its own id, all children are waited for: a scan of all processes misses the children of a process
    that ends during the scan, and only the kernel knows whether any remain.
    """
    terminated: set[int] = set()
    began = time.monotonic()
    killed_since: float | None = None  # a look may take long on a busy machine, and must not count as a kill
    while True:
        if reap:  # a child that has ended and was not waited for counts
            try:
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return []
        living = [child for child in _living_below(pid) if child.pid not in spared]
        if not living and not reap:
            return []
        now = time.monotonic()
        if killed_since is not None and now - killed_since > KILL_SECONDS:
            return [child.pid for child in living]
        if now - began >= grace and killed_since is None:
            killed_since = now
        for child in living:
            if killed_since is not None:
                _send(child.pid, KILL)
            elif child.pid not in terminated:
                terminated.add(child.pid)
                _send(child.pid, signal.SIGTERM)
        time.sleep(LOOK_SECONDS / 4)
        if reap:
            reap_children()


def helpers_of_python() -> set[int]:
    """Return the ids of the helper processes of `multiprocessing`, which clean up and end with this process."""
    tracker: Any = resource_tracker._resource_tracker
    server: Any = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    pids = getattr(tracker, "_pid", None), getattr(server, "_forkserver_pid", None)
    return {pid for pid in pids if pid is not None}


def reap_children() -> dict[int, int]:
    """Wait for the children that have ended and return their statuses by id; for a process without other waiters."""
    statuses: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return statuses
        if pid == 0:
            return statuses
        statuses[pid] = status


def _living_below(pid: int) -> list[Any]:
    import psutil  # not at the start of every process: most have nobody to end

    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    living: list[Any] = []
    for child in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                living.append(child)
    return living


def _send(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # ended meanwhile; of another user, and still living
        os.kill(pid, signum)
