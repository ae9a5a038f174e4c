"""The primitives of a script over one SQLite connection: the differences from PostgreSQL."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import lru_cache, partial

from agentlightning.store.rules.durable import DAMAGED
from agentlightning.store.rules.query import read_cursor
from agentlightning.store.rules.tx import NewRunRecord, Record, RunRow
from agentlightning.store.sql.dialect import SQLITE
from agentlightning.store.sql.link import Link
from agentlightning.store.sql.tx import SqlTx
from agentlightning.types import Span

_encode = partial(Span.__pydantic_serializer__.to_json, exclude_defaults=True)
_render = lru_cache(maxsize=1024)(SQLITE.render)
_ADD_SPAN = "INSERT OR IGNORE INTO spans (rollout_id, attempt_id, span_id, body) VALUES (?, ?, ?, ?)"
_ADD_RUN_RECORD = "INSERT OR IGNORE INTO run_records (run_id, kind, step, name, size, body) VALUES (?, ?, ?, ?, ?, ?)"
_CHANGES = f"SELECT change, NULL, rollout_id, body FROM rollouts WHERE change > ? AND status <> '{DAMAGED}'"
_RUN_CHANGES = "SELECT change, key, NULL, body FROM rows WHERE change > ?"


class SQLiteLink(Link):
    """A connection within a transaction."""

    def __init__(self, db: sqlite3.Connection) -> None:
        super().__init__(db, SQLITE, _render)


class SQLiteTx(SqlTx):
    """One script's view of the file. Spans and records of runs are written immediately, because the table shows which
    ones are new."""

    def changes(self, after: str, limit: int) -> tuple[list[Record | RunRow], str]:
        cursor = read_cursor(after, int(self.last_change()))
        rows = [
            row
            for query in (_CHANGES, _RUN_CHANGES)
            for row in self._link.fetch(f"{query} ORDER BY change LIMIT ?", (cursor, limit))
        ]
        rows = sorted(rows, key=lambda row: row[0])[:limit]
        return self._changed(row[1:] for row in rows), str(rows[-1][0] if rows else cursor)

    def last_change(self) -> str:
        return str(self._link.fetch("SELECT value FROM counters WHERE name = 'change'")[0][0])

    def add_spans(self, spans: Sequence[Span]) -> list[int]:
        if None in self._writes.records.values():
            self._send_early()
        self._mark()
        sizes: list[int] = []
        for span in spans:
            body = _encode(span)
            added = self._link.send(_ADD_SPAN, (span.rollout_id, span.attempt_id, span.span_id, body))
            sizes.append(len(body) if added.rowcount == 1 else 0)
        return sizes

    def add_run_records(self, run_id: str, records: Sequence[NewRunRecord]) -> list[bool]:
        self._mark()
        return [
            self._link.send(_ADD_RUN_RECORD, (run_id, *record[:3], len(record.body), record.body)).rowcount == 1
            for record in records
        ]
