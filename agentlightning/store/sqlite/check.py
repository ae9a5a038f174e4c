"""The check of a SQLite store's file: its structure, and whether its tables agree with its records."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from agentlightning.store.base import FINISHED, QUEUING, RUNNING
from agentlightning.store.rules.durable import INDEXED, SCHEMA_VERSION, check_not_newer, record_type
from agentlightning.store.rules.rewards import problems_of_rewards
from agentlightning.store.rules.tx import Record, ResourcesRow, Row, TextRow, row_type
from agentlightning.store.sql import summaries
from agentlightning.store.sql.writes import columns_of
from agentlightning.store.sqlite.file import integrity, reading, schema_version
from agentlightning.store.sqlite.tx import SQLiteLink
from agentlightning.types import RunRecord, Span
from agentlightning.utils.rewards import may_hold_reward

LISTED = 50
"""Problems of a file that are listed; further ones are only counted."""


@dataclass(frozen=True)
class FileReport:
    """What a check of a file saw."""

    schema_version: int
    rollouts: int = 0
    spans: int = 0
    found: int = 0
    """How many problems there are."""
    problems: list[str] = field(default_factory=list[str])
    """The first `LISTED` of them."""

    @classmethod
    def of(cls, schema_version: int, rollouts: int, spans: int, problems: Iterator[str]) -> Self:
        """Return the report of these problems, which are looked for here."""
        listed = list(islice(problems, LISTED))
        return cls(schema_version, rollouts, spans, len(listed) + sum(1 for _ in problems), listed)

    @property
    def complete(self) -> bool:
        """False for a file of an older version, of which only SQLite's own structure was checked."""
        return self.schema_version == SCHEMA_VERSION


def check_file(path: str | Path) -> FileReport:
    """Check a store's file: SQLite's own structure, and that its tables say what its records say.

    Raises:
        BadRequestError: no such file, or it cannot be read as SQLite.
        ConflictError: it holds no store, or one of a newer version.
    """
    with reading(Path(path)) as db:
        version = schema_version(db, Path(path))
        check_not_newer(repr(str(path)), version)
        problems = _all_problems(db, complete=version == SCHEMA_VERSION)
        return FileReport.of(version, _count(db, "rollouts"), _count(db, "spans"), problems)


def _count(db: sqlite3.Connection, table: str) -> int:
    try:
        return db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    except sqlite3.DatabaseError:  # listed as a problem of the file already
        return 0


# --- what may be wrong ---------------------------------------------------------------------------------------------

_STRAY_SPANS = (
    "SELECT rollout_id, count(*) FROM spans WHERE rollout_id NOT IN (SELECT rollout_id FROM rollouts)"
    " GROUP BY rollout_id"
)
_CHANGES = (
    "SELECT coalesce(max(change), 0), count(DISTINCT change), count(*) FROM"
    " (SELECT change FROM rollouts UNION ALL SELECT change FROM rows WHERE change IS NOT NULL)"
)
_STRAY_SUMMARIES = (
    "SELECT (SELECT count(*) FROM summaries WHERE number NOT IN (SELECT number FROM rollouts)),"
    " (SELECT count(*) FROM inputs WHERE number NOT IN (SELECT number FROM rollouts))"
)
_STRAY_RECORDS = (
    "SELECT run_id, count(*) FROM run_records WHERE run_id NOT IN (SELECT key FROM rows WHERE kind = 'run')"
    " GROUP BY run_id"
)


def _all_problems(db: sqlite3.Connection, *, complete: bool) -> Iterator[str]:
    try:
        yield from integrity(db)
        if complete:
            yield from _problems_of_rollouts(db)
            for rollout_id, count in db.execute(_STRAY_SPANS):
                yield f"{count} spans belong to rollout {rollout_id}, which is not there"
            for table, count in zip(("summaries", "inputs"), db.execute(_STRAY_SUMMARIES).fetchone(), strict=True):
                if count:
                    yield f"{count} rows of {table} belong to rollouts that are not there"
            [counter] = db.execute("SELECT value FROM counters WHERE name = 'change'").fetchone() or [None]
            [newest, distinct, count] = db.execute(_CHANGES).fetchone()
            if counter is None or newest > counter:
                yield f"the newest change has number {newest}, and the counter of changes stands at {counter}"
            if distinct != count:
                yield f"{count - distinct} rollouts or runs share the number of their change with another"
            yield from _problems_of_rows(db)
            yield from _problems_of_runs(db)
    except sqlite3.DatabaseError as error:
        yield f"the file cannot be read further: {error}"


