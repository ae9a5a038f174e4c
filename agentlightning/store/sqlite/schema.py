"""The tables of the SQLite store, and the upgrade of a file of an earlier version.

Each version adds an entry to `STEPS`; `PRAGMA user_version` is the version of a file (see `rules/durable.py`).
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterator

from pydantic import ValidationError

from agentlightning.errors import ConflictError
from agentlightning.store.rules.durable import SCHEMA_VERSION, check_not_newer, record_type
from agentlightning.store.sql.summaries import add_all
from agentlightning.store.sqlite.tx import SQLiteLink

_FIRST = """
CREATE TABLE rollouts (
    number INTEGER PRIMARY KEY, rollout_id TEXT NOT NULL UNIQUE, run_id TEXT, status TEXT NOT NULL,
    start_time REAL NOT NULL, queued_at REAL, deadline REAL,
    worker_id TEXT, attempts INTEGER NOT NULL, body BLOB NOT NULL
);
CREATE INDEX rollouts_queue ON rollouts (run_id, queued_at, number) WHERE queued_at IS NOT NULL;
CREATE INDEX rollouts_deadline ON rollouts (deadline) WHERE deadline IS NOT NULL;
CREATE INDEX rollouts_worker ON rollouts (worker_id, number) WHERE worker_id IS NOT NULL;
CREATE INDEX rollouts_status ON rollouts (status, start_time);
CREATE TABLE spans (
    number INTEGER PRIMARY KEY, rollout_id TEXT NOT NULL, attempt_id TEXT NOT NULL, span_id TEXT NOT NULL,
    body BLOB NOT NULL, UNIQUE (rollout_id, attempt_id, span_id)
);
CREATE TABLE rows (
    number INTEGER PRIMARY KEY, kind TEXT NOT NULL, key TEXT NOT NULL, body BLOB NOT NULL, UNIQUE (kind, key)
)
"""

_SECOND = """
DROP INDEX rollouts_queue;
ALTER TABLE rollouts RENAME COLUMN queued_at TO available_at;
ALTER TABLE rollouts ADD COLUMN priority INTEGER NOT NULL DEFAULT 0;
ALTER TABLE rollouts ADD COLUMN end_time REAL NOT NULL DEFAULT 9e999;
ALTER TABLE rollouts ADD COLUMN span_count INTEGER NOT NULL DEFAULT 0;
ALTER TABLE rollouts ADD COLUMN span_bytes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE rollouts ADD COLUMN change INTEGER NOT NULL DEFAULT 0;
CREATE INDEX rollouts_queue ON rollouts (run_id, priority DESC, available_at, number) WHERE available_at IS NOT NULL;
CREATE INDEX rollouts_run ON rollouts (run_id, status, start_time, number);
CREATE INDEX rollouts_end ON rollouts (run_id, end_time, number);
CREATE INDEX rollouts_change ON rollouts (change);
CREATE INDEX rollouts_sizes ON rollouts (run_id, attempts, span_count, span_bytes);
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO counters VALUES ('change', (SELECT coalesce(max(number), 0) FROM rollouts))
"""
"""A rollout that has not ended has the end infinity, so that an index orders it last."""

_FOURTH = """
CREATE TABLE run_records (
    number INTEGER PRIMARY KEY, run_id TEXT NOT NULL, kind TEXT NOT NULL, step INTEGER NOT NULL, name TEXT NOT NULL,
    size INTEGER NOT NULL, body BLOB NOT NULL, UNIQUE (run_id, kind, step, name)
);
CREATE INDEX run_records_step ON run_records (run_id, step, number, kind);
CREATE INDEX run_records_kind ON run_records (run_id, kind, step, number);
CREATE INDEX run_records_name ON run_records (run_id, name, step, number);
ALTER TABLE rows ADD COLUMN change INTEGER;
CREATE INDEX rows_change ON rows (change) WHERE change IS NOT NULL
"""

_FIFTH = """
CREATE TABLE summaries (
    run TEXT NOT NULL, number INTEGER NOT NULL, rollout_id TEXT NOT NULL, status TEXT NOT NULL, mode TEXT, step INTEGER,
    task TEXT, sample INTEGER, start_time REAL NOT NULL, end_time REAL, resources_id TEXT, resources_version INTEGER,
    attempts INTEGER NOT NULL, attempt_id TEXT, attempt_status TEXT, worker_id TEXT, outcome TEXT, outcome_reason TEXT,
    error_type TEXT, reward REAL, rewards TEXT, PRIMARY KEY (run, number)
) WITHOUT ROWID;
CREATE INDEX summaries_step ON summaries (run, step, reward, outcome, mode, start_time, end_time);
CREATE INDEX summaries_start ON summaries (start_time, number);
CREATE TABLE inputs (number INTEGER PRIMARY KEY, preview TEXT NOT NULL, searched TEXT NOT NULL)
"""
"""`run` is empty for a rollout without a run, else a `/` and the id of the run. `number` is the rollout's number."""


