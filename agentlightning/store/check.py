"""The check of a store's data for `agl store check`, on a snapshot. It changes nothing and upgrades no tables.

It checks the internal structure of a SQLite file, but not of a database server.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from agentlightning.errors import ConflictError
from agentlightning.store.rules.durable import SCHEMA_VERSION, FileReport, check_not_newer
from agentlightning.store.spec import database_of
from agentlightning.store.sql.check import problems
from agentlightning.store.sql.dialect import POSTGRES, Columns
from agentlightning.store.sql.link import Link
from agentlightning.store.sqlite.file import integrity, reading, schema_version
from agentlightning.store.sqlite.tx import SQLiteLink

_CHANGES = (
    "SELECT coalesce(max(change), 0), count(DISTINCT change), count(*) FROM"
    " (SELECT change FROM rollouts UNION ALL SELECT change FROM rows WHERE change IS NOT NULL)"
)


def check_file(path: str | Path) -> FileReport:
    """Check the SQLite structure of a store file, and that its tables agree with its records.

    Raises:
        BadRequestError: the file does not exist or cannot be read as SQLite.
        ConflictError: the file contains no store, or a store of a newer version.
    """
    with reading(Path(path)) as db:
        version = schema_version(db, Path(path))
        check_not_newer(repr(str(path)), version)
        found = _problems_of_file(db, complete=version == SCHEMA_VERSION)
        return FileReport.of(version, _count(db, "rollouts"), _count(db, "spans"), found)


def _count(db: sqlite3.Connection, table: str) -> int:
    try:
        return db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    except sqlite3.DatabaseError:  # listed as a problem of the file already
        return 0


def _problems_of_file(db: sqlite3.Connection, *, complete: bool) -> Iterator[str]:
    try:
        yield from integrity(db)
        if complete:
            [counter] = db.execute("SELECT value FROM counters WHERE name = 'change'").fetchone() or [None]
            [newest, distinct, count] = db.execute(_CHANGES).fetchone()
            if counter is None or newest > counter:
                yield f"the newest change has number {newest}, but the counter of changes is {counter}"
            if distinct != count:
                yield f"rollouts or runs with the same change number as another: {count - distinct}"
            yield from problems(SQLiteLink(db))
    except sqlite3.DatabaseError as error:
        yield f"the check stopped because the file cannot be read: {error}"


def check_database(spec: str) -> FileReport:
    """Check a store in PostgreSQL or MongoDB: all records can be read, and the tables agree with the records.

    Raises:
        ConflictError: the store does not exist, or a newer version wrote it.
        StoreUnreachableError: the server does not respond.
    """
    uri, partition = database_of(spec)
    if spec.startswith("postgres"):
        return _check_partition(uri, partition)
    from agentlightning.store.mongo.check import check_partition

    return check_partition(uri, partition)


class _Reading(Link):
    """A link that keeps only a few rows of a long result in memory."""

    def each(self, text: str, values: Sequence[object] = ()) -> Iterator[Columns]:
        with self.db.cursor(name=f"check_{uuid.uuid4().hex}") as cursor:
            cursor.execute(self._render(text), values)
            yield from cursor


def _check_partition(uri: str, partition: str) -> FileReport:
    """Check a partition in PostgreSQL, in one snapshot."""
    from agentlightning.store.postgres.link import Place, errors, renderer
    from agentlightning.store.postgres.schema import check_version

    place = Place(uri)
    try:
        db = place.connect()
    except errors.OperationalError as error:
        raise place.unreachable(error, "Is the server running there?") from error
    with db, db.transaction():
        db.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        version = check_version(db, repr(place))
        if version == 0:
            raise ConflictError(f"{place!r} contains no store")
        link = _Reading(db, POSTGRES, renderer(db, partition))
        rollouts, spans = (
            link.fetch(f"SELECT count(*) FROM {table} WHERE @here")[0][0] for table in ("@rollouts", "@spans")
        )
        return FileReport.of(version, rollouts, spans, problems(link) if version == SCHEMA_VERSION else iter(()))
