"""Everything below a process is ended, also what a look at the processes misses or comes too late for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from agentlightning.utils import descendants
from tests.stubs.processes import run_program

LIMIT_SECONDS = 60
SUBREAPER = """
import os, sys, time
import psutil
from agentlightning.utils import descendants

assert descendants.adopt_orphans()
reader, writer = os.pipe()
if (child := os.fork()) == 0:
    if os.fork() == 0:
        os.write(writer, b"%d" % os.getpid())
        time.sleep(120)
    time.sleep(120)
grandchild = int(os.read(reader, 20))
look = psutil.Process.children


def child_ends_during_the_look(process, recursive):
    psutil.Process.children = look
    os.kill(child, 9)
    os.waitpid(child, 0)
    return []  # what psutil returns then: it follows parents, and this one is gone


psutil.Process.children = child_ends_during_the_look
print(descendants.end_descendants(os.getpid(), grace=0.0, reap=True), psutil.pid_exists(grandchild), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="subreapers are of Linux")
def test_a_subreaper_ends_what_is_below_a_process_that_ends_during_the_look() -> None:
    assert run_program("python", "-c", SUBREAPER).stdout == "[] False\n"


def test_a_look_that_takes_longer_than_the_limit_does_not_spare_what_it_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descendants, "KILL_SECONDS", 0.0)
    look = psutil.Process.children

    def below(process: psutil.Process, recursive: bool) -> list[psutil.Process]:
        return [each for each in look(process, recursive) if each.pid == child.pid]

    monkeypatch.setattr(psutil.Process, "children", below)
    child = subprocess.Popen(["sleep", str(2 * LIMIT_SECONDS)])
    try:
        descendants.end_descendants(os.getpid(), grace=0.0)
        assert child.wait(LIMIT_SECONDS) == -signal.SIGKILL
    finally:
        child.kill()
