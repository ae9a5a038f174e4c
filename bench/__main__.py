"""`make bench`: import time, wake-up over HTTP, the servers' share of a training step, size of the core install."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.store_children import Child
from bench.store_server import StoreServer
from bench.store_waiting import Sleeper, wake_ups_over_http

BASE = (
    "import time; t = time.perf_counter(); import pydantic, opentelemetry.sdk.trace\n"
    "class M(pydantic.BaseModel):\n    x: int\n"
    "print(time.perf_counter() - t)"
)
OURS = "import time; t = time.perf_counter(); import agentlightning; print(time.perf_counter() - t)"


def seconds_of(code: str) -> float:
    """Return what a fresh interpreter prints for `code`."""
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def bench_import(runs: int) -> dict[str, float]:
    """Return the import times, taken in turns, and the median of their ratios."""
    pairs = [(seconds_of(OURS), seconds_of(BASE)) for _ in range(runs)]
    return {
        "import agentlightning, s": statistics.median(ours for ours, _ in pairs),
        "import pydantic and opentelemetry, s": statistics.median(base for _, base in pairs),
        "ratio (at most 1.8)": statistics.median(ours / base for ours, base in pairs),
    }


def bench_wake_up(count: int) -> dict[str, float]:
    """Return the time from enqueue to the claim of an idle runner in another process, over HTTP, store in SQLite."""
    with Child(StoreServer, "sqlite") as server, Child(Sleeper, server.opened) as sleeper:
        delays = asyncio.run(wake_ups_over_http(server.opened, sleeper, count))["idle runner"]
    return {
        "enqueue to claim, median ms (under 50)": statistics.median(delays),
        "enqueue to claim, largest ms": max(delays),
    }


def bench_step(steps: int) -> dict[str, float]:
    """Run a short demo and return the servers' CPU share of a training step's wall time."""
    from agentlightning.demo.run import DemoOptions, run_demo

    with tempfile.TemporaryDirectory() as folder:
        run_demo(DemoOptions(steps=steps, out=Path(folder) / "run", progress="none"), sys.stderr)
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    shares = [line["cpu_seconds"]["store_and_gateway"] / sum(line["seconds"].values()) for line in lines]
    return {
        "CPU of store and gateway per wall second of a step (at most 0.25)": statistics.median(shares),
        "seconds per step": statistics.median(sum(line["seconds"].values()) for line in lines),
    }


def bench_install() -> dict[str, float]:
    """Install the core alone into a new environment; return the number of packages and their size."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(__file__).resolve().parents[1]
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = str(Path(folder) / "bin" / "python")
        before = _size(Path(folder))
        command = [python, "-m", "pip", "install", "-q", "-c", str(root / "constraints.txt"), str(root)]
        subprocess.run(command, check=True)
        listed = subprocess.run([python, "-m", "pip", "list", "--format=json"], capture_output=True, check=True)
        packages = [p["name"] for p in json.loads(listed.stdout) if p["name"] not in ("pip", "setuptools")]
        size = (_size(Path(folder)) - before) / 1e6
    return {"packages of the core (at most 42)": len(packages), "size of the core, MB (at most 85)": size}


def _size(folder: Path) -> int:
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return sum(path.stat().st_size for path in files)


PARTS: dict[str, Callable[[], dict[str, float]]] = {
    "import": lambda: bench_import(9),
    "wake": lambda: bench_wake_up(50),
    "step": lambda: bench_step(4),
    "install": bench_install,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(PARTS), action="append")
    for part in parser.parse_args().only or PARTS:
        for name, value in PARTS[part]().items():
            print(f"{name:70} {value:10.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
