"""How the rate of rollouts grows with runners: up to the cores, and beyond for agents that wait for a model."""

from __future__ import annotations

import os
from pathlib import Path

from bench.store_figures import Figure
from bench.trainer_fit import run_case

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
