"""Every way to end a run from outside: Ctrl+C once and twice, and `kill -9`. No process and no port is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.execution.left import ROOT, Program, assert_gone

pytestmark = pytest.mark.slow
Start = Callable[..., "Kept"]
LAYOUTS = ["shm-runner", "shm-algorithm", "cs-fork", "cs-spawn", "cs-forkserver", "cs-no-restarts", "cs-runner"]


class Kept(Program):
    """`program.py`, read until both sides are at work."""

    def __init__(self, layout: str, algorithm: str = "waits", runner: str = "serves") -> None:
        super().__init__("tests.execution.program", layout, algorithm, runner)
        self.endpoint = self.until("ready").split()[1]
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def press_ctrl_c(self) -> None:
        """Send SIGINT to the whole group, as a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def assert_interrupted(self, *words: str) -> str:
        """Wait for the end: the words are printed, and no process and no port is left."""
        output = self.output()
        for word in (*words, "returned interrupted=True"):
            assert word in output, output
        self.assert_nothing_is_left()
        return output

    def assert_nothing_is_left(self) -> None:
        assert_gone(self.family)
        if self.endpoint != "-":
            host, port = self.endpoint.removeprefix("http://").split(":")
            with socket.socket() as again:
                again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                again.bind((host, int(port)))


@pytest.fixture
def start() -> Iterator[Callable[..., Kept]]:
    programs: list[Kept] = []

    def started(*arguments: str) -> Kept:
        programs.append(Kept(*arguments))
        return programs[-1]

    yield started
    for program in programs:
        program.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ctrl_c_ends_a_run_cleanly(start: Start, layout: str) -> None:
    program = start(layout)
    program.press_ctrl_c()
    program.assert_interrupted("algorithm cleaned up", "threads MainThread\n")


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
def test_an_interrupt_that_reaches_the_parent_only_ends_the_children_too(start: Start, layout: str) -> None:
    program = start(layout, "waits", "serves_then_deaf")
    os.kill(program.process.pid, signal.SIGINT)
    program.assert_interrupted()


def test_ctrl_c_breaks_off_a_synchronous_call_that_blocks_the_loop(start: Start) -> None:
    program = start("shm-algorithm", "blocks_its_loop")
    program.press_ctrl_c()
    program.assert_interrupted("algorithm cleaned up")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("cs-fork", "computes_in_a_thread"), "algorithm cleaned up"),
        (("cs-fork", "blocks_a_thread"), ""),
        (("cs-fork", "refuses_to_end", "serves_then_blocks"), "did not stop after cancellation; abandoning task"),
        (("cs-only-algorithm", "says_ready_alone", "serves"), ""),
    ],
    ids=["it cleans up", "it does not react and is left behind", "it refuses to end", "it has no runners"],
)
def test_ctrl_c_ends_a_run_whatever_its_algorithm_does(start: Start, arguments: tuple[str, ...], words: str) -> None:
    program = start(*arguments)
    program.press_ctrl_c()
    program.assert_interrupted(words)


@pytest.mark.parametrize("layout", ["shm-algorithm", "cs-fork"])
def test_a_second_ctrl_c_waits_for_nobody(start: Start, layout: str) -> None:
    program = start(layout, "refuses_to_end", "serves_then_blocks")
    program.press_ctrl_c()
    program.until("algorithm refuses")
    program.press_ctrl_c()
    program.assert_interrupted()


def test_a_child_watches_its_parent_where_the_kernel_does_not(tmp_path: Path) -> None:
    """The method on systems other than Linux: a thread that waits for the parent's end."""
    code = (
        "import multiprocessing, os, sys, time\n"
        "from agentlightning.execution import children\n"
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
    assert_gone([child])