def _problems_of_rollouts(db: sqlite3.Connection) -> Iterator[str]:
    columns = ("rollout_id", "run_id", *INDEXED)
    for body, *values in db.execute(f"SELECT body, {', '.join(columns)} FROM rollouts ORDER BY number"):
        name = f"rollout {values[0]}"
        try:
            record = record_type().validate_json(body)
        except ValidationError as error:
            yield (
                f"{name}: its record cannot be read: {error.errors()[0]['msg']}; it is left out of queue and lists. "
                f"Remove it: store.delete_rollouts(rollout_ids=[{values[0]!r}], force=True)"
            )
            continue
        said = (record.rollout.rollout_id, record.rollout.run_id, *columns_of(record))
        for column, value, expected in zip(columns, values, said, strict=False):
            if value != expected:
                yield f"{name}: column {column} is {value!r}, its record says {expected!r}"
        for problem in (*_problems_of_record(db, record), *summaries.problems(SQLiteLink(db), record)):
            yield f"{name}: {problem}"


def _problems_of_record(db: sqlite3.Connection, record: Record) -> Iterator[str]:
    """Yield what contradicts itself in a record, and what its spans contradict in it."""
    rollout, status = record.rollout, record.rollout.status
    if (record.queued_at is not None) != (status in QUEUING):
        yield f"it is {status} and {'not ' if record.queued_at is None else ''}in the queue"
    if record.deadline is not None and status not in RUNNING:
        yield f"it is {status} and has a deadline"
    if (rollout.end_time is not None) != (status in FINISHED):
        yield f"it is {status} and has {'no' if rollout.end_time is None else 'an'} end_time"
    if [attempt.sequence_id for attempt in record.attempts] != list(range(1, len(record.attempts) + 1)):
        yield "its attempts are not numbered 1, 2, 3, ..."
    if len({attempt.attempt_id for attempt in record.attempts}) != len(record.attempts):
        yield "two of its attempts have one id"
    if any(attempt.rollout_id != rollout.rollout_id for attempt in record.attempts):
        yield "it holds an attempt of another rollout"
    count = size = highest = 0
    rewarding: list[Span] = []
    attempts = {attempt.attempt_id for attempt in record.attempts}
    query = "SELECT attempt_id, span_id, body FROM spans WHERE rollout_id = ? ORDER BY number"
    for attempt_id, span_id, body in db.execute(query, (rollout.rollout_id,)):
        count, size = count + 1, size + len(body)
        try:
            span = Span.model_validate_json(body)
        except ValidationError as error:
            where = f"rollout_id = '{rollout.rollout_id}' AND attempt_id = '{attempt_id}'"
            yield (
                f"span {span_id} cannot be read: {error.errors()[0]['msg']}. Remove its rollout, or it alone: "
                f"DELETE FROM spans WHERE {where} AND span_id = '{span_id}'"
            )
            continue
        highest = max(highest, span.sequence_id)
        if may_hold_reward(span):
            rewarding.append(span)
        if (span.rollout_id, span.attempt_id, span.span_id) != (rollout.rollout_id, attempt_id, span_id):
            yield f"span {span_id} lies under other ids than its own"
        if attempt_id not in attempts:
            yield f"span {span_id} belongs to attempt {attempt_id}, which the rollout does not have"
    if (count, size) != (record.span_count, record.span_bytes):
        yield f"it has {count} spans of {size} bytes, its record says {record.span_count} of {record.span_bytes}"
    if highest > record.spans_issued:
        yield f"a span has number {highest}, and only {record.spans_issued} were given out"
    yield from problems_of_rewards(record, rewarding)


def _problems_of_rows(db: sqlite3.Connection) -> Iterator[str]:
    rows: dict[tuple[str, str], Row] = {}
    for kind, key, body in db.execute("SELECT kind, key, body FROM rows ORDER BY number"):
        try:
            row = row_type(kind).validate_json(body)
        except (KeyError, ValidationError):
            yield (
                f"the row {key!r} of kind {kind!r} cannot be read. Remove it: "
                f"DELETE FROM rows WHERE kind = '{kind}' AND key = '{key}'"
            )
            continue
        if kind in ("resources", "resources_version", "latest_resources"):
            rows[kind, key] = row
    for (kind, key), row in rows.items():
        if isinstance(row, TextRow) and ("resources", row.value) not in rows:
            yield f"the latest resources are {row.value}, which are not there"
        if kind == "resources" and isinstance(row, ResourcesRow):
            version = rows.get(("resources_version", f"{key}\n{row.update.version}"))
            if not isinstance(version, ResourcesRow) or version.update != row.update:
                yield f"resources {key}: version {row.update.version} is not kept as the newest one"


def _problems_of_runs(db: sqlite3.Connection) -> Iterator[str]:
    for run_id, count in db.execute(_STRAY_RECORDS):
        yield f"{count} records belong to run {run_id!r}, which is not there"
    for number, run_id, kind, step, name, body in db.execute(
        "SELECT number, run_id, kind, step, name, body FROM run_records ORDER BY number"
    ):
        try:
            record = RunRecord.model_validate_json(body)
        except ValidationError:
            problem = "cannot be read"
        else:
            if (record.kind, record.step, record.name) == (kind, step, name):
                continue
            problem = "lies under another kind, step or name than its own"
        removal = f"DELETE FROM run_records WHERE number = {number}"
        yield f"run {run_id!r}: the {kind} record {name!r} of step {step} {problem}. Remove it: {removal}"
