"""What commands print: a table for people, or one JSON document for programs; how they log. No colours in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer

JSON: Any = typer.Option(False, "--json", help="Print one JSON document instead.")
LOG_JSON: Any = typer.Option(False, "--log-json", envvar="AGL_LOG_JSON", help="Log one JSON object a line.")
_WIDTH_OF_FILES = 200
"""Columns where the output is no terminal, so that no line of a table is broken."""


def log_to_stderr(level: str, *, json_lines: bool) -> None:
    """Set up the log of a command: in colour on a terminal, elsewhere a line for each event, which tools can read.

    Raises:
        ValueError: no such level.
    """
    from agentlightning.logging import setup

    setup(level, color=sys.stderr is not None and sys.stderr.isatty(), json_lines=json_lines)


def show_json(value: Any) -> None:
    """Print a value as JSON, models included; what has no form there, as text."""
    import json

    from pydantic_core import to_jsonable_python

    print(json.dumps(to_jsonable_python(value, fallback=str), indent=2, ensure_ascii=False))


def show_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print lines below a header; cells are folded on a terminal, and never elsewhere."""
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


def moment(seconds: float | None) -> str:
    """Return a wall-clock time as people read it here; `-` for none."""
    from datetime import datetime

    return "-" if seconds is None else datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds")


def number(value: float | None) -> str:
    """Return a number in its shortest form; `-` for none."""
    return "-" if value is None else f"{value:g}"


def shortened(value: Any, columns: int = 60) -> str:
    """Return a value as text of at most so many characters."""
    text = str(value)
    return text if len(text) <= columns else f"{text[: columns - 3]}..."
