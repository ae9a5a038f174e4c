"""`agl rollouts`: look at what a store holds of rollouts; `explain` says what became of each model call of one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

if TYPE_CHECKING:
    from agentlightning.algorithm.collect import Evidence
    from agentlightning.store.base import LightningStore
    from agentlightning.types import Attempt, AttemptedRollout, Rollout

T = TypeVar("T")
_STORE = typer.Option("agl.db", "--store", help="A file, the folder of a run, or where the store is: http://...:4747.")
_WIDTH_OF_FILES = 200
"""Columns where the output is no terminal, so that no line of a table is broken."""

app = typer.Typer(no_args_is_help=True)


@app.callback()
def rollouts() -> None:
    """Look at rollouts and at what became of their model calls.

    Example: agl rollouts explain ro-1a2b3c --store runs/20260101-120000
    """


@app.command("explain")
def explain(
    rollout_id: str = typer.Argument(metavar="ID", help="Which rollout."),
    store: str = _STORE,
) -> int:
    """Say for each model call of a rollout who saw it, and which row it went to or why it is in none.

    The reasons are those of the training ledger, for the default adapter. Exit code 2 if there is no such rollout.

    Example: agl rollouts explain ro-1a2b3c --store run.db
    """
    from agentlightning.adapter.explain import HEADER
    from agentlightning.algorithm.record import read_rollout

    found = _with_store(store, lambda opened: _evidence(opened, rollout_id, store))
    record = read_rollout(found.rollout, found.attempts, found.spans)
    for line in _story(found, record.reward):
        print(line)
    told = record.explain()
    if told.calls:
        _show_table(HEADER, [each.cells() for each in told.calls])
    print(told.words())
    return 0


@app.command("list")
def list_rollouts(
    store: str = _STORE,
    status: list[str] = typer.Option([], help="Only those with this status; may be repeated."),
    contains: str | None = typer.Option(None, help="Only those whose id contains this."),
    run: str | None = typer.Option(None, help="Only those of this run."),
    limit: int = typer.Option(100, min=1, help="At most so many, the newest."),
) -> int:
    """Show rollouts, the newest first.

    Example: agl rollouts list --store run.db --status failed
    """
    found = _with_store(store, lambda opened: _newest(opened, status, contains, run, limit))
    lines = [_line(rollout) for rollout in found]
    _show_table(("rollout", "status", "mode", "attempts end", "run", "started", "input"), lines)
    print(f"{len(found)} rollouts")
    return 0


# --- the store -------------------------------------------------------------------------------------------------------


def _with_store(place: str, ask: Callable[[LightningStore], Awaitable[T]]) -> T:
    from agentlightning.store.spec import store_from_spec

    async def run() -> T:
        opened = store_from_spec(_spec(place))
        try:
            return await ask(opened)
        finally:
            await opened.close()

    return asyncio.run(run())


def _spec(place: str) -> str:
    """Return the spec of the store that an option names.

    Raises:
        BadRequestError: it names a file that is not there, or a store that dies with its process.
    """
    from agentlightning.errors import BadRequestError
    from agentlightning.store.spec import spec_of

    spec = spec_of(str(Path(place) / "store.db") if Path(place).is_dir() else place)
    body = spec.partition("?")[0]
    if body == "memory":
        raise BadRequestError("A store in memory can be asked by its own process only; name a file or a server")
    if body.startswith("sqlite:///") and not Path(body.removeprefix("sqlite:///")).is_file():
        raise BadRequestError(f"There is no store file {body.removeprefix('sqlite:///')!r}; name one with --store")
    return spec


async def _evidence(store: LightningStore, rollout_id: str, place: str) -> Evidence:
    from agentlightning.algorithm.collect import evidence
    from agentlightning.errors import NotFoundError
    from agentlightning.store.spec import public_form

    rollout = await store.get_rollout_by_id(rollout_id)
    if rollout is None:
        hint = f"agl rollouts list --store {public_form(place)} shows those that there are"
        raise NotFoundError(f"There is no rollout {rollout_id!r} in {public_form(place)}; {hint}")
    return await evidence(store, rollout)


async def _newest(
    store: LightningStore, status: list[str], contains: str | None, run: str | None, limit: int
) -> list[AttemptedRollout | Rollout]:
    filters: dict[str, Any] = {"status_in": status or None, "rollout_id_contains": contains}
    if run is not None:
        filters["run_id"] = run
    return list(await store.query_rollouts(**filters, sort_by="start_time", sort_order="desc", limit=limit))


# --- what is shown ---------------------------------------------------------------------------------------------------


def _story(found: Evidence, reward: float | None) -> list[str]:
    rollout = found.rollout
    lines = [f"rollout {rollout.rollout_id}: {rollout.status}, mode {rollout.mode or '-'}, reward {_shown(reward)}"]
    for attempt in found.attempts:
        error = f", {attempt.error.type}: {attempt.error.message}" if attempt.error else ""
        lines.append(f"attempt {attempt.attempt_id}: {_end_of(attempt)}{error}")
    return lines


def _end_of(attempt: Attempt) -> str:
    """Return how an attempt ended, or where it is."""
    return " ".join(filter(None, (attempt.status, attempt.outcome, attempt.outcome_reason)))


def _line(rollout: AttemptedRollout | Rollout) -> tuple[str, ...]:
    from datetime import datetime

    from agentlightning.types import AttemptedRollout

    attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
    started = datetime.fromtimestamp(rollout.start_time).isoformat(sep=" ", timespec="seconds")
    task = str(rollout.input)
    return (
        rollout.rollout_id,
        rollout.status,
        rollout.mode or "-",
        "-" if attempt is None else _end_of(attempt),
        rollout.run_id or "-",
        started,
        task if len(task) <= 60 else f"{task[:57]}...",
    )


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _show_table(header: tuple[str, ...], lines: list[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_OF_FILES)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in header:
        table.add_column(name, overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line))
    console.print(table)
