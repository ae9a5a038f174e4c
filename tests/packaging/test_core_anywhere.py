"""The core runs on systems other than Linux: its programs, with what these systems lack hidden, and as it is here."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stubs.processes import run_program

ROOT = Path(__file__).parents[2]
PROGRAMS = ("stores", "gateway", "threads", "processes", "names", "command")
HIDDEN = ("darwin", "win32") if sys.platform == "linux" else ()


def run(*arguments: str, system: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("AGL_")}
    whole, words = clean | {"AGL_TEST_SYSTEM": system, "PYTHONPATH": str(ROOT)}, ("-W", "error::ResourceWarning")
    return run_program("python", *words, *arguments, folder=ROOT, environment=whole, timeout=300, code=None)


@functools.cache
def all_programs(system: str) -> subprocess.CompletedProcess[str]:
    """Run them in one process, which says last how each ended: its traceback, or "done"."""
    return run("-m", "tests.packaging.core_programs", *PROGRAMS, system=system)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("system", ["", *HIDDEN])
def test_each_part_of_the_core_runs(program: str, system: str) -> None:
    done = all_programs(system)
    assert done.returncode == 0, done.stdout + done.stderr
    end = json.loads(done.stdout.splitlines()[-1])[program]
    assert end == "done", end


LOOKS = """
import os
from tests.packaging.elsewhere import hide
hide({system!r})
for name in ("fcntl", "resource", "pwd"):
    try:
        __import__(name)
        print("has", name)
    except ImportError:
        pass
print([name for name in ("fork", "pidfd_open", "geteuid", "O_NOFOLLOW") if hasattr(os, name)])
READS = "try: open('/proc/self/stat')\\nexcept FileNotFoundError: print('no /proc')"
exec(READS, {{"__name__": "agentlightning.x"}})
"""


@pytest.mark.skipif(not HIDDEN, reason="hides what Linux has")
@pytest.mark.parametrize(
    ("system", "remaining"),
    [
        ("darwin", "has fcntl\nhas resource\nhas pwd\n['fork', 'geteuid', 'O_NOFOLLOW']\nno /proc\n"),
        ("win32", "[]\nno /proc\n"),
    ],
)
def test_what_the_other_system_lacks_is_hidden(system: str, remaining: str) -> None:
    done = run("-c", LOOKS.format(system=system), system=system)
    assert done.stdout == remaining, done.stderr
