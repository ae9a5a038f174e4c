"""Commands on a terminal of 80 columns, as a person sees them."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.stubs.processes import Process, run_program

AGL = ("-m", "agentlightning.cli")
Serve = Callable[..., tuple[Process, list[str]]]
"""Starts a command that serves; returns its process and the first lines that it prints."""


def shell(*arguments: str | Path, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `agl` in a process of its own, without colours."""
    return run_program("agl", *arguments, folder=cwd, code=None, **{"NO_COLOR": "1", "COLUMNS": "100", **environment})


def on_terminal(*command: str | Path, program: Sequence[str] = AGL, columns: int = 80) -> tuple[int, list[str]]:
    """Run `agl`, or another program of Python, on a terminal; return its exit code and lines, without escapes."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    unwanted = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CI", "GITHUB_ACTIONS")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    child = subprocess.Popen(
        [sys.executable, *program, *command],
        stdin=theirs, stdout=theirs, stderr=theirs, env={**environment, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while chunk := _read(ours):
        shown += chunk
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\[\?25[lh]", "", shown.decode(errors="replace"))
    return child.wait(60), [line.rstrip() for line in re.split(r"[\r\n]+", text)]


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the last program has closed it
        return b""
