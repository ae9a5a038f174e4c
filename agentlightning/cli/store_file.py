"""`agl store backup`, `check` and `stats`: looking after the data of a store, also while it is served."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore

_DB = typer.Option("agl.db", help="File of the store.")
_COPY = typer.Argument(help="Name of the copy.")
_PLACE = typer.Argument("agl.db", help="A file, or where the store is: http://127.0.0.1:4747.")
_PATIENCE_SECONDS = 5.0
"""For so long `stats` asks a server that does not answer."""
_ELSEWHERE = {
    "mongodb": "mongodump --uri=URI copies a MongoDB database, and its server checks itself",
    "postgres": "pg_dump URI copies a PostgreSQL database, and pg_amcheck checks one",
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
    print(f"{file}: {size} bytes, as {db} stood at one moment")
    return 0


def check(db: str = _DB) -> int:
    """Check a store's file, also while it is served: SQLite's structure, and what the store itself relies on.

    Exit code 1 and a list when something is wrong. Example: agl store check --db run.db
    """
    from agentlightning.store.sqlite.check import check_file

    report = check_file(_file_of(db))
    for problem in report.problems:
        print(problem)
    if report.found:
        print(f"{db}: {report.found} problems, {len(report.problems)} of them listed")
        return 1
    print(f"{db}: ok, {report.rollouts} rollouts, {report.spans} spans, schema version {report.schema_version}")
    if not report.complete:
        print("That version is an older one: only SQLite's structure was checked. Opening the store renews it.")
    return 0


def stats(place: str = _PLACE) -> int:
    """Show how much a store holds.

    Example: agl store stats http://127.0.0.1:4747
    """
    import asyncio

    from agentlightning.errors import BadRequestError
    from agentlightning.store.spec import spec_of, store_from_spec

    spec = spec_of(place)
    path = Path(spec.partition("?")[0].removeprefix("sqlite:///"))
    if spec.startswith("sqlite:") and not path.is_file():
        raise BadRequestError(f"There is no store file {str(path)!r}")
    patience = {"deadline": _PATIENCE_SECONDS} if spec.startswith("http") and "deadline=" not in spec else {}
    asyncio.run(_show(store_from_spec(spec, **patience)))
    return 0


async def _show(store: LightningStore) -> None:
    from agentlightning.store.lifecycle import ROLLOUT_STATUSES

    try:
        statistics = await store.statistics()
        pages = {status: await store.query_rollouts(status_in=[status], limit=1) for status in ROLLOUT_STATUSES}
    finally:
        await store.close()
    for name, value in statistics.items():
        print(f"{name:<26} {value:.1f}" if isinstance(value, float) else f"{name:<26} {value}")
    for status, page in pages.items():
        print(f"rollouts {status:<17} {page.total}")


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
