"""Programs that tests start and end from outside, and the processes left by them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 30


def lives(process: psutil.Process | int) -> bool:
    """Return whether a process runs; False for a zombie too: an orphan stays one until init reaps it."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_gone(processes: Iterable[psutil.Process | int]) -> None:
    """Wait until none of these processes lives."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while alive := [process for process in processes if lives(process)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.01)


class Program:
    """A module of the tests in a session of its own, as a shell would start it; `prefix` is a command that runs it."""

    def __init__(
        self, module: str, *arguments: str, prefix: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", module, *arguments], cwd=ROOT, env=None if env is None else dict(env),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self.lines: list[str] = []
        self.family: list[psutil.Process] = []

    def until(self, words: str) -> str:
        """Read its output until a line has the words."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if words in line:
                return line
        raise AssertionError(f"the program ended without saying {words!r}:\n{''.join(self.lines)}")

    def output(self) -> str:
        """Wait for the end and return all that was printed."""
        self.lines.append(self.process.communicate(timeout=LIMIT_SECONDS)[0])
        return "".join(self.lines)

    def close(self) -> None:
        for process in self.family:
            if lives(process):
                process.kill()
        self.process.kill()
        self.process.communicate()
