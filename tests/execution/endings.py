"""Every ending of a run in every layout, tried and measured: `python -m tests.execution.endings` prints the table.

Each cell is a program of its own (`ending_program.py`) with a folder of its own for temporary files. Looked at is how
long the end took, the exit code, and what was left: processes, threads, the port, files.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.execution.ending_program import LAYOUTS
from tests.stubs.ports import is_free
from tests.stubs.processes import ROOT, Process, lives

LIMIT_SECONDS = 30.0

ENDINGS: dict[str, str] = {
    "the algorithm returns": "returns",
    "the algorithm returns, work is queued": "returns with work in the queue",
    "the algorithm raises": "algorithm raises",
    "the runner raises": "runner raises",
    "the agent raises": "agent raises",
    "Ctrl+C": "stays",
    "Ctrl+C twice": "stays",
    "SIGTERM to the program": "stays",
    "kill -9 of the program": "stays",
    "kill -9 of a child": "stays",
}
"""Each ending, and the case of `ending_program.py` until then."""
EXIT_CODES: dict[str, int] = {
    "the algorithm returns": 0,
    "the algorithm returns, work is queued": 0,
    "the algorithm raises": 1,
    "the runner raises": 1,
    "the agent raises": 0,
    "Ctrl+C": -signal.SIGINT,
    "Ctrl+C twice": -signal.SIGINT,
    "SIGTERM to the program": 128 + signal.SIGTERM,
    "kill -9 of the program": -signal.SIGKILL,
    "kill -9 of a child": 1,
}


def cells() -> list[tuple[str, str]]:
    """Every layout with every ending that it can have."""
    pairs = [(layout, ending) for layout in LAYOUTS for ending in ENDINGS]
    return [(layout, ending) for layout, ending in pairs if layout.startswith("cs") or "child" not in ending]


@dataclass
class Observation:
    """An observation of one ending."""

    seconds: float
    exit_code: int
    output: str
    left: list[str] = field(default_factory=list[str])
    """Names of what remained that should not."""


def observe(layout: str, ending: str) -> Observation:
    """Run a program, bring it to its end, and return what remains of it."""
    with tempfile.TemporaryDirectory(prefix="agl-ending-") as folder, tempfile.TemporaryDirectory() as logs:
        command = ["python", "-m", "tests.execution.ending_program", layout, ENDINGS[ending]]
        process = Process(command, ROOT, {"TMPDIR": folder}, log=Path(logs) / "program.log")
        family, endpoint = list[psutil.Process](), "-"
        try:
            if ENDINGS[ending] == "stays":
                endpoint = re.findall(r"^ready (\S+)$", process.until(r"(?m)^ready \S+\n"), re.MULTILINE)[0]
                family = process.family()[1:]
            began = time.monotonic()
            _bring_to_its_end(process.popen, ending, family)
            code = process.ended(LIMIT_SECONDS)
            while _others(process.popen.pid, family) and time.monotonic() - began < LIMIT_SECONDS:
                time.sleep(0.01)
            seconds = time.monotonic() - began
            left = _left(process.popen.pid, family, endpoint, process.said, folder)
            return Observation(seconds, code, process.said, left)
        finally:
            process.kill()


def _bring_to_its_end(process: subprocess.Popen[str], ending: str, family: Sequence[psutil.Process]) -> None:
    match ending:
        case "Ctrl+C":
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        case "Ctrl+C twice":
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.05)  # a person's second press comes after the first was seen
            _signal_group(process.pid, signal.SIGINT)
        case "SIGTERM to the program":
            process.terminate()
        case "kill -9 of the program":
            process.kill()
        case "kill -9 of a child":
            _worker(family).kill()
        case _:
            pass


def _signal_group(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        os.killpg(pid, signum)


def _worker(family: Sequence[psutil.Process]) -> psutil.Process:
    """The runner, or the algorithm if that is the child: the leaf that is none of multiprocessing's own helpers."""
    leaves = [child for child in family if not child.children()]
    own = [child for child in leaves if not any("resource_tracker" in word for word in child.cmdline())]
    return own[-1]


def _left(pid: int, family: Sequence[psutil.Process], endpoint: str, output: str, folder: str) -> list[str]:
    leftovers = [f"process {other.pid}" for other in _others(pid, family)]
    if endpoint != "-" and not is_free(endpoint):
        leftovers.append(f"port {endpoint}")
    threads = [line for line in output.splitlines() if line.startswith("threads")]
    leftovers += [line for line in threads if line != "threads MainThread"]
    return leftovers + [f"file {path.name}" for path in Path(folder).iterdir()]


def _others(pid: int, family: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return the processes left by the program, those in its session that it never reported among them."""
    session = [process for process in psutil.process_iter() if _session_of(process) == pid]
    return [process for process in {*family, *session} if lives(process)]


def _session_of(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except (ProcessLookupError, PermissionError):
        return -1


def main() -> None:
    """Print the table: a row per ending, a column per layout; seconds, exit code, and the remains."""
    layouts = [layout for layout in LAYOUTS if len(sys.argv) == 1 or layout in sys.argv[1:]]
    print("| ending | exit code |", " | ".join(layouts), "|")
    print("| --- " * (len(layouts) + 2) + "|")
    for ending in ENDINGS:
        row_cells = [_cell(layout, ending) if (layout, ending) in cells() else "-" for layout in layouts]
        print(f"| {ending} | {EXIT_CODES[ending]} |", " | ".join(row_cells), "|", flush=True)


def _cell(layout: str, ending: str) -> str:
    observation = observe(layout, ending)
    wrong = [] if observation.exit_code == EXIT_CODES[ending] else [f"exit code {observation.exit_code}"]
    return "; ".join([f"{observation.seconds:.1f} s", *wrong, *observation.left])


if __name__ == "__main__":
    main()
