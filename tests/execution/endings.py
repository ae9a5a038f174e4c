"""Every ending of a run in every layout, tried and measured: `python -m tests.execution.endings` prints the table.

Each cell is a program of its own (`ending_program.py`) with a folder of its own for temporary files. Looked at is how
long the end took, the exit code, and what was left: processes, threads, the port, files.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.execution.ending_program import LAYOUTS
from tests.execution.left import lives

ROOT = Path(__file__).parents[2]
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
    with tempfile.TemporaryDirectory(prefix="agl-ending-") as folder:
        return _observe(layout, ending, folder)


def _observe(layout: str, ending: str, folder: str) -> Observation:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.execution.ending_program", layout, ENDINGS[ending]],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": folder},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    output, family, endpoint = "", list[psutil.Process](), "-"
    try:
        if ENDINGS[ending] == "stays":
            output, endpoint = _until_ready(process)
            family = psutil.Process(process.pid).children(recursive=True)
        began = time.monotonic()
        _bring_to_its_end(process, ending, family)
        output += process.communicate(timeout=LIMIT_SECONDS)[0]
        while _others(process.pid, family) and time.monotonic() - began < LIMIT_SECONDS:
            time.sleep(0.01)
        seconds = time.monotonic() - began
        return Observation(seconds, process.returncode, output, _left(process.pid, family, endpoint, output, folder))
    finally:
        process.kill()
        for child in family:
            if lives(child):
                child.kill()


def _until_ready(process: subprocess.Popen[str]) -> tuple[str, str]:
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if line.startswith("ready"):
            return output, line.split()[1]
    raise AssertionError(f"the program ended before it was ready:\n{output}")


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
    if endpoint != "-" and not _is_free(endpoint):
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


def _is_free(endpoint: str) -> bool:
    host, port = endpoint.removeprefix("http://").split(":")
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            again.bind((host, int(port)))
        except OSError:
            return False
    return True


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
