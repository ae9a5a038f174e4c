"""`agl store backup`, `check` and `stats`: looking after the data of a store, also while it is served."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from agentlightning.cli.support.output import JSON, say, show_json
from agentlightning.cli.support.store_access import with_store

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore, LightningStoreStatistics

_DB = typer.Option("agl.db", help="File of the store.")
_COPY = typer.Argument(help="Name of the copy.")
_PLACE = typer.Argument(
    "agl.db", envvar="AGENT_LIGHTNING_STORE_URL", help="A file, or where the store is: http://127.0.0.1:4747."
)
_ELSEWHERE = {
    "mongodb": "mongodump --uri=URI copies a MongoDB database",
    "postgres": "pg_dump URI copies a PostgreSQL database",
    "http": "run this command where that server's file is",
    "memory": "a store in memory has no file",
}


def backup(
    file: Path = _COPY,
    db: str = _DB,
    force: bool = typer.Option(False, "--force", help="Replace a file of that name."),
) -> int:
    """Copy a store's file, also while it is served. The copy is checked before it gets its name.

    Example: agl store backup monday.db --db run.db
    """
    from agentlightning.store.sqlite.file import backup_file

    size = backup_file(_file_of(db), file, force=force)
    say(f"{file}: {size} bytes, as {db} stood at one moment")
    return 0


def check(db: str = _DB, as_json: bool = JSON) -> int:
    """Check a store, also while it is served. A file: SQLite's structure, and what the store itself relies on. In
    MongoDB and PostgreSQL: whether every record can be read; their servers check their structure.

    Exit code 1 and a list when something is wrong. Example: agl store check --db run.db
    """
    from agentlightning.store.spec import public_form, spec_of

    spec = spec_of(db)
    if spec.startswith(("postgres", "mongodb")):
        from agentlightning.store.database_check import check_database

        report, db = check_database(spec), public_form(spec)
    else:
        from agentlightning.store.sqlite.check import check_file

        report = check_file(_file_of(db))
    if as_json:
        show_json(report)
        return 1 if report.found else 0
    for problem in report.problems:
        say(problem)
    if report.found:
        say(f"{db}: {report.found} problems, {len(report.problems)} of them listed")
        return 1
    say(f"{db}: ok, {report.rollouts} rollouts, {report.spans} spans, schema version {report.schema_version}")
    if not report.complete:
        say("That version is an older one, which is upgraded when the store is opened; a file was not checked further.")
    return 0


def stats(place: str = _PLACE, as_json: bool = JSON) -> int:
    """Show how much a store holds. `agl stats` and `agl store stats` are the same.

    Example: agl store stats http://127.0.0.1:4747
    """
    statistics, totals = with_store(place, _counts)
    if as_json:
        show_json({**statistics, "rollouts": totals})
        return 0
    for name, value in statistics.items():
        say(f"{name:<26} {value:.1f}" if isinstance(value, float) else f"{name:<26} {value}")
    for status, total in totals.items():
        say(f"rollouts {status:<17} {total}")
    return 0


async def _counts(store: LightningStore) -> tuple[LightningStoreStatistics, dict[str, int]]:
    """Return the store's own counters, and how many rollouts have each status."""
    from agentlightning.store.rules.lifecycle import ROLLOUT_STATUSES

    pages = {status: await store.query_rollouts(status_in=[status], limit=1) for status in ROLLOUT_STATUSES}
    return await store.statistics(), {status: page.total for status, page in pages.items()}


def _file_of(db: str) -> Path:
    """Return the file that an option names.

    Raises:
        BadRequestError: it names a store that has no file; says what to use instead.
    """
    from agentlightning.errors import BadRequestError
    from agentlightning.store.spec import public_form, spec_of

    spec = spec_of(db)
    if spec.startswith("sqlite:///"):
        return Path(spec.partition("?")[0].removeprefix("sqlite:///"))
    advice = next((text for scheme, text in _ELSEWHERE.items() if spec.startswith(scheme)), "expected a file")
    raise BadRequestError(f"{public_form(spec)!r} is no file of a store: {advice}")
