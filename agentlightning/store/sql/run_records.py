"""The records of runs, except their insertion."""

from __future__ import annotations

from agentlightning.store.rules.query import FoundRecords, RecordPlan
from agentlightning.store.sql.link import Link
from agentlightning.types import RecordKind

_OF_RUN = "FROM @run_records WHERE @here AND run_id = ?"


def find(link: Link, plan: RecordPlan) -> FoundRecords:
    """Return one page of records."""
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


def drop(link: Link, run_id: str, after_step: int) -> int:
    """Remove the records of a run with a greater step; return the number removed."""
    sent = link.send(f"DELETE {_OF_RUN} AND step > ?", (run_id, after_step))
    link.sync()
    return sent.rowcount


def counts(link: Link, run_id: str) -> dict[RecordKind, tuple[int, int]]:
    """Return the number of records and the greatest step of each kind of record of a run."""
    rows = link.fetch(f"SELECT kind, count(*), max(step) {_OF_RUN} GROUP BY kind", (run_id,))
    return {kind: (count, step) for kind, count, step in rows}
