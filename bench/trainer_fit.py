"""Whole runs through `fit`: rollouts per second, the time to the first, the time to the end, the way to a runner."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.store_figures import Figure

ROOT = Path(__file__).resolve().parents[1]


def run_case(
    kind: str, n_runners: int, rollouts: int, *, start_method: str = "fork", pause: float = 0.0, single: int = 0
) -> dict[str, Any]:
    """Run one `fit` in a fresh interpreter and return what it says."""
    settings = [kind, str(n_runners), start_method, str(rollouts), str(pause)]
    command = [sys.executable, "-m", "bench.trainer_case", *settings]
    environment = {**os.environ, "BENCH_SINGLE": str(single)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=300, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure_fit(quick: bool) -> list[Figure]:
    """Measure trivial rollouts; medians of three runs."""
    count, runs = (100, 1) if quick else (500, 3)
    cs = [run_case("cs", 2, count, single=20) for _ in range(runs)]
    shm = [run_case("shm", 1, count) for _ in range(runs)]
    spawn = [run_case("cs", 2, 20, start_method="spawn") for _ in range(runs)]
    left = max(run["left_over"] for run in (*cs, *shm, *spawn))

    def median(results: list[dict[str, Any]], key: str) -> float:
        return statistics.median(float(run[key]) for run in results)

    return [
        _at_least("fit, cs, 2 runners: rollouts/s", median(cs, "per_second"), 380, 38, _cost(median(cs, "cpu_ms"))),
        _at_least("fit, shm, 1 runner: rollouts/s", median(shm, "per_second"), 474, 158, _cost(median(shm, "cpu_ms"))),
        _at_most("fit to first rollout, cs by fork, s", median(cs, "first"), 0.4, 0.434),
        _at_most("fit to first rollout, cs by spawn, s", median(spawn, "first"), 2.0),
        _at_most("algorithm done to fit returned, cs, s", median(cs, "after"), 0.5, 0.338),
        _at_most("algorithm done to fit returned, shm, s", median(shm, "after"), 0.5, 0.034),
        _at_most("queue to agent, cs, idle runner, median ms", 1e3 * median(cs, "delay"), 30),
        _at_most("processes left when fit has returned", left, 0),
    ]


def _cost(cpu_ms: float) -> str:
    return f"{cpu_ms:.1f} ms of processor each, start and end of the run included"


def _at_least(name: str, value: float, target: float, older: float, note: str) -> Figure:
    return Figure(name, value, target, older=older, note=note)


def _at_most(name: str, value: float, target: float, older: float | None = None) -> Figure:
    return Figure(name, value, target, at_most=True, older=older)
