"""Programs in processes of their own: run to their end, or started as in a terminal, read, interrupted and killed."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 240.0
PROGRAMS = {"agl": [sys.executable, "-m", "agentlightning.cli"], "python": [sys.executable]}
"""Programs for the first word of a command."""
Terminal = Callable[..., "Process"]


def clean_environment() -> dict[str, str]:
    """Return the environment without settings of this machine."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AGL_", "AGENT_LIGHTNING_", "OPENAI_"))
    }


def run_program(
    *command: str | Path,
    folder: Path | None = None,
    code: int | None = 0,
    timeout: float = 100.0,
    environment: Mapping[str, str] | None = None,
    popen: Mapping[str, Any] | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, which must have this exit code (None: any), and return its output.

    The first word of the command may be one of `PROGRAMS`. `environment` takes the place of that of this process;
    `popen` are further arguments of `subprocess.run`.
    """
    done = subprocess.run(
        [*PROGRAMS.get(str(command[0]), command[:1]), *command[1:]],
        cwd=folder,
        env={**(os.environ if environment is None else environment), **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        **(popen or {}),
    )
    assert code in (None, done.returncode), f"exit code {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-8000:]}"
    return done


def lives(process: psutil.Process | int) -> bool:
    """Return whether a process runs; False for a zombie too: an orphan stays one until init reaps it."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_gone(processes: Iterable[psutil.Process | int]) -> None:
    """Wait until none of these processes lives."""
    deadline = time.monotonic() + 30
    while alive := [process for process in processes if lives(process)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.01)


class Process:
    """A program and all that it starts, in a session of its own; what it says goes to files.

    The first word of the command may be one of `PROGRAMS`. With `apart` the standard error is not in `said`. The file
    is `log`, else one in `folder`.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        folder: Path,
        environment: Mapping[str, str],
        *,
        log: Path | None = None,
        apart: bool = False,
    ) -> None:
        self._out = log or folder / "program.log"
        self._errors = self._out.with_suffix(".err")
        words = [*PROGRAMS.get(str(command[0]), command[:1]), *command[1:]]
        self._known: list[psutil.Process] = []
        with self._out.open("w") as out, self._errors.open("w") as errors:
            self.popen = subprocess.Popen(
                words,
                cwd=folder,
                env={**clean_environment(), "PYTHONUNBUFFERED": "1", **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors if apart else subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self._out.read_text()

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self.popen.poll()

    def until(self, pattern: str) -> str:
        """Wait until its output has the pattern and return it. A file tells nobody of new lines: this asks often."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while re.search(pattern, self.said) is None:
            late = time.monotonic() > deadline or self.code is not None
            assert not late or re.search(pattern, self.said), f"no {pattern!r}:\n{self.said[-4000:]}{self.errors}"
            threading.Event().wait(0.05)
        return self.said

    def ended(self, timeout: float = LIMIT_SECONDS) -> int:
        """Wait for its end and return its exit code."""
        return self.popen.wait(timeout)

    def succeeded(self) -> str:
        """Wait for its end, which must be a good one, and return what it said."""
        return self.ends(0)

    def ends(self, code: int, *words: str) -> str:
        """Wait for its end, which must have this exit code and say all these words; return what it said."""
        assert self.ended() == code, self.said[-8000:] + self.errors[-4000:]
        assert not [one for one in words if one not in self.said], self.said[-8000:]
        return self.said

    def interrupted(self, signal_: int = signal.SIGINT) -> int:
        """Send it a signal, Ctrl+C if none is named, and return the exit code with which it ends."""
        self.popen.send_signal(signal_)
        return self.ended(60)

    def family(self) -> list[psutil.Process]:
        """Return the process and all that it has started and that lives."""
        with contextlib.suppress(psutil.NoSuchProcess):
            whole = psutil.Process(self.popen.pid)
            family = [whole, *whole.children(recursive=True)]
            self._known += family
            return family
        return []

    def kill(self) -> None:
        """Kill it and all that it has started, those of an earlier `family` too: a machine is gone."""
        for one in {*self.family(), *self._known}:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        self.popen.wait(30)


@pytest.fixture
def terminal(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """Starts a command, given as words or as a shell shows it, in the folder of the test; all are killed at the end."""
    logs = tmp_path_factory.mktemp("logs")
    started, numbers = list[Process](), itertools.count()

    def started_in(
        command: str | Sequence[str | Path],
        *more: str,
        folder: Path = tmp_path,
        apart: bool = False,
        **environment: str,
    ) -> Process:
        words = command.split() if isinstance(command, str) else command
        log = logs / f"{next(numbers)}-{Path(words[0]).stem}.log"
        started.append(Process([*words, *more], folder, environment, log=log, apart=apart))
        return started[-1]

    yield started_in
    for process in started:
        process.kill()
