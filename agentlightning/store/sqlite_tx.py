"""The primitives of a script as SQL over one SQLite connection, inside a transaction that the backend opened."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import TypeAdapter

from agentlightning.errors import BadRequestError
from agentlightning.store.backend import ROW_TYPES, Counts, Kind, Notes, Record, Row
from agentlightning.store.query import Plan, page_of
from agentlightning.store.sqlite_schema import RECORD
from agentlightning.types import Span

_encode = Span.__pydantic_serializer__.to_json
_decode = Span.__pydantic_validator__.validate_json
_TEXTS: TypeAdapter[list[str]] = TypeAdapter(list[str])
_ENDLESS = float("inf")


class SQLiteTx:
    """One script's view of the file."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.notes = Notes()
        self._db = connection

    def load(self, rollout_id: str) -> Record | None:
        row = self._db.execute("SELECT body FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
        return None if row is None else RECORD.validate_json(row[0])

    def save(self, record: Record) -> None:
        rollout = record.rollout
        self._db.execute("UPDATE counters SET value = value + 1 WHERE name = 'change'")
        self._db.execute(
            "INSERT INTO rollouts (rollout_id, run_id, status, start_time, end_time, priority, available_at, deadline,"
            " worker_id, attempts, span_count, span_bytes, change, body)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, (SELECT value FROM counters WHERE name = 'change'), ?)"
            " ON CONFLICT (rollout_id) DO UPDATE SET"
            " status = excluded.status, start_time = excluded.start_time, end_time = excluded.end_time,"
            " priority = excluded.priority, available_at = excluded.available_at, deadline = excluded.deadline,"
            " worker_id = excluded.worker_id, attempts = excluded.attempts, span_count = excluded.span_count,"
            " span_bytes = excluded.span_bytes, change = excluded.change, body = excluded.body",
            (
                rollout.rollout_id,
                rollout.run_id,
                rollout.status,
                rollout.start_time,
                _ENDLESS if rollout.end_time is None else rollout.end_time,
                rollout.priority,
                record.available_at,
                record.deadline,
                record.holder,
                len(record.attempts),
                record.span_count,
                record.span_bytes,
                RECORD.dump_json(record),
            ),
        )

    def delete(self, rollout_id: str) -> bool:
        self._db.execute("DELETE FROM spans WHERE rollout_id = ?", (rollout_id,))
        return self._db.execute("DELETE FROM rollouts WHERE rollout_id = ?", (rollout_id,)).rowcount == 1

    def claim(self, run_id: str | None, now: float) -> Record | None:
        row = self._db.execute(
            "SELECT body FROM rollouts WHERE available_at IS NOT NULL AND run_id IS ? AND available_at <= ?"
            " ORDER BY priority DESC, available_at, number LIMIT 1",
            (run_id, now),
        ).fetchone()
        return None if row is None else RECORD.validate_json(row[0])

    def next_available(self, run_id: str | None) -> float | None:
        return self._db.execute(
            "SELECT min(available_at) FROM rollouts WHERE available_at IS NOT NULL AND run_id IS ?", (run_id,)
        ).fetchone()[0]

    def find(self, plan: Plan) -> tuple[list[Record], int]:
        where, values = _where(plan)
        if plan.sort_by in (None, "start_time", "end_time"):
            return self._find_page(plan, where, values)
        records = self._records(f"SELECT body FROM rollouts{where} ORDER BY number", values)
        by_id = {record.rollout.rollout_id: record for record in records}
        rollouts = [record.rollout for record in by_id.values()]
        page, total = page_of(rollouts, plan.sort_by, plan.descending, plan.limit, plan.offset)
        return [by_id[rollout.rollout_id] for rollout in page], total

    def _find_page(self, plan: Plan, where: str, values: list[Any]) -> tuple[list[Record], int]:
        direction = "DESC" if plan.descending else "ASC"
        order = "number" if plan.sort_by is None else f"{plan.sort_by} {direction}, number"
        total = self._db.execute(f"SELECT count(*) FROM rollouts{where}", values).fetchone()[0]
        page = f"SELECT body FROM rollouts{where} ORDER BY {order} LIMIT ? OFFSET ?"
        return self._records(page, [*values, plan.limit, plan.offset]) if plan.limit else [], total

    def _records(self, query: str, values: Iterable[Any]) -> list[Record]:
        return [RECORD.validate_json(row[0]) for row in self._db.execute(query, tuple(values))]

    def runs(self) -> list[str | None]:
        return [row[0] for row in self._db.execute("SELECT DISTINCT run_id FROM rollouts")]

    def counts(self, run_id: tuple[str | None] | None = None) -> Counts:
        where, values = ("", ()) if run_id is None else (" WHERE run_id IS ?", run_id)
        query = "SELECT count(*), sum(attempts), sum(span_count), sum(span_bytes) FROM rollouts"
        return Counts(*(number or 0 for number in self._db.execute(query + where, values).fetchone()))

    def changes(self, after: str, limit: int) -> tuple[list[Record], str]:
        try:
            cursor = int(after)
        except ValueError:
            raise BadRequestError(
                f"{after!r} is no cursor of this store; take it from an earlier page, or '0'"
            ) from None
        rows = self._db.execute(
            "SELECT change, body FROM rollouts WHERE change > ? ORDER BY change LIMIT ?",
            (min(max(cursor, 0), 2**62), limit),
        ).fetchall()
        return [RECORD.validate_json(body) for _, body in rows], str(rows[-1][0] if rows else max(cursor, 0))

    def last_change(self) -> str:
        return str(self._db.execute("SELECT value FROM counters WHERE name = 'change'").fetchone()[0])

    def due(self, now: float, limit: int) -> list[Record]:
        return self._records(
            "SELECT body FROM rollouts WHERE deadline IS NOT NULL AND deadline < ? ORDER BY deadline LIMIT ?",
            (now, limit),
        )

    def held(self, worker_id: str, limit: int) -> list[tuple[str, str]]:
        records = self._records(
            "SELECT body FROM rollouts WHERE worker_id = ? ORDER BY number DESC LIMIT ?", (worker_id, limit)
        )
        return [(record.rollout.rollout_id, record.attempts[-1].attempt_id) for record in records]

    def add_spans(self, spans: Sequence[Span]) -> list[int]:
        statement = "INSERT OR IGNORE INTO spans (rollout_id, attempt_id, span_id, body) VALUES (?, ?, ?, ?)"
        sizes: list[int] = []
        for span in spans:
            body = _encode(span)
            key = (span.rollout_id, span.attempt_id, span.span_id)
            sizes.append(len(body) if self._db.execute(statement, (*key, body)).rowcount == 1 else 0)
        return sizes

    def spans(self, rollout_id: str, attempt_id: str | None, span_id: str | None = None) -> list[Span]:
        where, values = "rollout_id = ?", [rollout_id]
        for column, wanted in (("attempt_id", attempt_id), ("span_id", span_id)):
            if wanted is not None:
                where += f" AND {column} = ?"
                values.append(wanted)
        return [
            _decode(row[0]) for row in self._db.execute(f"SELECT body FROM spans WHERE {where} ORDER BY number", values)
        ]

    def get(self, kind: Kind, key: str) -> Row | None:
        row = self._db.execute("SELECT body FROM rows WHERE kind = ? AND key = ?", (kind, key)).fetchone()
        return None if row is None else ROW_TYPES[kind].validate_json(row[0])

    def put(self, kind: Kind, key: str, row: Row) -> None:
        self._db.execute(
            "INSERT INTO rows (kind, key, body) VALUES (?, ?, ?)"
            " ON CONFLICT (kind, key) DO UPDATE SET body = excluded.body",
            (kind, key, ROW_TYPES[kind].dump_json(row)),
        )

    def drop(self, kind: Kind, key: str) -> None:
        self._db.execute("DELETE FROM rows WHERE kind = ? AND key = ?", (kind, key))

    def scan(self, kind: Kind, limit: int | None = None) -> list[tuple[str, Row]]:
        query = "SELECT key, body FROM rows WHERE kind = ? ORDER BY number LIMIT ?"
        rows = self._db.execute(query, (kind, -1 if limit is None else limit))
        return [(key, ROW_TYPES[kind].validate_json(body)) for key, body in rows]

    def count_rows(self, kind: Kind) -> int:
        return self._db.execute("SELECT count(*) FROM rows WHERE kind = ?", (kind,)).fetchone()[0]


def _where(plan: Plan) -> tuple[str, list[Any]]:
    """Return the WHERE clause of a plan and its values."""
    tests: list[str] = []
    values: list[Any] = []
    for column, wanted in (("status", plan.status_in), ("rollout_id", plan.ids)):
        if wanted is not None and len(wanted) == 1:  # one value keeps the order of the index
            tests.append(f"{column} = ?")
            values.append(wanted[0])
        elif wanted is not None:
            tests.append(f"{column} IN (SELECT value FROM json_each(?))")
            values.append(_TEXTS.dump_json(list(wanted)).decode())
    if plan.id_contains is not None:
        tests.append("instr(rollout_id, ?) > 0")
        values.append(plan.id_contains)
    clauses = ["(" + (" OR " if plan.any_of else " AND ").join(tests) + ")"] if tests else []
    if plan.run_id is not None:
        clauses.append("run_id IS ?")
        values.append(plan.run_id[0])
    if plan.ended_before is not None:
        clauses.append("end_time < ?")
        values.append(plan.ended_before)
    return (" WHERE " + " AND ".join(clauses) if clauses else ""), values
