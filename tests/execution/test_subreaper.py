"""Processes of agents end with the run, whatever way it ends, and hide no runner's death."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from agentlightning.execution import children
from agentlightning.utils import descendants
from tests.execution.children_program import KINDS, LAYOUTS
from tests.execution.left import lives

ROOT = Path(__file__).parents[3]
LIMIT_SECONDS = 60

pytestmark = pytest.mark.heavy


def _run(layout: str, task: str, *signals: tuple[str, int], env: dict[str, str] | None = None) -> tuple[int, str, int]:
    """Run the program, send signals once it is ready, and return its exit code, output, and how many children live."""
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.execution.children_program", layout, task],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, **(env or {})},
    )  # fmt: skip
    lines: list[str] = []
    try:
        assert program.stdout is not None
        if signals:
            for line in program.stdout:
                lines.append(line)
                if line == "ready\n":
                    break
        for whom, signum in signals:
            target = program.pid if whom != "runner" else _runner_of(program.pid)
            (os.killpg if whom == "group" else os.kill)(target, signum)
            time.sleep(0.05)
        lines.append(program.communicate(timeout=LIMIT_SECONDS)[0])
        return program.returncode, "".join(lines), _left(lines)
    finally:
        program.kill()
        for pid in _children(lines):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _children(output: list[str]) -> list[int]:
    return [int(line.split()[2]) for line in "".join(output).splitlines() if line.startswith("child ")]


def _left(output: list[str]) -> int:
    """Wait until all have ended, and return how many have not."""
    assert len(_children(output)) >= len(KINDS), output
    end = time.monotonic() + LIMIT_SECONDS / 6
    while alive := [pid for pid in _children(output) if lives(pid)]:
        if time.monotonic() > end:
            break
        time.sleep(0.02)
    return len(alive)


def _runner_of(pid: int) -> int:
    """The process below which the children of the agent are."""
    below = psutil.Process(pid).children(recursive=True)
    return next(p.ppid() for p in below if _command(p) == ["sleep"] and _command(p.parent()) != ["/bin/sh"])


def _command(process: psutil.Process | None) -> list[str]:
    """Return the first word of a command; nothing for a process that has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):  # a zombie, too
        return process.cmdline()[:1] if process is not None else []
    return []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_end_with_a_run_that_ends(layout: str) -> None:
    code, output, remaining = _run(layout, "returns")
    assert (code, remaining) == (0, 0), output
    assert "returned" in output
    assert "Still running" not in output  # nobody had to be interrupted


@pytest.mark.parametrize(
    ("layout", "signals", "code"),
    [
        ("fork", [("group", signal.SIGINT)], -signal.SIGINT),
        ("spawn", [("group", signal.SIGINT)], -signal.SIGINT),
        ("fork, agents in processes", [("group", signal.SIGINT)], -signal.SIGINT),
        ("fork", [("group", signal.SIGINT)] * 2, -signal.SIGINT),
        ("fork", [("program", signal.SIGTERM)], 128 + signal.SIGTERM),
        ("fork", [("program", signal.SIGKILL)], -signal.SIGKILL),
        ("forkserver", [("program", signal.SIGKILL)], -signal.SIGKILL),
        ("spawn", [("program", signal.SIGKILL)], -signal.SIGKILL),
        ("fork, agents in processes", [("program", signal.SIGKILL)], -signal.SIGKILL),
    ],
)
def test_they_end_with_a_run_that_is_ended(layout: str, signals: list[tuple[str, int]], code: int) -> None:
    assert _run(layout, "hangs", *signals)[::2] == (code, 0)


@pytest.mark.parametrize("layout", ["fork without restarts"])
def test_a_runner_that_dies_is_seen_while_they_live_and_takes_them_along(layout: str) -> None:
    code, output, remaining = _run(layout, "hangs", ("runner", signal.SIGKILL))
    assert (code, remaining) == (1, 0), output
    assert "runner-0 (exitcode=-9, SIGKILL)" in output


def _forks_and_dies(fd: int) -> None:
    """Leave a process behind that has everything open."""
    if (pid := os.fork()) == 0:
        time.sleep(LIMIT_SECONDS * 2)
        os._exit(0)
    os.write(fd, f"{pid}\n".encode())
    os._exit(3)


@pytest.mark.parametrize("pidfd", [True, False])
def test_an_end_is_seen_with_and_without_word_from_the_kernel(pidfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not pidfd:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    reader, writer = os.pipe()
    process = children.multiprocessing.get_context("fork").Process(target=_forks_and_dies, args=(writer,))
    process.start()
    left_behind = int(os.read(reader, 20))
    try:
        assert descendants.join(process, LIMIT_SECONDS)
        assert process.exitcode == 3
        assert lives(left_behind)
    finally:
        os.kill(left_behind, signal.SIGKILL)
        os.close(reader)
        os.close(writer)


def test_processes_that_the_program_itself_has_started_are_left_alone() -> None:
    """A fit in a larger program: only processes below a runner are the run's."""
    code = (
        "import subprocess, sys\n"
        "from tests.execution import children_program as program\n"
        "own = subprocess.Popen(['sleep', '60'])\n"
        "away = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "sys.argv = ['x', 'fork', 'returns']\n"
        "program.main()\n"
        "print('own', own.poll(), away.poll())\n"
        "own.kill(), away.kill(), own.wait(), away.wait()\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=True
    ).stdout
    assert "own None None" in output
