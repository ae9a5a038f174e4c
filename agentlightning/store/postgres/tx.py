"""The primitives of a script over one PostgreSQL connection: the differences from SQLite.

A writing script locks the records that it loads and claims. It locks the rows of workers and runs that it reads, and
writes other rows only if their version is the one that it read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from agentlightning.errors import BadRequestError
from agentlightning.store.postgres.link import Link
from agentlightning.store.rules.durable import DAMAGED
from agentlightning.store.rules.tx import NewRunRecord, Record, RunRow
from agentlightning.store.sql.dialect import Columns
from agentlightning.store.sql.tx import SqlTx
from agentlightning.store.sql.writes import Seen
from agentlightning.types import Span

_encode = Span.__pydantic_serializer__.to_json
SpanKey = tuple[str, str, str]
"""(rollout id, attempt id, span id)."""
_KNOWN_SPANS = (
    "SELECT attempt_id, span_id FROM @spans WHERE @here AND rollout_id = ?"
    " AND attempt_id = ANY(?::text[]) AND span_id = ANY(?::text[])"
)
_ADD_SPANS = (
    "INSERT INTO @spans (partition, rollout_id, attempt_id, span_id, body) SELECT @own, * FROM"
    " unnest(?::text[], ?::text[], ?::text[], %b::bytea[]) ON CONFLICT DO NOTHING"
)
_ADD_RUN_RECORDS = (
    "INSERT INTO @run_records (partition, run_id, kind, step, name, size, body) SELECT @own, ?, * FROM"
    " unnest(?::text[], ?::bigint[], ?::text[], ?::bigint[], %b::bytea[]) ON CONFLICT DO NOTHING"
    " RETURNING kind, step, name"
)
_CHANGES = (
    "SELECT change < pg_snapshot_xmin(pg_current_snapshot()), change::text AS digits, number, body, rollout_id"
    f" FROM @rollouts WHERE @here AND status <> '{DAMAGED}' AND (change, number) > (?::xid8, ?)"
    " ORDER BY change, number LIMIT ?"
)
"""The first column is true if all transactions that began earlier have ended."""
_RUN_NUMBER = 10**17
"""Replaces the number of a run's row in cursors. Within a transaction, all runs come last."""
_RUN_CHANGES = (
    f"SELECT change < pg_snapshot_xmin(pg_current_snapshot()), change::text AS digits, {_RUN_NUMBER}::bigint, body, key"
    " FROM @rows WHERE @here AND change >= ?::xid8 AND (change > ?::xid8 OR ?)"
    " ORDER BY change FETCH FIRST ? ROWS WITH TIES"
)


class LockedError(Exception):
    """Raised if another transaction has locked a row that the script needs. The script must be run again."""


