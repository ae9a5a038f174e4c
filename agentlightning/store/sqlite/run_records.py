"""The records of runs as SQL over one SQLite connection, inside a transaction that the backend opened."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from agentlightning.store.rules.query import FoundRecords, RecordPlan
from agentlightning.store.rules.tx import NewRunRecord
from agentlightning.types import RecordKind

_ADD = "INSERT OR IGNORE INTO run_records (run_id, kind, step, name, size, body) VALUES (?, ?, ?, ?, ?, ?)"
_COUNT = "SELECT kind, count(*), max(step) FROM run_records WHERE run_id = ? GROUP BY kind"


def add(db: sqlite3.Connection, run_id: str, records: Sequence[NewRunRecord]) -> list[bool]:
    """Store records that are not there yet; say for each if it was new."""
    return [db.execute(_ADD, (run_id, *r[:3], len(r.body), r.body)).rowcount == 1 for r in records]


def find(db: sqlite3.Connection, plan: RecordPlan) -> FoundRecords:
    """Return one page of records."""
    tests, values = ["run_id = ?"], list[object]([plan.run_id])
    for test, value in (("step >= ?", plan.step_from), ("step <= ?", plan.step_to), ("name = ?", plan.name)):
        if value is not None:
            tests.append(test)
            values.append(value)
    if plan.kind_in is not None:
        kinds = tuple(dict.fromkeys(plan.kind_in))
        tests.append(f"kind IN ({', '.join('?' * len(kinds))})" if len(kinds) != 1 else "kind = ?")
        values.extend(kinds)
    where = " AND ".join(tests)
    total = plan.total
    if total is None:
        total = int(db.execute(f"SELECT count(*) FROM run_records WHERE {where}", values).fetchone()[0])
    if plan.after is not None:
        where += f" AND (step, number) {'<' if plan.descending else '>'} (?, ?)"
        values.extend(plan.after)
    skip, count, backwards = plan.window(total)
    if not count:
        return FoundRecords([], total, None)
    way = "DESC" if backwards else "ASC"
    page = (
        f"SELECT step, number, size FROM run_records WHERE {where} ORDER BY step {way}, number {way} LIMIT ? OFFSET ?"
    )
    found = db.execute(page, (*values, count, skip)).fetchall()
    found = found if backwards == plan.descending else found[::-1]
    places = [(step, number) for step, number, _ in found]
    taken = plan.cut(size for *_, size in found)
    bodies = (
        db.execute("SELECT body FROM run_records WHERE number = ?", (number,)).fetchone()[0]
        for _, number in places[:taken]
    )
    return FoundRecords(list(bodies), total, plan.ends_at(places, taken, total))


def drop(db: sqlite3.Connection, run_id: str, after_step: int) -> int:
    """Remove the records of a run with a greater step; returns how many."""
    return db.execute("DELETE FROM run_records WHERE run_id = ? AND step > ?", (run_id, after_step)).rowcount


def counts(db: sqlite3.Connection, run_id: str) -> dict[RecordKind, tuple[int, int]]:
    """Return for each kind of record of a run how many there are, and the greatest step."""
    return {kind: (count, step) for kind, count, step in db.execute(_COUNT, (run_id,))}
