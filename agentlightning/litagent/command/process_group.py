"""Process groups of programs that an attempt starts: ended as a whole, and never left over when this process is killed.

A program may start others. All of them are in one group, the group is what gets the signals, and a guard outlives
this process for as long as it takes to kill the group: a shell that waits at the end of a pipe which only we hold.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

_GUARD = 'read -r word; kill -s KILL -- "-$0" 2>/dev/null'
"""Run by `sh`, the group as `$0`: the pipe ends when the process at its other end does."""


class ProcessGroup:
    """The group of a process that was started with `start_new_session=True`; `close` kills what is left of it."""

    def __init__(self, leader: int) -> None:
        self._group = leader
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, str(leader)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={},
        )

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal to every process of the group; one that has no process left is no error."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._group, signum)

    def close(self) -> None:
        """Kill what is left and let the guard go. May be called twice."""
        pipe = self._guard.stdin
        if pipe is None or pipe.closed:
            return
        self.signal(signal.SIGKILL)
        self._guard.kill()  # whatever the group has done to it: it may be stopped
        self._guard.wait()
        pipe.close()