def _begin(db: sqlite3.Connection) -> None:
    _run(db, _FIRST)


def _count_spans_and_changes(db: sqlite3.Connection) -> None:
    _run(db, _SECOND)
    sizes = "SELECT rollout_id, count(*), sum(length(body)) FROM spans GROUP BY rollout_id"
    spans = {rollout_id: (count, size) for rollout_id, count, size in db.execute(sizes)}
    for number, body in db.execute("SELECT number, body FROM rollouts").fetchall():
        try:
            record = record_type().validate_json(body)
        except ValidationError:  # reported when it is read; it must not block the upgrade of the others
            continue
        record.span_count, record.span_bytes = spans.get(record.rollout.rollout_id, (0, 0))
        end = math.inf if record.rollout.end_time is None else record.rollout.end_time
        db.execute(
            "UPDATE rollouts SET end_time = ?, span_count = ?, span_bytes = ?, change = ?, body = ? WHERE number = ?",
            (end, record.span_count, record.span_bytes, number, record_type().dump_json(record), number),
        )


def _add_summaries(db: sqlite3.Connection) -> None:
    _run(db, _FIFTH)
    add_all(SQLiteLink(db), _rollouts(db))


def _rollouts(db: sqlite3.Connection) -> Iterator[tuple[str, bytes]]:
    """Yield id and record of every rollout, a few at a time."""
    number = -1
    query = "SELECT rollout_id, body, number FROM rollouts WHERE number > ? ORDER BY number LIMIT 1000"
    while rows := db.execute(query, (number,)).fetchall():
        yield from (row[:2] for row in rows)
        number = rows[-1][-1]


STEPS: list[tuple[int, Callable[[sqlite3.Connection], None]]] = [
    (1, _begin),
    (2, _count_spans_and_changes),
    (3, lambda db: None),
    (4, lambda db: _run(db, _FOURTH)),
    (5, _add_summaries),
]
"""The upgrade steps, each from one version to the next."""


def prepare(db: sqlite3.Connection, path: str) -> None:
    """Create the tables in a new file, or upgrade the tables of an older file, in one transaction.

    Raises:
        ConflictError: a newer version wrote the file, or it is not a store.
    """
    if check_version(db, path) == SCHEMA_VERSION:
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        version = check_version(db, path)
        if version == 0 and db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise ConflictError(f"The file {path!r} is a SQLite database of another program; choose another file")
        for number, step in STEPS:
            if number > version:
                step(db)
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    except BaseException:  # an interrupt must not leave the transaction open either
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def check_version(db: sqlite3.Connection, path: str) -> int:
    """Return the version of a file.

    Raises:
        ConflictError: a newer version wrote the file.
    """
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    check_not_newer(repr(path), version)
    return version


def _run(db: sqlite3.Connection, statements: str) -> None:
    for statement in statements.split(";"):
        db.execute(statement)
