"""Reads all that a partition in PostgreSQL holds, in one snapshot; see `database_check.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator

import psycopg

from agentlightning.errors import ConflictError
from agentlightning.store.postgres.link import Database, Place, renderer
from agentlightning.store.postgres.schema import check_version
from agentlightning.store.rules.durable import Entry, Stored
from agentlightning.store.rules.tx import Record
from agentlightning.store.sql import summaries
from agentlightning.store.sql.dialect import POSTGRES, Columns

_WITH_RUNS, _WITH_SUMMARIES = 4, 5


@contextlib.contextmanager
def read_all(uri: str, partition: str) -> Generator[Stored]:
    """Give what the partition holds.

    Raises:
        ConflictError: there is no store, or one of a newer program.
        StoreUnreachableError: the server does not answer.
    """
    place = Place(uri)
    try:
        db = place.connect()
    except psycopg.OperationalError as error:
        raise place.unreachable(error, "Is the server running there?") from error
    with db, db.transaction():
        db.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        version = check_version(db, repr(place))
        if version == 0:
            raise ConflictError(f"There is no store in {place!r}")
        rollouts, spans = (_count(db, table, partition) for table in ("agl_rollouts", "agl_spans"))
        yield Stored(
            version,
            rollouts,
            spans,
            _rollouts(db, partition, with_short=version >= _WITH_SUMMARIES),
            _spans(db, partition),
            _rows(db, partition),
            _run_records(db, partition) if version >= _WITH_RUNS else (),
            _in_short if version >= _WITH_SUMMARIES else None,
        )


def _count(db: Database, table: str, partition: str) -> int:
    row = db.execute(f"SELECT count(*) FROM {table} WHERE partition = %s".encode(), (partition,)).fetchone()
    return row[0] if row else 0


def _each(db: Database, columns: str, table: str, partition: str) -> Iterator[Columns]:
    with db.cursor(name=f"check_{table}") as cursor:
        cursor.execute(f"SELECT {columns} FROM {table} WHERE partition = %s ORDER BY number".encode(), (partition,))
        yield from cursor


def _rollouts(
    db: Database, partition: str, *, with_short: bool
) -> Iterator[tuple[str, bytes | str, tuple[object, ...] | None]]:
    if not with_short:
        for rollout_id, body in _each(db, "rollout_id, body", "agl_rollouts", partition):
            yield rollout_id, body, None
        return
    with db.cursor(name="check_rollouts") as cursor:
        cursor.execute(renderer(db, partition)(summaries.WITH_RECORDS), ())
        for rollout_id, body, *in_short in cursor:
            yield rollout_id, body, tuple(in_short)


def _in_short(record: Record) -> tuple[object, ...]:
    return (*summaries.row_of(POSTGRES, record), *summaries.input_of(record.rollout))


def _spans(db: Database, partition: str) -> Iterator[Entry]:
    columns = "rollout_id, attempt_id, span_id, body"
    for rollout_id, attempt_id, span_id, body in _each(db, columns, "agl_spans", partition):
        at = f"rollout_id = '{rollout_id}' AND attempt_id = '{attempt_id}' AND span_id = '{span_id}'"
        removal = f"DELETE FROM agl_spans WHERE partition = '{partition}' AND {at}"
        yield f"{span_id} of rollout {rollout_id}", removal, body


def _rows(db: Database, partition: str) -> Iterator[Entry]:
    for kind, key, body in _each(db, "kind, key, body", "agl_rows", partition):
        at = f"partition = '{partition}' AND kind = '{kind}' AND key = '{key}'"
        yield f"{kind} {key}", f"DELETE FROM agl_rows WHERE {at}", body


def _run_records(db: Database, partition: str) -> Iterator[Entry]:
    for number, run_id, kind, step, name, body in _each(
        db, "number, run_id, kind, step, name, body", "agl_run_records", partition
    ):
        removal = f"DELETE FROM agl_run_records WHERE partition = '{partition}' AND number = {number}"
        yield f"the {kind} record {name!r} of step {step} of run {run_id!r}", removal, body
