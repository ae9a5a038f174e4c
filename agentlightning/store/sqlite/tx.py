"""The primitives of a script as SQL over one SQLite connection, inside a transaction that the backend opened."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

from pydantic import TypeAdapter

from agentlightning.errors import DamagedRecordError
from agentlightning.store.rules.durable import (
    DAMAGED,
    INDEXED,
    behind_place,
    indexed,
    last_place,
    page_of_records,
    read_record,
    read_row_or_none,
    readable_records,
    readable_rows,
    record_type,
)
from agentlightning.store.rules.lifecycle import ROLLOUT_STATUSES
from agentlightning.store.rules.query import FoundRecords, Plan, RecordPlan, read_cursor
from agentlightning.store.rules.tx import (
    HEAD,
    Choice,
    Counts,
    Found,
    Kind,
    NewRunRecord,
    Notes,
    Record,
    Row,
    RunRow,
    row_type,
)
from agentlightning.store.sqlite import run_records, summaries
from agentlightning.store.sqlite.summaries import Told
from agentlightning.store.summaries.aggregate import AggregatePlan
from agentlightning.store.summaries.plan import SummaryPlan
from agentlightning.types import RecordKind, RolloutAggregate, Span, SummaryPage

_encode = partial(Span.__pydantic_serializer__.to_json, exclude_defaults=True)
_TEXTS: TypeAdapter[list[str]] = TypeAdapter(list[str])
_MOST = 2**62
"""The largest limit and offset that SQLite takes."""
COLUMNS = ("rollout_id", "run_id", *INDEXED)
"""What a record's row says beside its number, its change and its body."""
_INSERT = (
    f"INSERT INTO rollouts ({', '.join(COLUMNS)}, change, body) VALUES ({', '.join('?' * (len(COLUMNS) + 2))})"
    f" ON CONFLICT (rollout_id) DO UPDATE SET"
    f" {', '.join(f'{name} = excluded.{name}' for name in (*INDEXED, 'change', 'body'))}"
)


