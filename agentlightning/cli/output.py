"""Output of commands: a table for people, or one JSON document for programs; their logs. No colours in a pipe.

A store that cannot be opened raises a `BadRequestError`, a missing store file or rollout a `NotFoundError`.

Commands print through this module, which removes terminal control characters from names, errors and tracebacks.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from agentlightning.base.terminal import cut, json_text, one_line, some_lines

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore
    from agentlightning.types import AttemptedRollout, Rollout

JSON = typer.Option(False, "--json", help="Print one JSON document instead of a table")
HOST = typer.Option("127.0.0.1", help="Address to listen on; an address beyond loopback requires AGL_TOKEN")
PORT = typer.Option(0, help="Port; 0 selects a free port")
LOG_LEVEL = typer.Option("INFO", help="DEBUG, INFO, WARNING or ERROR")
LOG_JSON = typer.Option(False, "--log-json", envvar="AGL_LOG_JSON", help="Log one JSON object per line")
_WIDTH_OF_FILES = 200
"""Width in columns of an output that is not a terminal, so that table lines are not wrapped."""
_NARROWEST = 12
"""Smallest width in columns to which a cell is cut."""


def log_to_stderr(level: str, *, json_lines: bool) -> None:
    """Set up the log of a command: in colour on a terminal, otherwise one plain line per event."""
    from agentlightning.logging import setup

    setup(level, color=sys.stderr is not None and sys.stderr.isatty(), json_lines=json_lines)


def show_json(value: object) -> None:
    """Print a value, which may contain models, as JSON. Values that JSON cannot represent are printed as text."""
    import json

    from pydantic_core import to_jsonable_python

    print(json_text(json.dumps(to_jsonable_python(value, fallback=str), indent=2, ensure_ascii=False)))


def say(text: str, *, lines: bool = False, to_stderr: bool = False) -> None:
    """Print a text without terminal control characters, as one line or as several `lines`.

    Lines after the first are indented to distinguish them from lines of the command itself.
    """
    safe = some_lines(text).replace("\n", "\n  ") if lines else one_line(text)
    print(safe, file=sys.stderr if to_stderr else sys.stdout, flush=True)


def show_traceback(error: BaseException) -> None:
    """Print an exception with its traceback to the error output."""
    import traceback

    print(some_lines("".join(traceback.format_exception(error))), end="", file=sys.stderr)


def show_table(header: Sequence[str], lines: Sequence[Sequence[str]], *, cut_last: bool = False) -> None:
    """Print lines below a header. Cells are folded only on a terminal; `cut_last` cuts the last one to the width."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_OF_FILES)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in header:
        table.add_column(name, overflow="fold")
    rows = [[Text(one_line(cell)) for cell in line] for line in lines]
    if cut_last:
        others = list(zip(map(Text, header), *rows, strict=True))[:-1]
        space = console.width - sum(max(text.cell_len for text in column) + 2 for column in others)
        for row in rows:
            row[-1].truncate(max(space, _NARROWEST), overflow="ellipsis")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def moment(seconds: float | None) -> str:
    """Return a wall-clock time as text in local time; `-` for None."""
    from datetime import datetime

    return "-" if seconds is None else datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds")


def number(value: float | None) -> str:
    """Return a number in its shortest form; `-` for None."""
    return "-" if value is None else f"{value:g}"


def shortened(value: object, columns: int = 60) -> str:
    """Return a value as text of at most `columns` characters."""
    return cut(str(value), columns)


T = TypeVar("T")

STORE = typer.Option(
    "agl.db",
    "--store",
    envvar="AGENT_LIGHTNING_STORE_URL",
    help="Store: a file, the folder of a run, or an address such as http://127.0.0.1:4747",
)
_PATIENCE_SECONDS = 5.0
"""Seconds for which requests to an unreachable server are retried."""


def with_store(place: str, ask: Callable[[LightningStore], Awaitable[T]]) -> T:
    """Open the store that an option names, return the result of `ask`, and close the store."""
    from agentlightning.store.spec import store_from_spec

    async def run() -> T:
        spec = spec_of_place(place)
        patience = {"deadline": _PATIENCE_SECONDS} if spec.startswith("http") and "deadline=" not in spec else {}
        connection = store_from_spec(spec, **patience)
        try:
            return await ask(connection)
        finally:
            await connection.close()

    return asyncio.run(run())


def spec_of_place(place: str, option: str = "--store") -> str:
    """Return the spec of the store that an option or argument names."""
    from agentlightning.errors import BadRequestError, NotFoundError
    from agentlightning.store.spec import spec_of

    folder = Path(place) if Path(place).is_dir() else None
    spec = spec_of(place if folder is None else str(folder / "store.db"))
    body = spec.partition("?")[0]
    if body == "memory":
        raise BadRequestError("A store in memory is available only in its own process. Use a file or a server")
    if body.startswith("sqlite:///") and not Path(body.removeprefix("sqlite:///")).is_file():
        if folder is not None:
            raise NotFoundError(f"The folder {place!r} has no store.db. {_store_of_run(folder)}")
        expected = "a store file, the folder of a run, or an address such as http://127.0.0.1:4747"
        raise NotFoundError(f"Store file {body.removeprefix('sqlite:///')!r} not found. Set {option} to {expected}")
    return spec


def _store_of_run(folder: Path) -> str:
    """Return the end of an error message: the store that the folder's `config.json` names, or how to find it."""
    try:
        store = json.loads((folder / "config.json").read_bytes())["run"]["store"]
    except (OSError, ValueError, LookupError, TypeError):  # no folder of a run, or one of an earlier version
        store = None
    if not isinstance(store, str) or not store:
        return "Pass the store that the program used, such as sqlite:///NAME.db as in Trainer(store=...)"
    if store.startswith("memory"):
        return (
            "Its run was stored in memory until the program ended; to keep a run, set Trainer(store='sqlite:///run.db')"
        )
    return f"Pass the store that the program used: {store!r}"


async def existing_rollout(store: LightningStore, rollout_id: str, place: str) -> AttemptedRollout | Rollout:
    """Return a rollout, or raise a `NotFoundError`."""
    from agentlightning.errors import NotFoundError
    from agentlightning.store.spec import public_form

    rollout = await store.get_rollout_by_id(rollout_id)
    if rollout is None:
        hint = f"List the rollouts with: agl rollouts list --store {public_form(place)}"
        raise NotFoundError(f"Rollout {rollout_id!r} not found in {public_form(place)}. {hint}")
    return rollout
