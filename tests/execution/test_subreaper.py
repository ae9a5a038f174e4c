"""Processes of agents end with the run, whatever way it ends, and hide no runner's death."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from agentlightning.execution import children
from agentlightning.utils import descendants
from tests.execution.children_program import KINDS, LAYOUTS
from tests.stubs.processes import ROOT, Terminal, assert_gone, lives, run_program

LIMIT_SECONDS = 60

pytestmark = pytest.mark.heavy


Run = Callable[..., tuple[int, str, int]]


@pytest.fixture
def run(terminal: Terminal) -> Run:
    """Runs the program, sends signals once it is ready; gives its exit code, its output, and how many children live."""

    def ran(layout: str, task: str, *signals: tuple[str, int]) -> tuple[int, str, int]:
        program = terminal(["python", "-m", "tests.execution.children_program", layout, task], folder=ROOT)
        pid = program.popen.pid
        if signals:
            program.until("ready\n")
        for whom, signum in signals:
            (os.killpg if whom == "group" else os.kill)(_runner_of(pid) if whom == "runner" else pid, signum)
            time.sleep(0.05)
        code = program.ended()
        children = [int(number) for number in re.findall(r"^child \w+ (\d+)$", program.said, re.MULTILINE)]
        assert len(children) >= len(KINDS), program.said
        with contextlib.suppress(AssertionError):
            assert_gone(children)
        left = [child for child in children if lives(child)]
        for child in left:
            os.kill(child, signal.SIGKILL)
        return code, program.said, len(left)

    return ran


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
def test_they_end_with_a_run_that_ends(run: Run, layout: str) -> None:
    code, output, remaining = run(layout, "returns")
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
def test_they_end_with_a_run_that_is_ended(run: Run, layout: str, signals: list[tuple[str, int]], code: int) -> None:
    assert run(layout, "hangs", *signals)[::2] == (code, 0)


def test_a_runner_that_dies_is_seen_while_they_live_and_takes_them_along(run: Run) -> None:
    code, output, remaining = run("fork without restarts", "hangs", ("runner", signal.SIGKILL))
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
    assert "own None None" in run_program("python", "-c", code, folder=ROOT).stdout
