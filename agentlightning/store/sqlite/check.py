"""The check of a SQLite store's file: its structure, the numbers of its changes, and the checks of `sql/check.py`."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

from agentlightning.store.rules.durable import SCHEMA_VERSION, FileReport, check_not_newer
from agentlightning.store.sql import check
from agentlightning.store.sqlite.file import integrity, reading, schema_version
from agentlightning.store.sqlite.tx import SQLiteLink

_CHANGES = (
    "SELECT coalesce(max(change), 0), count(DISTINCT change), count(*) FROM"
    " (SELECT change FROM rollouts UNION ALL SELECT change FROM rows WHERE change IS NOT NULL)"
)


def check_file(path: str | Path) -> FileReport:
    """Check a store's file: SQLite's own structure, and the agreement of its tables with its records.

    Raises:
        BadRequestError: no such file, or it cannot be read as SQLite.
        ConflictError: it holds no store, or one of a newer version.
    """
    with reading(Path(path)) as db:
        version = schema_version(db, Path(path))
        check_not_newer(repr(str(path)), version)
        problems = _problems(db, complete=version == SCHEMA_VERSION)
        return FileReport.of(version, _count(db, "rollouts"), _count(db, "spans"), problems)


def _count(db: sqlite3.Connection, table: str) -> int:
    try:
        return db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    except sqlite3.DatabaseError:  # listed as a problem of the file already
        return 0


def _problems(db: sqlite3.Connection, *, complete: bool) -> Iterator[str]:
    try:
        yield from integrity(db)
        if complete:
            [counter] = db.execute("SELECT value FROM counters WHERE name = 'change'").fetchone() or [None]
            [newest, distinct, count] = db.execute(_CHANGES).fetchone()
            if counter is None or newest > counter:
                yield f"the newest change has number {newest}, and the counter of changes stands at {counter}"
            if distinct != count:
                yield f"{count - distinct} rollouts or runs share the number of their change with another"
            yield from check.problems(SQLiteLink(db))
    except sqlite3.DatabaseError as error:
        yield f"the file cannot be read further: {error}"