class PostgresTx(SqlTx):
    """One script's view of a partition.

    A script waits for a lock only while its transaction holds no locks, so that there are no deadlocks. It assumes that
    its spans are new. A `careful` script waits for every lock, and looks up its spans.
    """

    def __init__(self, link: Link, seen: Seen | None = None, *, careful: bool = False) -> None:
        super().__init__(link, seen)
        self.held_back = False
        """True if there are changes that cannot be reported yet, because an earlier transaction is in progress."""
        self._careful = careful
        self._spans: dict[SpanKey, bytes] = {}

    def delete(self, rollout_id: str) -> bool:
        there = super().delete(rollout_id)
        if there:
            self._spans = {key: body for key, body in self._spans.items() if key[0] != rollout_id}
        return there

    def changes(self, after: str, limit: int) -> tuple[list[Record | RunRow], str]:
        change, number = _read_cursor(after)
        changes = self._link.fetch(_CHANGES, (change, number, limit))
        runs_done = number >= _RUN_NUMBER
        changes += self._link.fetch(_RUN_CHANGES, (change, change, not runs_done, limit))
        rows = _first_of(changes, limit)
        settled = [row for row in rows if row[0]]
        self.held_back = len(settled) < len(rows)
        if settled:
            change, number = settled[-1][1:3]
        elif not rows:  # a cursor in the future, as one of another database may be, would never see a change
            query = "SELECT ?::xid8 > pg_snapshot_xmax(pg_current_snapshot())"
            if self._link.fetch(query, (change,))[0][0]:
                raise _no_cursor(after)
        rows = [(key, None, body) if place == _RUN_NUMBER else (None, key, body) for _, _, place, body, key in settled]
        return self._changed(rows), f"{change}.{number}"

    def last_change(self) -> str:
        return self._link.fetch("SELECT pg_snapshot_xmin(pg_current_snapshot())::text")[0][0] + ".0"

    def add_spans(self, spans: Sequence[Span]) -> list[int]:
        present: set[SpanKey] = set(self._spans)
        if self._careful:
            lookups: dict[str, tuple[set[str], set[str]]] = {}
            for span in spans:
                attempt_ids, span_ids = lookups.setdefault(span.rollout_id, (set(), set()))
                attempt_ids.add(span.attempt_id)
                span_ids.add(span.span_id)
            for rollout_id, (attempt_ids, span_ids) in lookups.items():  # finds those that are stored, perhaps others
                values = (rollout_id, list(attempt_ids), list(span_ids))
                rows = self._link.fetch(_KNOWN_SPANS, values)
                present.update((rollout_id, attempt_id, span_id) for attempt_id, span_id in rows)
        sizes: list[int] = []
        for span in spans:
            key = (span.rollout_id, span.attempt_id, span.span_id)
            if key in present:
                sizes.append(0)
                continue
            present.add(key)
            body = self._spans[key] = _encode(span)
            sizes.append(len(body))
        return sizes

    def add_run_records(self, run_id: str, records: Sequence[NewRunRecord]) -> list[bool]:
        self._mark()
        if not records:
            return []
        kinds, steps, names, bodies = (list(column) for column in zip(*records, strict=True))
        values = (run_id, kinds, steps, names, list(map(len, bodies)), bodies)
        added = set(self._link.fetch(_ADD_RUN_RECORDS, values))
        new: list[bool] = []
        for record in records:
            new.append(record[:3] in added)
            added.discard(record[:3])  # the next one of the same place was not
        return new

    def _fetch_one(self, query: str, values: tuple[str, ...], *, lock: bool) -> list[Columns]:
        """Fetch at most one row, locked in a writing script.

        Raises:
            LockedError: another transaction has locked it, and this one must not wait.
        """
        if not (self._writing and lock):
            return self._link.fetch(query, values)
        if self._careful or not self._seen.locked:
            rows = self._link.fetch(f"{query} FOR UPDATE", values)
        else:
            rows = self._link.fetch(_locking_if_free(query), values + values)
            if rows and rows[0][-1] is None:
                raise LockedError
        self._seen.locked = self._seen.locked or bool(rows)
        return rows

    # --- the end of the script ---------------------------------------------------------------------------------------

    @property
    def lost_a_race(self) -> bool:
        """True if another transaction changed data that the script read. Valid after the next `sync` of the link."""
        return self._writes.lost_a_race

    def _send(self) -> None:
        self._writes.send_records()
        if self._spans:
            columns = [list(column) for column in zip(*self._spans, strict=True)]
            self._seen.locked = True
            self._writes.checked(_ADD_SPANS, (*columns, list(self._spans.values())), expected=len(self._spans))
            self._spans = {}
        self._writes.send()

    @property
    def _unsent(self) -> bool:
        return bool(self._spans) or bool(self._writes)


@cache
def _locking_if_free(query: str) -> str:
    """Return a query for one row. It returns nulls if another transaction has locked the row, and needs the values of
    the query twice."""
    columns, _, rest = query.removeprefix("SELECT ").partition(" FROM ")
    nulls = ", ".join("NULL" for _ in columns.split(", "))
    return (
        f"WITH free AS ({query} FOR UPDATE SKIP LOCKED) SELECT {columns} FROM free"
        f" UNION ALL SELECT {nulls} FROM {rest} AND NOT EXISTS (SELECT FROM free)"
    )


def _first_of(rows: list[Columns], limit: int) -> list[Columns]:
    """Return the first changed rollouts and runs, including all with the same position as the last one."""
    rows.sort(key=_place)
    end = limit
    while limit < len(rows) and end < len(rows) and _place(rows[end]) == _place(rows[end - 1]):
        end += 1
    return rows[:end]


def _place(row: Columns) -> tuple[int, int]:
    return int(row[1]), row[2]


def _read_cursor(text: str) -> tuple[str, int]:
    """Return the transaction and the row number in a cursor.

    Raises:
        BadRequestError: it is not a cursor of this store.
    """
    match = re.fullmatch(r"(\d{1,19})(?:\.(\d{1,18}))?", text, re.ASCII)
    if match is None:
        raise _no_cursor(text)
    return match[1], int(match[2] or 0)


def _no_cursor(text: str) -> BadRequestError:
    return BadRequestError(f"{text[:100]!r} is not a cursor of this store; use the cursor of an earlier page, or '0'")
