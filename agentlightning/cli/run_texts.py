"""Helpers of the commands that show runs: find a run, and format its state and metrics as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from agentlightning.base.terminal import counted
from agentlightning.cli.output import say

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore
    from agentlightning.types.runs import Run

PAGE = 100
RUN = typer.Argument(metavar="RUN", help="Id of the run; - for the unnamed run")
LIMIT = typer.Option(PAGE, min=1, max=1000, help="Maximum number of entries")
OFFSET = typer.Option(0, min=0, help="Number of entries to skip")
SILENT_SECONDS = 60.0
"""Seconds without a heartbeat after which a run's algorithm has probably died."""
FIRST = (
    "mean_reward",
    "held_out",
    "update.loss",
    "loss",
    "reward",
    "calls_trained",
    "update.entropy",
    "update.grad_norm",
)
"""Metrics of a step that are shown first."""


async def existing_run(store: LightningStore, run_id: str, place: str) -> Run:
    """Return a run, or raise a `NotFoundError`."""
    from agentlightning.errors import NotFoundError, closest_name
    from agentlightning.store.spec import public_form
    from agentlightning.training.records import clean_run

    run = await store.get_run_by_id("" if run_id == "-" else run_id)
    if run is None:
        run_ids = [run.run_id for run in await store.query_runs(sort_order="desc", limit=1000)]
        near = closest_name(run_id, run_ids)
        hint = f"did you mean {near!r}?" if near else f"list the runs with: agl runs list --store {public_form(place)}"
        raise NotFoundError(f"Run {run_id!r} not found in {public_form(place)}; {hint}")
    return clean_run(run)


def name_of(run: Run) -> str:
    """Return the name of a run as commands accept it."""
    return run.run_id or "-"


def state_of(run: Run) -> str:
    """Return the state of a run as text, with the time since its last heartbeat if that is too long."""
    import time

    if run.state != "running":
        return run.state
    if run.starts == 0:
        return "not started"
    seconds = time.time() - (run.last_heartbeat_time or run.start_time)
    return "running" if seconds < SILENT_SECONDS else f"running, no heartbeat for {span(seconds)}"


def span(seconds: float) -> str:
    """Return a duration in its largest unit."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def best_of(run: Run) -> str:
    """Return the best result of a run as text."""
    return "-" if run.best is None else f"{run.best.value:g} {run.best.name} (step {run.best.step})"


def figure_text(value: object) -> str:
    """Return a metric or a setting as text."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return "-" if value is None else str(value)


def say_rest(shown: int, offset: int, total: int, noun: str, remark: str = "") -> None:
    """Print the number of items, and how to show the rest."""
    if offset + shown < total:
        say(f"{shown} of {counted(total, noun)}{remark}; use --offset {offset + shown} for the next page")
    else:
        say(f"{counted(total, noun)}{remark}")
