"""Every way to end a run from outside: Ctrl+C once and twice, and `kill -9`. No process and no port is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow
LIMIT_SECONDS = 30
ROOT = Path(__file__).parents[2]
LAYOUTS = ["shm-runner", "shm-algorithm", "cs-fork", "cs-spawn", "cs-forkserver", "cs-no-restarts", "cs-runner"]


class Program:
    """`program.py` in a session of its own, as a shell would start it."""

    def __init__(self, layout: str, algorithm: str = "waits", runner: str = "serves") -> None:
        command = [sys.executable, "-m", "tests.execution.program", layout, algorithm, runner]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.lines: list[str] = []
        self.endpoint = self.until("ready").split()[1]
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def until(self, word: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith(word):
                return line
        raise AssertionError(f"the program ended without saying {word!r}:\n{''.join(self.lines)}")

    def press_ctrl_c(self) -> None:
        """Send SIGINT to the whole group, as a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def output(self) -> str:
        """Wait for the end and return all that was printed."""
        self.lines.append(self.process.communicate(timeout=LIMIT_SECONDS)[0])
        return "".join(self.lines)

    def assert_nothing_is_left(self) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while any(_lives(process) for process in self.family):
            assert time.monotonic() < deadline, self.family
            time.sleep(0.01)
        if self.endpoint != "-":
            host, port = self.endpoint.removeprefix("http://").split(":")
            with socket.socket() as again:
                again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                again.bind((host, int(port)))

    def close(self) -> None:
        for process in self.family:
            if process.is_running():
                process.kill()
        self.process.kill()
        self.process.communicate()


def _lives(process: psutil.Process) -> bool:
    """False for a zombie too: an orphan stays one until init gets round to it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def start() -> Iterator[type[Program]]:
    programs: list[Program] = []

    class Kept(Program):
        def __init__(self, *args: str) -> None:
            self.family = []
            programs.append(self)
            super().__init__(*args)

    yield Kept
    for program in programs:
        program.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ctrl_c_ends_a_run_cleanly(start: type[Program], layout: str) -> None:
    program = start(layout)
    program.press_ctrl_c()
    output = program.output()
    assert "algorithm cleaned up" in output
    assert "returned interrupted=True" in output
    assert "threads MainThread\n" in output
    program.assert_nothing_is_left()


def test_runs_that_begin_together_have_a_store_each_though_none_names_a_port(start: type[Program]) -> None:
    layouts = ["cs-runner-4747", "cs-fork-4747"] * 3
    with ThreadPoolExecutor(len(layouts)) as together:
        programs = list(together.map(start, layouts))
    assert len({program.endpoint for program in programs}) == len(layouts)
    for program in programs:
        program.press_ctrl_c()
    for program in programs:
        assert "algorithm cleaned up" in program.output()


@pytest.mark.parametrize("layout", ["cs-fork", "cs-runner"])
def test_an_interrupt_that_reaches_the_parent_only_ends_the_children_too(start: type[Program], layout: str) -> None:
    program = start(layout, "waits", "serves_then_deaf")
    os.kill(program.process.pid, signal.SIGINT)
    assert "returned interrupted=True" in program.output()
    program.assert_nothing_is_left()


@pytest.mark.parametrize("layout", ["shm-algorithm"])
def test_ctrl_c_breaks_off_a_synchronous_call_that_blocks_the_loop(start: type[Program], layout: str) -> None:
    program = start(layout, "blocks_its_loop")
    program.press_ctrl_c()
    output = program.output()
    assert "algorithm cleaned up" in output
    assert "returned interrupted=True" in output
    program.assert_nothing_is_left()


def test_ctrl_c_leaves_a_synchronous_algorithm_behind_that_does_not_react(start: type[Program]) -> None:
    program = start("cs-fork", "blocks_a_thread")
    program.press_ctrl_c()
    assert "returned interrupted=True" in program.output()
    program.assert_nothing_is_left()


def test_ctrl_c_lets_a_synchronous_algorithm_clean_up(start: type[Program]) -> None:
    program = start("cs-fork", "computes_in_a_thread")
    program.press_ctrl_c()
    output = program.output()
    assert "algorithm cleaned up" in output
    assert "returned interrupted=True" in output


@pytest.mark.parametrize("layout", ["shm-algorithm", "cs-fork"])
def test_a_second_ctrl_c_waits_for_nobody(start: type[Program], layout: str) -> None:
    program = start(layout, "refuses_to_end", "serves_then_blocks")
    program.press_ctrl_c()
    program.until("algorithm refuses")
    program.press_ctrl_c()
    assert "returned interrupted=True" in program.output()
    program.assert_nothing_is_left()


def test_what_refuses_to_end_is_left_behind_after_one_ctrl_c(start: type[Program]) -> None:
    program = start("cs-fork", "refuses_to_end", "serves_then_blocks")
    program.press_ctrl_c()
    output = program.output()
    assert "did not stop after cancellation; abandoning task" in output
    assert "returned interrupted=True" in output
    program.assert_nothing_is_left()


def test_an_algorithm_without_runners_of_its_own_is_interrupted(start: type[Program]) -> None:
    program = start("cs-only-algorithm", "says_ready_alone", "serves")
    program.press_ctrl_c()
    assert "returned interrupted=True" in program.output()
    program.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("layout", "signum"),
    [
        ("cs-fork", signal.SIGKILL),
        ("cs-spawn", signal.SIGKILL),
        ("cs-forkserver", signal.SIGKILL),
        ("cs-runner", signal.SIGKILL),
        ("cs-fork", signal.SIGTERM),
    ],
)
def test_children_do_not_outlive_a_killed_parent(start: type[Program], layout: str, signum: int) -> None:
    program = start(layout, "waits", "serves_then_blocks")
    os.kill(program.process.pid, signum)
    program.output()
    program.assert_nothing_is_left()


def test_a_child_watches_its_parent_where_the_kernel_does_not(tmp_path: Path) -> None:
    """The way of other systems than Linux: a thread that waits for the parent's end."""
    code = (
        "import multiprocessing, os, sys, time\n"
        "from agentlightning.execution.processes import children\n"
        "def child():\n"
        "    children.die_with_parent(parent_pid=-1)\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(60)\n"
        "multiprocessing.get_context('fork').Process(target=child).start()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + LIMIT_SECONDS
    while _lives(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)
