"""`agl import-v03`: import the data of a v0.3 installation into a store."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from agentlightning.base.terminal import counted
from agentlightning.cli.output import JSON, STORE, say, show_json, show_table, spec_of_place
from agentlightning.exit_codes import ExitCode

if TYPE_CHECKING:
    from agentlightning.legacy.v03.importing import Importing, Report
    from agentlightning.legacy.v03.source import Source


class Unfinished(StrEnum):
    """Handling of unfinished rollouts."""

    SKIP = "skip"
    """Skip and count them."""
    CANCEL = "cancel"
    """Import them as cancelled."""


_SOURCE = typer.Argument(
    metavar="SOURCE", help="mongodb://host/database, a v0.3 server (http://...:4747), or a JSON file or folder"
)
_PROGRESS_SECONDS = 5.0
_LONGEST_MESSAGE = 300


def import_v03(
    source: str = _SOURCE,
    store: str = STORE,
    partition: str | None = typer.Option(None, help="Partition to read, or all; required if the database has several"),
    run_id: str | None = typer.Option(None, help="Run to which the imported data is assigned"),
    unfinished: Unfinished = typer.Option(Unfinished.SKIP, help="Handling of unfinished rollouts: skip or cancel"),
    dry_run: bool = typer.Option(False, "--dry-run", help="Read and convert everything, but write nothing"),
    as_json: bool = JSON,
) -> int:
    """Import rollouts, attempts, spans and resources of v0.3 unchanged, and report data that cannot be imported.

    Stop the runs of the source first. The source is not changed. The store may be new or may already hold data. You
    can repeat the command: data that is already present is skipped. Exit code 1 if data other than unfinished
    rollouts could not be imported.

    Example: agl import-v03 mongodb://127.0.0.1:27017/agentlightning --store agl.db
    """
    from agentlightning.legacy.v03 import open_source
    from agentlightning.legacy.v03.convert import Converter
    from agentlightning.legacy.v03.importing import Importing
    from agentlightning.store.rules.values import check_run_id

    converter = Converter(None if run_id is None else check_run_id(run_id), unfinished is Unfinished.CANCEL)
    spec = None if dry_run else _target(store)
    importing = Importing(open_source(source, partition), converter, _progress() if sys.stderr.isatty() else None)
    try:
        asyncio.run(_run(importing, spec))
    except BaseException:
        if importing.has_begun and not dry_run:
            _show(importing.report, as_json)
            say("Interrupted. Imported data is kept. Repeat the command to continue.", to_stderr=True)
        raise
    _show(importing.report, as_json)
    if dry_run and not as_json:
        say("Nothing was written (--dry-run).")
    return ExitCode.DONE if importing.report.is_whole else ExitCode.FAILED


def _target(place: str) -> str:
    """Return the spec of the destination store; a file may be new."""
    from agentlightning.store.spec import spec_of

    spec = spec_of(place)
    file = spec.partition("?")[0].removeprefix("sqlite:///") if spec.startswith("sqlite:///") else None
    if file is None or Path(file).exists() or not Path(file).absolute().parent.is_dir():
        return spec_of_place(place)
    return spec


async def _run(importing: Importing, spec: str | None) -> None:
    """Import into the store of a spec. If it is None, only read."""
    from agentlightning.store.spec import store_from_spec

    source: Source = importing.source
    try:
        await source.check()  # before a new file is created
        if spec is None:
            await importing.run(None)
            return
        store = store_from_spec(spec)
        try:
            await importing.run(store)
        finally:
            await store.close()
    finally:
        await source.close()


def _progress() -> Callable[[Report], None]:
    """Return a function that prints the progress of an import every few seconds."""
    last = time.monotonic()

    def tell(report: Report) -> None:
        nonlocal last
        if time.monotonic() - last >= _PROGRESS_SECONDS:
            last = time.monotonic()
            say(", ".join(f"{tally.read} {kind}" for kind, tally in report.tallies.items()) + " read", to_stderr=True)

    return tell


def _show(report: Report, as_json: bool) -> None:
    """Print the result of an import."""
    omissions = [
        {"kind": kind, "reason": reason, **dataclasses.asdict(missed)}
        for (kind, reason), missed in report.missed.items()
    ]
    if as_json:
        parts = {"dropped_fields": report.dropped, "changed": report.changed, "left_behind": report.others}
        tallies = {kind: dataclasses.asdict(tally) for kind, tally in report.tallies.items()}
        whole = {"source": report.source, "whole": report.is_whole, **tallies, "not_carried_over": omissions, **parts}
        show_json(whole)
        return
    lines = [
        [kind, *(str(count) for count in (tally.read, tally.new, tally.present, tally.left))]
        for kind, tally in report.tallies.items()
    ]
    show_table(["", "read", "new", "already present", "not imported"], lines)
    for (kind, reason), missed in report.missed.items():
        more = "" if missed.count <= len(missed.examples) else ", ..."
        count = counted(missed.count, kind.removesuffix("s"))
        say(f"{count} not imported ({reason}): {', '.join(missed.examples)}{more}")
        say(f"  {missed.message[:_LONGEST_MESSAGE]}")
    for text, counts in (
        ("values changed", report.changed),
        ("fields not imported", report.dropped),
        ("not read, because it is not history", report.others),
    ):
        if counts:
            say(f"{text}: {_listed(counts)}")


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.items())
