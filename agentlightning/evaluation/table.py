"""Figures as a table for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from agentlightning.evaluation.intervals import Interval
from agentlightning.terminal import one_line

if TYPE_CHECKING:
    from rich.table import Table

Row = tuple[str, str, str]
"""Name, figure and remark."""


def as_text(shown: object) -> str:
    """Return what a rich console prints of a value, without colours."""
    from rich.console import Console

    console = Console(width=100, color_system=None)
    with console.capture() as captured:
        console.print(shown)
    return captured.get().rstrip("\n")


def table_of(title: str, rows: Iterable[Row]) -> Table:
    """Return rows as a table; text of others cannot give the terminal orders."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_column("")
    for row in rows:
        table.add_row(*(Text(one_line(cell)) for cell in row))
    return table


def mean_row(name: str, interval: Interval | None, counted: int, tasks: int) -> Row:
    """Return the row of a mean over `counted` of the tasks."""
    if interval is None:
        return name, "-", "no task has a reward"
    spread = "" if counted < 2 else f"95 % interval {interval.low:.3f} to {interval.high:.3f}, "
    return name, f"{interval.mean:.3f}", f"{spread}{counted} of {tasks} tasks"
