"""Process groups of programs that an attempt starts: all their processes are ended, even if this process is killed.

A program may start other programs. All of them are in one group, which gets the signals. A guard outlives this process
until it has killed the group: a shell that waits for the end of a pipe that only this process holds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

_GUARD = 'read -r word; kill -s KILL -- "-$0" 2>/dev/null'
"""Run by `sh`, with the group as `$0`: the pipe ends when the process at its other end ends."""


class ProcessGroup:
    """The group of a process that was started with `start_new_session=True`; `close` kills its remaining processes."""

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
        """Send a signal to every process of the group; an empty group is not an error."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._group, signum)

    def close(self) -> None:
        """Kill the remaining processes and end the guard. May be called twice."""
        pipe = self._guard.stdin
        if pipe is None or pipe.closed:
            return
        self.signal(signal.SIGKILL)
        self._guard.kill()  # the group may have stopped it
        self._guard.wait()
        pipe.close()