class ChangeNumbers:
    """The numbers of the changes within one transaction; `write` stores the last of them before the commit."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection
        self._last: int | None = None

    def next(self) -> int:
        """Return the number of one more change."""
        self._last = self.last() + 1
        return self._last

    def last(self) -> int:
        """Return the number of the last change."""
        if self._last is not None:
            return self._last
        return self._db.execute("SELECT value FROM counters WHERE name = 'change'").fetchone()[0]

    def write(self) -> None:
        """Store the last number, if there is a new one."""
        if self._last is not None:
            self._db.execute("UPDATE counters SET value = ? WHERE name = 'change'", (self._last,))


class SQLiteTx:
    """One script's view of the file.

    It remembers the rows that it loaded: saving one writes the columns that changed, so that the indexes over the
    others stay as they are.
    """

    def __init__(self, connection: sqlite3.Connection, changes: ChangeNumbers | None = None) -> None:
        self.notes = Notes()
        self._db = connection
        self._writing = changes is not None
        self._changes = changes or ChangeNumbers(connection)
        self._rows: dict[str, tuple[int, tuple[object, ...], Told] | None] = {}
        """Number and columns of each record that was loaded, as they are in the file, and what its summary is made of;
        None for one that is not there."""
        self._keys: set[tuple[Kind, str]] = set()
        """Other rows that are in the file."""

    def load(self, rollout_id: str) -> Record | None:
        record = self._loaded("SELECT number, body, rollout_id FROM rollouts WHERE rollout_id = ?", (rollout_id,))
        if record is None:
            self._rows[rollout_id] = None
        return record

    def _loaded(self, query: str, values: Sequence[object]) -> Record | None:
        row = self._db.execute(query, values).fetchone()
        if row is None:
            return None
        record = read_record(row[1], row[2])
        if self._writing:
            self._rows[record.rollout.rollout_id] = row[0], columns_of(record), summaries.told_of(record)
        return record

    def save(self, record: Record) -> None:
        rollout_id = record.rollout.rollout_id
        columns, change, body = columns_of(record), self._changes.next(), record_type().dump_json(record)
        known = self._rows.get(rollout_id)
        if known is None:
            added = self._db.execute(_INSERT, (*columns, change, body))
            is_new = rollout_id in self._rows
            summaries.insert(self._db, record, cast("int", added.lastrowid) if is_new else None)
            self._rows.pop(rollout_id, None)
            return
        number, before, told = known
        changed = [i for i, (old, new) in enumerate(zip(before, columns, strict=True)) if old != new]
        names = "".join(f"{COLUMNS[i]} = ?, " for i in changed)
        values = [columns[i] for i in changed]
        self._db.execute(
            f"UPDATE rollouts SET {names}change = ?, body = ? WHERE number = ?", (*values, change, body, number)
        )
        now_told = summaries.told_of(record)
        summaries.update(self._db, number, told, now_told)
        self._rows[rollout_id] = number, columns, now_told

    def delete(self, rollout_id: str) -> bool:
        self._rows.pop(rollout_id, None)
        summaries.remove(self._db, rollout_id)
        self._db.execute("DELETE FROM spans WHERE rollout_id = ?", (rollout_id,))
        return self._db.execute("DELETE FROM rollouts WHERE rollout_id = ?", (rollout_id,)).rowcount == 1

    def claim(self, run_id: str | None, now: float) -> Record | None:
        query = (
            "SELECT number, body, rollout_id FROM rollouts"
            " WHERE available_at IS NOT NULL AND run_id IS ? AND available_at <= ?"
            " ORDER BY priority DESC, available_at, number LIMIT 1"
        )
        while True:
            try:
                return self._loaded(query, (run_id, now))
            except DamagedRecordError:
                self.set_aside(self._db.execute(query, (run_id, now)).fetchone()[2])

    def set_aside(self, rollout_id: str) -> None:
        summaries.remove(self._db, rollout_id)
        self._db.execute(
            f"UPDATE rollouts SET status = '{DAMAGED}', available_at = NULL, deadline = NULL, worker_id = NULL"
            " WHERE rollout_id = ?",
            (rollout_id,),
        )

    def next_available(self, run_id: str | None) -> float | None:
        return self._db.execute(
            "SELECT min(available_at) FROM rollouts WHERE available_at IS NOT NULL AND run_id IS ?", (run_id,)
        ).fetchone()[0]

    def find(self, plan: Plan) -> Found:
        where, values = _where(plan)
        if plan.sort_by not in (None, "start_time", "end_time"):
            query = f"SELECT body, rollout_id, number FROM rollouts{where} ORDER BY number"
            rows = self._db.execute(query, tuple(values)).fetchall()
            return page_of_records(self._readable(rows), {rollout_id: number for _, rollout_id, number in rows}, plan)
        direction = "DESC" if plan.descending else "ASC"
        order = "number" if plan.sort_by is None else f"{plan.sort_by} {direction}, number"
        if plan.limit == -1 and not plan.offset and plan.after is None:
            every = self._records(f"SELECT body, rollout_id FROM rollouts{where} ORDER BY {order}", values)
            return Found(every, len(every))
        total = plan.total
        if total is None:
            total = int(self._db.execute(f"SELECT count(*) FROM rollouts{where}", values).fetchone()[0])
        if not plan.limit:
            return Found([], total)
        behind, of_place = behind_place(plan, "?")
        if plan.sort_by == "start_time" and plan.ids is None and plan.id_contains is None and plan.ended_before is None:
            # the indexes hold that order within each status only: as many rows as the page may need are taken of each
            statuses = ROLLOUT_STATUSES if plan.status_in is None else tuple(dict.fromkeys(plan.status_in)) or ("",)
            run, of_run = ("", ()) if plan.run_id is None else (" AND run_id IS ?", plan.run_id)
            needed = -1 if plan.limit == -1 else min(plan.offset + plan.one_more, _MOST)
            values = [value for status in statuses for value in (status, *of_run, *of_place, needed)]
            first = f"SELECT number, start_time FROM rollouts WHERE status = ?{run}{behind} ORDER BY {order} LIMIT ?"
            chosen = f"({' UNION ALL '.join([f'SELECT * FROM ({first})'] * len(statuses))})"
        else:
            chosen, values = f"rollouts{where}{behind}", [*values, *of_place]
        # the bodies are fetched for the page only, not sorted with the rest
        numbers = f"SELECT number FROM {chosen} ORDER BY {order} LIMIT ? OFFSET ?"
        value = plan.sort_by or "NULL"
        query = f"SELECT body, rollout_id, {value}, number FROM rollouts WHERE number IN ({numbers}) ORDER BY {order}"
        rows = self._db.execute(query, (*values, min(plan.one_more, _MOST), min(plan.offset, _MOST))).fetchall()
        page = rows if plan.limit == -1 else rows[: plan.limit]
        return Found(self._readable(page), total, last_place(page) if len(page) < len(rows) else None)

    def _records(self, query: str, values: Iterable[object]) -> list[Record]:
        return self._readable(self._db.execute(query, tuple(values)).fetchall())

    def _readable(self, rows: Iterable[Sequence[Any]]) -> list[Record]:
        """Return the records that can be read; others are set aside, by the next writing script if this one reads."""
        return readable_records(rows, self.set_aside if self._writing else self.notes.damaged.append)

    def find_summaries(self, plan: SummaryPlan) -> SummaryPage:
        return summaries.find(self._db, plan)

    def aggregate(self, plan: AggregatePlan) -> RolloutAggregate:
        return summaries.aggregate(self._db, plan)

    def runs(self) -> list[str | None]:
        return [row[0] for row in self._db.execute("SELECT DISTINCT run_id FROM rollouts")]

    def counts(self, run_id: tuple[str | None] | None = None) -> Counts:
        where, values = ("", ()) if run_id is None else (" WHERE run_id IS ?", run_id)
        query = "SELECT count(*), sum(attempts), sum(span_count), sum(span_bytes) FROM rollouts"
        return Counts(*(number or 0 for number in self._db.execute(query + where, values).fetchone()))

    def changes(self, after: str, limit: int) -> tuple[list[Record | RunRow], str]:
        cursor = read_cursor(after, self._changes.last())
        found = self._db.execute(
            "SELECT change, body, rollout_id, NULL FROM rollouts WHERE change > ?"
            f" AND status <> '{DAMAGED}' ORDER BY change LIMIT ?",
            (cursor, limit),
        ).fetchall()
        runs = "SELECT change, body, NULL, key FROM rows WHERE change > ? ORDER BY change LIMIT ?"
        found = sorted(found + self._db.execute(runs, (cursor, limit)).fetchall())[:limit]
        changed: list[Record | RunRow] = []
        for _, body, rollout_id, run_id in found:
            if run_id is None:
                changed += self._readable([(body, rollout_id)])
            else:
                changed += [cast("RunRow", row) for _, row in readable_rows("run", [(run_id, body)])]
        return changed, str(found[-1][0] if found else cursor)

    def last_change(self) -> str:
        return str(self._changes.last())

    def due(self, now: float, limit: int) -> list[Record]:
        query = "SELECT body, rollout_id FROM rollouts WHERE deadline IS NOT NULL AND deadline < ?"
        return self._records(f"{query} ORDER BY deadline LIMIT ?", (now, limit))

    def holds(self, worker_id: str) -> bool:
        return bool(self.held(worker_id, 1))

    def held(self, worker_id: str, limit: int) -> list[tuple[str, str]]:
        records = self._records(
            "SELECT body, rollout_id FROM rollouts WHERE worker_id = ? ORDER BY number DESC LIMIT ?", (worker_id, limit)
        )
        return [(record.rollout.rollout_id, record.attempts[-1].attempt_id) for record in records]

    def any_held(self) -> bool:
        query = "SELECT 1 FROM rollouts WHERE worker_id IS NOT NULL LIMIT 1"
        return self._db.execute(query).fetchone() is not None

    def add_spans(self, spans: Sequence[Span]) -> list[int]:
        statement = "INSERT OR IGNORE INTO spans (rollout_id, attempt_id, span_id, body) VALUES (?, ?, ?, ?)"
        sizes: list[int] = []
        for span in spans:
            body = _encode(span)
            key = (span.rollout_id, span.attempt_id, span.span_id)
            sizes.append(len(body) if self._db.execute(statement, (*key, body)).rowcount == 1 else 0)
        return sizes

    def span_bodies(
        self, rollout_id: str, attempt_id: str | None, span_id: str | None = None, choose: Choice | None = None
    ) -> Sequence[bytes]:
        where, values = "rollout_id = ?", [rollout_id]
        for column, wanted in (("attempt_id", attempt_id), ("span_id", span_id)):
            if wanted is not None:
                where += f" AND {column} = ?"
                values.append(wanted)
        if choose is None:
            return [row[0] for row in self._db.execute(f"SELECT body FROM spans WHERE {where} ORDER BY number", values)]
        heads = f"SELECT number, substr(body, 1, {HEAD}) FROM spans WHERE {where} ORDER BY number"
        found = self._db.execute(heads, values).fetchall()
        chosen = [found[place][:1] for place in choose([head for _, head in found])]
        return [self._db.execute("SELECT body FROM spans WHERE number = ?", number).fetchone()[0] for number in chosen]

    def add_run_records(self, run_id: str, records: Sequence[NewRunRecord]) -> list[bool]:
        return run_records.add(self._db, run_id, records)

    def find_run_records(self, plan: RecordPlan) -> FoundRecords:
        return run_records.find(self._db, plan)

    def drop_run_records(self, run_id: str, after_step: int) -> int:
        return run_records.drop(self._db, run_id, after_step)

    def count_run_records(self, run_id: str) -> dict[RecordKind, tuple[int, int]]:
        return run_records.counts(self._db, run_id)

    def get(self, kind: Kind, key: str) -> Row | None:
        row = self._db.execute("SELECT body FROM rows WHERE kind = ? AND key = ?", (kind, key)).fetchone()
        if row is None:
            return None
        self._keys.add((kind, key))
        return read_row_or_none(kind, key, row[0])

    def put(self, kind: Kind, key: str, row: Row) -> None:
        body, change = row_type(kind).dump_json(row), self._changes.next() if kind == "run" else None
        if (kind, key) in self._keys:
            also, values = ("", ()) if change is None else (", change = ?", (change,))
            self._db.execute(f"UPDATE rows SET body = ?{also} WHERE kind = ? AND key = ?", (body, *values, kind, key))
            return
        self._db.execute(
            "INSERT INTO rows (kind, key, change, body) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (kind, key) DO UPDATE SET change = excluded.change, body = excluded.body",
            (kind, key, change, body),
        )
        self._keys.add((kind, key))

    def drop(self, kind: Kind, key: str) -> None:
        self._keys.discard((kind, key))
        self._db.execute("DELETE FROM rows WHERE kind = ? AND key = ?", (kind, key))

    def scan(self, kind: Kind, limit: int | None = None) -> list[tuple[str, Row]]:
        query = "SELECT key, body FROM rows WHERE kind = ? ORDER BY number LIMIT ?"
        rows = self._db.execute(query, (kind, -1 if limit is None else limit))
        return readable_rows(kind, rows)

    def count_rows(self, kind: Kind) -> int:
        return self._db.execute("SELECT count(*) FROM rows WHERE kind = ?", (kind,)).fetchone()[0]


def columns_of(record: Record) -> tuple[str | float | None, ...]:
    """Return the values of `COLUMNS`."""
    return (record.rollout.rollout_id, record.rollout.run_id, *indexed(record))


def _where(plan: Plan) -> tuple[str, list[object]]:
    """Return the WHERE clause of a plan and its values."""
    clauses: list[str] = []
    tests: list[str] = []
    values: list[object] = []
    by_id = plan.ids is not None and not plan.any_of
    status = "+status" if by_id else "status"  # with the sign its index is not used, which could be long
    for column, wanted in ((status, plan.status_in), ("rollout_id", plan.ids)):
        if wanted is not None and len(wanted) == 1:  # one value keeps the order of the index
            tests.append(f"{column} = ?")
            values.append(wanted[0])
        elif wanted is not None:
            tests.append(f"{column} IN (SELECT value FROM json_each(?))")
            values.append(_TEXTS.dump_json(list(wanted)).decode())
    if plan.id_contains is not None:
        tests.append("instr(rollout_id, ?) > 0")
        values.append(plan.id_contains)
    if plan.status_in is None or plan.any_of:
        clauses = [f"+status <> '{DAMAGED}'"]
    clauses += ["(" + (" OR " if plan.any_of else " AND ").join(tests) + ")"] if tests else []
    if plan.run_id is not None:
        clauses.append("run_id IS ?")
        values.append(plan.run_id[0])
    if plan.ended_before is not None:
        clauses.append("end_time < ?")
        values.append(plan.ended_before)
    return (" WHERE " + " AND ".join(clauses) if clauses else ""), values
