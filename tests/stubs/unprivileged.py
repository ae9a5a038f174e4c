"""Processes of a user who is not root, and the attack that one of them makes on the others through `/proc`."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

NOBODY = 65534
ATTACK = '''
import json, os, sys

def parts(pid):
    """Everything that /proc shows of a process, the memory too."""
    for name in ("environ", "cmdline"):
        try:
            yield name, open(f"/proc/{pid}/{name}", "rb").read()
        except OSError:
            pass
    try:
        maps = open(f"/proc/{pid}/maps").read().splitlines()
        memory = open(f"/proc/{pid}/mem", "rb", buffering=0)
    except OSError:
        return
    for line in maps:
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if line.split()[1].startswith("rw") and end - start < 1 << 28:
            try:
                memory.seek(start)
                yield "mem", memory.read(end - start)
            except (OSError, ValueError, OverflowError):
                pass

def attack(planted, spared):
    """Find texts, given in hexadecimal, in what other processes show: where each was found."""
    texts = {text: bytes.fromhex(text) for text in planted}
    found = []
    for pid in os.listdir("/proc"):
        if not pid.isdigit() or int(pid) in (os.getpid(), *spared):
            continue
        for where, data in parts(pid):
            for text, needle in texts.items():
                if needle in data:
                    command = open(f"/proc/{pid}/cmdline").read().replace(chr(0), " ")[:80]
                    found.append(f"{needle.decode()[:8]} in {where} of {pid} {command}")
    return sorted(set(found))
'''
"""Source of `attack(planted, spared)`: it needs no package."""


@dataclass(frozen=True)
class Unprivileged:
    """The start of a process of that user."""

    python: str
    path: str
    """Its `PYTHONPATH`."""
    popen: dict[str, Any]
    """Further arguments of `Popen`."""


def unprivileged() -> Unprivileged:
    """Return how to start a process of a user who is not root. Skips where that cannot be."""
    if sys.platform != "linux":
        pytest.skip("needs Linux: /proc shows the processes of the same user")
    if os.geteuid() != 0:
        return Unprivileged(sys.executable, "", {})
    python = _python_for_all()
    if python is None:
        pytest.skip(f"a user who is not root can run neither {sys.executable} nor another Python of its version")
    return python


@functools.cache
def _python_for_all() -> Unprivileged | None:
    """Find a Python of this version that everybody may run, with the packages of this one."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = os.pathsep.join((str(Path(__file__).parents[2]), sysconfig.get_path("purelib")))
    popen: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    for python in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        command = [python, "-c", "import agentlightning.cli.store, agentlightning.trainer"]
        with suppress(OSError):
            with subprocess.Popen(
                command, env={"PYTHONPATH": packages}, cwd="/", stderr=subprocess.PIPE, **popen
            ) as tried:
                tried.communicate()
            if tried.returncode == 0:
                return Unprivileged(python, packages, popen)
    return None


@contextmanager
def folder_of_unprivileged() -> Generator[Path]:
    """A folder that belongs to that user; pytest's own is closed to it."""
    folder = Path(tempfile.mkdtemp(prefix="agl-test-"))
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
