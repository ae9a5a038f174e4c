"""Every way to end a run from outside: Ctrl+C once and twice, and `kill -9`. No process and no port is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.stubs.ports import is_free
from tests.stubs.processes import ROOT, Process, Terminal, assert_gone

pytestmark = pytest.mark.slow
Start = Callable[..., Process]
LAYOUTS = ["shm-runner", "shm-algorithm", "cs-fork", "cs-spawn", "cs-forkserver", "cs-no-restarts", "cs-runner"]


@pytest.fixture
def start(terminal: Terminal) -> Start:
    """Starts `program.py` and waits until both sides are at work."""

    def started(layout: str, algorithm: str = "waits", runner: str = "serves") -> Process:
        program = terminal(["python", "-m", "tests.execution.program", layout, algorithm, runner], folder=ROOT)
        program.until(READY)
        return program

    return started


READY = r"ready (\S+) \d+\n"


def endpoint_of(program: Process) -> str:
    return program.until(READY).partition("ready ")[2].split()[0]


def press_ctrl_c(program: Process) -> None:
    """Send SIGINT to the whole group, as a terminal does."""
    os.killpg(program.popen.pid, signal.SIGINT)


def assert_interrupted(program: Process, *words: str, press: Callable[[Process], None] = press_ctrl_c) -> None:
    """Press Ctrl+C and wait for the end: the words are printed, and no process and no port is left."""
    family, endpoint = program.family(), endpoint_of(program)
    press(program)
    program.ended()
    for word in (*words, "returned interrupted=True"):
        assert word in program.said, program.said
    assert_gone(family)
    assert endpoint == "-" or is_free(endpoint)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ctrl_c_ends_a_run_cleanly(start: Start, layout: str) -> None:
    assert_interrupted(start(layout), "algorithm cleaned up", "threads MainThread\n")


def test_runs_that_begin_together_have_a_store_each_though_none_names_a_port(start: Start) -> None:
    layouts = ["cs-runner-4747", "cs-fork-4747"] * 3
    with ThreadPoolExecutor(len(layouts)) as together:
        programs = list(together.map(start, layouts))
    assert len(set(map(endpoint_of, programs))) == len(layouts)
    for program in programs:
        press_ctrl_c(program)
    for program in programs:
        program.ended()
        assert "algorithm cleaned up" in program.said


@pytest.mark.parametrize("layout", ["cs-fork", "cs-runner"])
def test_an_interrupt_that_reaches_the_parent_only_ends_the_children_too(start: Start, layout: str) -> None:
    program = start(layout, "waits", "serves_then_deaf")
    assert_interrupted(program, press=lambda program: program.popen.send_signal(signal.SIGINT))


def test_ctrl_c_breaks_off_a_synchronous_call_that_blocks_the_loop(start: Start) -> None:
    assert_interrupted(start("shm-algorithm", "blocks_its_loop"), "algorithm cleaned up")


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
    assert_interrupted(start(*arguments), words)


@pytest.mark.parametrize("layout", ["shm-algorithm", "cs-fork"])
def test_a_second_ctrl_c_waits_for_nobody(start: Start, layout: str) -> None:
    program = start(layout, "refuses_to_end", "serves_then_blocks")
    press_ctrl_c(program)
    program.until("algorithm refuses")
    assert_interrupted(program)


def test_a_child_watches_its_parent_where_the_kernel_does_not(terminal: Terminal) -> None:
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
    parent = terminal(["python", "-c", code], folder=ROOT)
    child = psutil.Process(int(parent.until(r"\d+\n")))
    parent.popen.kill()
    assert_gone([child])
