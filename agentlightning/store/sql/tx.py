"""The primitives of a script as SQL over one connection, inside a transaction that the caller opened.

The writes of a script are sent together after it has succeeded, so that there is nothing to undo if it raises. Only a
script that reads a list after a write sends its writes early, after a savepoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from agentlightning.errors import DamagedRecordError
from agentlightning.store.rules.durable import (
    DAMAGED,
    behind_place,
    last_place,
    page_of_records,
    read_record,
    read_row_or_none,
    readable_records,
    readable_rows,
)
from agentlightning.store.rules.lifecycle import ROLLOUT_STATUSES
from agentlightning.store.rules.query import FoundRecords, Plan, RecordPlan
from agentlightning.store.rules.tx import HEAD, Choice, Counts, Found, Kind, Notes, Record, Row, RunRow, Tx
from agentlightning.store.sql import summaries
from agentlightning.store.sql.dialect import Columns, Condition, Dialect, of_run
from agentlightning.store.sql.link import Link
from agentlightning.store.sql.writes import Seen, Writes
from agentlightning.store.summaries.aggregate import AggregatePlan
from agentlightning.store.summaries.plan import SummaryPlan
from agentlightning.types import RecordKind, RolloutAggregate, SummaryPage

_MOST = 2**62
"""Largest limit and offset that a database accepts."""
LOAD = "SELECT body FROM @rollouts WHERE @here AND rollout_id = ?"
GET = "SELECT @seen_version, body FROM @rows WHERE @here AND kind = ? AND key = ?"
DUE = (
    "SELECT body, rollout_id FROM @rollouts WHERE @here AND deadline IS NOT NULL AND deadline < ?"
    " ORDER BY deadline LIMIT ?"
)
HELD = "SELECT rollout_id, @attempt_id FROM @rollouts WHERE @here AND worker_id = ? ORDER BY number DESC LIMIT ?"
SCAN = "SELECT key, body, @seen_version FROM @rows WHERE @here AND kind = ? ORDER BY number LIMIT ?"
_OF_RUN = "FROM @run_records WHERE @here AND run_id = ?"
_SET_ASIDE = (
    f"UPDATE @rollouts SET status = '{DAMAGED}', available_at = NULL, deadline = NULL, worker_id = NULL"
    " WHERE @here AND rollout_id = ?"
)


def claim_query(run_id: str | None) -> Condition:
    """Return the query for the next record to claim, and its values before the time."""
    run, values = of_run(run_id)
    return (
        f"SELECT body, rollout_id FROM @rollouts WHERE @here AND available_at IS NOT NULL AND {run}"
        " AND available_at <= ? ORDER BY run_id, priority DESC, available_at, number LIMIT 1@lock"
    ), values


class SqlTx(Tx):
    """One script's view of a store. `seen` is the writing transaction of the script; None for a read-only script, which
    has a snapshot."""

    def __init__(self, link: Link, seen: Seen | None = None) -> None:
        self.notes = Notes()
        self._link = link
        self._writing = seen is not None
        self._seen = Seen() if seen is None else seen
        self._writes = Writes(link, self._seen)
        self._savepoint = False

    # --- records -----------------------------------------------------------------------------------------------------

    def load(self, rollout_id: str) -> Record | None:
        for records in (self._writes.records, self._seen.records):
            if rollout_id in records:
                record = records[rollout_id]
                return None if record is None else record.copy()
        rows = self._fetch_one(LOAD, (rollout_id,), lock=True)
        record = read_record(rows[0][0], rollout_id) if rows else None
        self._seen.records[rollout_id] = record
        return None if record is None else record.copy()

    def save(self, record: Record) -> None:
        assert self._writing, "a reading script saves nothing"
        rollout_id = record.rollout.rollout_id
        if self._writes.records.get(rollout_id, record) is None:
            self._send_early()  # it was deleted, and its spans with it
        self._writes.records.pop(rollout_id, None)  # the last saved record is the last of the changes
        self._writes.records[rollout_id] = record.copy()

    def delete(self, rollout_id: str) -> bool:
        try:
            there = self.load(rollout_id) is not None
        except DamagedRecordError:
            there = True
        if there:
            self._writes.records[rollout_id] = None
        return there

    def claim(self, run_id: str | None, now: float) -> Record | None:
        if self._writes.records:  # so that the table shows what is claimed already
            self._mark()
            self._writes.send_records()
        query, values = claim_query(run_id)
        while True:
            rows = self._link.fetch(query, (*values, now))
            if not rows:
                return None
            if records := self._own(rows):
                return records[0]

    def set_aside(self, rollout_id: str) -> None:
        summaries.remove(self._link, rollout_id)
        self._link.send(_SET_ASIDE, (rollout_id,))

    def next_available(self, run_id: str | None) -> float | None:
        self._send_early()
        run, values = of_run(run_id)
        query = f"SELECT min(available_at) FROM @rollouts WHERE @here AND {run} AND available_at IS NOT NULL"
        return self._link.fetch(query, values)[0][0]

    def due(self, now: float, limit: int) -> list[Record]:
        self._send_early()
        return self._own(self._link.fetch(f"{DUE}@lock" if self._writing else DUE, (now, limit)))

    def held(self, worker_id: str, limit: int) -> list[tuple[str, str]]:
        written = self._writes.records
        if any(record is not None and record.holder == worker_id for record in written.values()):
            self._send_early()  # so that the table shows which of them are the newest
            written = {}
        rows = self._link.fetch(HELD, (worker_id, limit + len(written)))
        return [(rollout_id, attempt_id) for rollout_id, attempt_id in rows if rollout_id not in written][:limit]

    def any_held(self) -> bool:
        return bool(self._link.fetch("SELECT 1 FROM @rollouts WHERE @here AND worker_id IS NOT NULL LIMIT 1"))

    def find(self, plan: Plan) -> Found:
        dialect = self._link.dialect
        where, values = _where(plan, dialect)
        if plan.sort_by not in (None, "start_time", "end_time"):
            rows = self._link.fetch(
                f"SELECT body, rollout_id, number FROM @rollouts{where} ORDER BY number", values, once=True
            )
            return page_of_records(self._readable(rows), {rollout_id: number for _, rollout_id, number in rows}, plan)
        direction = "DESC" if plan.descending else "ASC"
        run = "" if plan.run_id is None else f"run_id {direction}, "  # the same for all; the index begins with it
        order = "number" if plan.sort_by is None else f"{run}{plan.sort_by} {direction}, number"
        if plan.limit == -1 and not plan.offset and plan.after is None:
            query = f"SELECT body, rollout_id FROM @rollouts{where} ORDER BY {order}"
            records = self._readable(self._link.fetch(query, values, once=True))
            return Found(records, len(records))
        total = plan.total
        if total is None:
            total = int(self._link.fetch(f"SELECT count(*) FROM @rollouts{where}", values, once=True)[0][0])
        if not plan.limit:
            return Found([], total)
        behind, of_place = behind_place(plan, "?")
        every = (plan.ids, plan.id_contains, plan.ended_before) == (None, None, None)
        if dialect.by_status and plan.sort_by == "start_time" and every:
            # as many rows as the page may need are taken of each status
            statuses = ROLLOUT_STATUSES if plan.status_in is None else tuple(dict.fromkeys(plan.status_in)) or ("",)
            test, of_plan = ("true", ()) if plan.run_id is None else of_run(plan.run_id[0])
            needed = _MOST if plan.limit == -1 else min(plan.offset + plan.one_more, _MOST)
            values = [value for status in statuses for value in (status, *of_plan, *of_place, needed)]
            first = (
                f"SELECT number{run and ', run_id'}, start_time FROM @rollouts"
                f" WHERE @here AND status = ? AND {test}{behind} ORDER BY {order} LIMIT ?"
            )
            chosen = f"({' UNION ALL '.join([f'SELECT * FROM ({first})'] * len(statuses))})"
        else:
            chosen, values = f"@rollouts{where}{behind}", [*values, *of_place]
        # the bodies are fetched for the page only, not sorted with the rest
        numbers = f"SELECT number FROM {chosen} ORDER BY {order} LIMIT ? OFFSET ?"
        columns = f"body, rollout_id, {plan.sort_by or 'NULL'}, number"
        query = f"SELECT {columns} FROM @rollouts WHERE @here AND number IN ({numbers}) ORDER BY {order}"
        most = _MOST if plan.limit == -1 else min(plan.one_more, _MOST)
        rows = self._link.fetch(query, (*values, most, min(plan.offset, _MOST)), once=True)
        page = rows if plan.limit == -1 else rows[: plan.limit]
        return Found(self._readable(page), total, last_place(page) if len(page) < len(rows) else None)

    def find_summaries(self, plan: SummaryPlan) -> SummaryPage:
        return summaries.find(self._link, plan)

    def aggregate(self, plan: AggregatePlan) -> RolloutAggregate:
        return summaries.aggregate(self._link, plan)

    def runs(self) -> list[str | None]:
        self._send_early()
        return [row[0] for row in self._link.fetch("SELECT DISTINCT run_id FROM @rollouts WHERE @here")]

    def counts(self, run_id: tuple[str | None] | None = None) -> Counts:
        self._send_early()
        run, values = ("true", ()) if run_id is None else of_run(run_id[0])
        sums = ", ".join(f"CAST(sum({column}) AS bigint)" for column in ("attempts", "span_count", "span_bytes"))
        rows = self._link.fetch(f"SELECT count(*), {sums} FROM @rollouts WHERE @here AND {run}", values)
        return Counts(*(number or 0 for number in rows[0]))

    def _readable(self, rows: Iterable[Columns]) -> list[Record]:
        """Return the readable records of rows (body, rollout id). The others are set aside; if this script is
        read-only, by the next writing script."""
        return readable_records(rows, self.set_aside if self._writing else self.notes.damaged.append)

    def _own(self, rows: Sequence[Columns]) -> list[Record]:
        """Return the readable records. No other transaction changes them."""
        records = self._readable(rows)
        if self._writing and records:
            self._seen.locked = True
            self._seen.records.update((record.rollout.rollout_id, record.copy()) for record in records)
        return records

    def _changed(self, rows: Iterable[Columns]) -> list[Record | RunRow]:
        """Return the readable values of changed rows: (run id, None, body) or (None, rollout id, body)."""
        changed: list[Record | RunRow] = []
        for run_id, rollout_id, body in rows:
            if rollout_id is None:
                changed += [cast("RunRow", row) for _, row in readable_rows("run", [(run_id, body)])]
            else:
                changed += self._readable([(body, rollout_id)])
        return changed

    # --- spans and records of runs -----------------------------------------------------------------------------------

    def span_bodies(
        self, rollout_id: str, attempt_id: str | None, span_id: str | None = None, choose: Choice | None = None
    ) -> Sequence[bytes]:
        self._send_early()
        where, values = "@here AND rollout_id = ?", [rollout_id]
        for column, value in (("attempt_id", attempt_id), ("span_id", span_id)):
            if value is not None:
                where += f" AND {column} = ?"
                values.append(value)
        if choose is None:
            rows = self._link.fetch(f"SELECT body FROM @spans WHERE {where} ORDER BY number", values)
            return [row[0] for row in rows]
        heads = f"SELECT number, substr(body, 1, {HEAD}) FROM @spans WHERE {where} ORDER BY number"
        entries = self._link.fetch(heads, values)
        numbers = [entries[place][0] for place in choose([head for _, head in entries])]
        test, chosen = self._link.dialect.one_of("number", numbers)
        query = f"SELECT number, body FROM @spans WHERE @here AND @unindexed rollout_id = ? AND {test}"
        bodies = dict(self._link.fetch(query, (rollout_id, *chosen)))
        return [bodies[number] for number in numbers if number in bodies]  # some may have been removed just now

    def find_run_records(self, plan: RecordPlan) -> FoundRecords:
        link = self._link
        where, values = _OF_RUN, list[object]([plan.run_id])
        for test, value in (("step >= ?", plan.step_from), ("step <= ?", plan.step_to), ("name = ?", plan.name)):
            if value is not None:
                where += f" AND {test}"
                values.append(value)
        if plan.kind_in is not None:
            test, of_kind = link.dialect.one_of("kind", plan.kind_in)
            where += f" AND {test}"
            values.extend(of_kind)
        total = plan.total
        if total is None:
            total = int(link.fetch(f"SELECT count(*) {where}", values, once=True)[0][0])
        if plan.after is not None:
            where += f" AND (step, number) {'<' if plan.descending else '>'} (?, ?)"
            values.extend(plan.after)
        skip, count, backwards = plan.window(total)
        if not count:
            return FoundRecords([], total, None)
        way = "DESC" if backwards else "ASC"
        page = f"SELECT step, number, size {where} ORDER BY step {way}, number {way} LIMIT ? OFFSET ?"
        for setting in link.dialect.in_order:
            link.send(setting)
        rows = link.fetch(page, (*values, count, skip), once=True)
        rows = rows if backwards == plan.descending else rows[::-1]
        places = [(step, number) for step, number, _ in rows]
        length = plan.cut(size for *_, size in rows)
        numbers = [number for _, number in places[:length]]
        test, chosen = link.dialect.one_of("number", numbers)
        bodies = dict(link.fetch(f"SELECT number, body FROM @run_records WHERE @here AND {test}", chosen))
        return FoundRecords([bodies[number] for number in numbers], total, plan.ends_at(places, length, total))

    def drop_run_records(self, run_id: str, after_step: int) -> int:
        self._mark()
        sent = self._link.send(f"DELETE {_OF_RUN} AND step > ?", (run_id, after_step))
        self._link.sync()
        return sent.rowcount

    def count_run_records(self, run_id: str) -> dict[RecordKind, tuple[int, int]]:
        rows = self._link.fetch(f"SELECT kind, count(*), max(step) {_OF_RUN} GROUP BY kind", (run_id,))
        return {kind: (count, step) for kind, count, step in rows}

    # --- rows --------------------------------------------------------------------------------------------------------

    def get(self, kind: Kind, key: str) -> Row | None:
        if (kind, key) in self._writes.rows:
            return self._writes.rows[kind, key]
        if (kind, key) not in self._seen.rows:
            rows = self._fetch_one(GET, (kind, key), lock=kind in ("worker", "run"))
            row = read_row_or_none(kind, key, rows[0][1]) if rows else None
            if rows and row is None:
                return None  # and written whatever its version
            self._seen.rows[kind, key] = None if row is None else (rows[0][0], row)
        entry = self._seen.rows[kind, key]
        return None if entry is None else entry[1]

    def put(self, kind: Kind, key: str, row: Row) -> None:
        assert self._writing, "a reading script puts nothing"
        self._writes.rows[kind, key] = row

    def drop(self, kind: Kind, key: str) -> None:
        assert self._writing, "a reading script drops nothing"
        self._writes.rows[kind, key] = None

    def scan(self, kind: Kind, limit: int | None = None) -> list[tuple[str, Row]]:
        self._send_early()
        rows = self._link.fetch(SCAN, (kind, _MOST if limit is None else limit))
        readable = readable_rows(kind, (row[:2] for row in rows))
        versions = {key: version for key, _, version in rows}
        self._seen.rows.update(((kind, key), (versions[key], row)) for key, row in readable)
        return readable

    def count_rows(self, kind: Kind) -> int:
        self._send_early()
        return self._link.fetch("SELECT count(*) FROM @rows WHERE @here AND kind = ?", (kind,))[0][0]

    def _fetch_one(self, query: str, values: tuple[str, ...], *, lock: bool) -> list[Columns]:
        """Fetch at most one row. With `lock`, a writing script locks it."""
        return self._link.fetch(query, values)

    # --- the end of the script ---------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Send the writes of the script."""
        if self._savepoint:
            self._link.send("RELEASE SAVEPOINT script")
        self._send()

    def undo(self) -> None:
        """Undo the writes of a script that raised."""
        if self._savepoint:
            self._link.send_rollback("ROLLBACK TO SAVEPOINT script")
            self._link.send("RELEASE SAVEPOINT script")
            self._seen.forget()

    def _send_early(self) -> None:
        """Send the writes so far, so that the next statement sees them. They can be undone."""
        if self._unsent:
            self._mark()
            self._send()

    def _send(self) -> None:
        self._writes.send()

    @property
    def _unsent(self) -> bool:
        return bool(self._writes)

    def _mark(self) -> None:
        """Set the savepoint to which the script can be undone."""
        if not self._savepoint:
            self._link.send("SAVEPOINT script")
            self._savepoint = True


def _where(plan: Plan, dialect: Dialect) -> tuple[str, list[object]]:
    """Return the WHERE clause of a plan and its values."""
    tests: list[Condition] = []
    by_id = plan.ids is not None and not plan.any_of
    for column, choice in (("@unindexed status" if by_id else "status", plan.status_in), ("rollout_id", plan.ids)):
        if choice is not None:
            tests.append(dialect.one_of(column, choice))
    if plan.id_contains is not None:
        tests.append(("@instr(rollout_id, ?) > 0", (plan.id_contains,)))
    clauses, values = ["@here"], [value for _, of_test in tests for value in of_test]
    if tests:
        clauses.append("(" + (" OR " if plan.any_of else " AND ").join(test for test, _ in tests) + ")")
    if plan.status_in is None or plan.any_of:
        clauses.append("@readable")
    if plan.run_id is not None:
        run, of_plan = of_run(plan.run_id[0])
        clauses.append(run)
        values.extend(of_plan)
    if plan.ended_before is not None:
        clauses.append("end_time < ?")
        values.append(plan.ended_before)
    return " WHERE " + " AND ".join(clauses), values
