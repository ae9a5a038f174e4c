"""Whole runs through `fit`: rollouts per second, the time to the first, the time to the end, the way to a runner; and
how the rate grows with runners, up to the cores, and beyond for agents that wait for a model."""

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
    """Run one `fit` in a fresh interpreter and return its figures."""
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
    remaining = max(run["left_over"] for run in (*cs, *shm, *spawn))

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
        _at_most("processes left when fit has returned", remaining, 0),
    ]


def _cost(cpu_ms: float) -> str:
    return f"{cpu_ms:.1f} ms of processor each, start and end of the run included"


def _at_least(name: str, value: float, target: float, older: float, note: str) -> Figure:
    return Figure(name, value, target, older=older, note=note)


def _at_most(name: str, value: float, target: float, older: float | None = None) -> Figure:
    return Figure(name, value, target, at_most=True, older=older)


PAUSES = {"agents that wait 50 ms": 0.05, "agents that do nothing": 0.0}


def measure_growth(quick: bool, plot: Path | None = None) -> list[Figure]:
    """Measure `cs` with 1 to 8 runners; `plot` is a file for the curves (SVG, PNG)."""
    counts = (1, 2) if quick else (1, 2, 4, 8)
    figures: list[Figure] = []
    curves: dict[str, list[float]] = {}
    for name, pause in PAUSES.items():
        rates: list[float] = []
        for n_runners in counts:
            rollouts = 40 * n_runners if pause else (100 if quick else 500)
            rates.append(float(run_case("cs", n_runners, rollouts, pause=pause)["per_second"]))
            note = f"{rates[-1] / rates[0]:.1f} times that of one"
            figures.append(Figure(f"{name}, cs, {n_runners} runners: rollouts/s", rates[-1], note=note))
        curves[name] = rates
    if plot is not None:
        _draw(plot, counts, curves)
    return figures


def _draw(file: Path, counts: tuple[int, ...], curves: dict[str, list[float]]) -> None:
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(6, 4), layout="constrained")
    axes = canvas.subplots()
    for name, rates in curves.items():
        axes.plot(counts, rates, marker="o", label=name)
    axes.set(xlabel="runner processes", ylabel="rollouts per second", xticks=counts, ylim=(0, None))
    axes.set_title(f"store server, algorithm and runners on {os.cpu_count()} cores")
    axes.grid(alpha=0.3)
    axes.legend()
    canvas.savefig(file)
