"""The records of runs as SQL over one PostgreSQL connection, inside a transaction that the caller opened."""

from __future__ import annotations

from collections.abc import Sequence

from agentlightning.store.postgres.link import Link
from agentlightning.store.rules.query import FoundRecords, RecordPlan
from agentlightning.store.rules.tx import NewRunRecord
from agentlightning.types import RecordKind

_OF_RUN = "FROM agl_run_records WHERE partition = %s AND run_id = %s"
_ADD = (
    "INSERT INTO agl_run_records (partition, run_id, kind, step, name, size, body) SELECT %s, %s, * FROM"
    " unnest(%s::text[], %s::bigint[], %s::text[], %s::bigint[], %b::bytea[]) ON CONFLICT DO NOTHING"
    " RETURNING kind, step, name"
)

_IN_ORDER = ("SET LOCAL enable_bitmapscan = off", "SET LOCAL enable_sort = off")
"""Without statistics of a table that has just grown, the server would sort the records of the whole run for a page."""


def add(link: Link, partition: str, run_id: str, records: Sequence[NewRunRecord]) -> list[bool]:
    """Store records that are not there yet; say for each if it was new."""
    if not records:
        return []
    kinds, steps, names, bodies = (list(column) for column in zip(*records, strict=True))
    added = set(link.fetch(_ADD, (partition, run_id, kinds, steps, names, list(map(len, bodies)), bodies)))
    new: list[bool] = []
    for record in records:
        new.append(record[:3] in added)
        added.discard(record[:3])  # the next one of the same place was not
    return new


def find(link: Link, partition: str, plan: RecordPlan) -> FoundRecords:
    """Return one page of records."""
    where, values = _OF_RUN, list[object]([partition, plan.run_id])
    for test, value in (("step >= %s", plan.step_from), ("step <= %s", plan.step_to), ("name = %s", plan.name)):
        if value is not None:
            where += f" AND {test}"
            values.append(value)
    if plan.kind_in is not None and len(plan.kind_in) == 1:  # one value keeps the order of the index
        where += " AND kind = %s"
        values.append(plan.kind_in[0])
    elif plan.kind_in is not None:
        where += " AND kind = ANY(%s::text[])"
        values.append(list(plan.kind_in))
    total = plan.total
    if total is None:
        total = int(link.fetch(f"SELECT count(*) {where}", values, once=True)[0][0])
    if plan.after is not None:
        where += f" AND (step, number) {'<' if plan.descending else '>'} (%s, %s)"
        values.extend(plan.after)
    skip, count, backwards = plan.window(total)
    if not count:
        return FoundRecords([], total, None)
    way = "DESC" if backwards else "ASC"
    page = f"SELECT step, number, size {where} ORDER BY step {way}, number {way} LIMIT %s OFFSET %s"
    for setting in _IN_ORDER:
        link.send(setting)
    found = link.fetch(page, (*values, count, skip), once=True)
    found = found if backwards == plan.descending else found[::-1]
    places = [(step, number) for step, number, _ in found]
    taken = plan.cut(size for *_, size in found)
    numbers = [number for _, number in places[:taken]]
    bodies = dict(
        link.fetch(
            "SELECT number, body FROM agl_run_records WHERE partition = %s AND number = ANY(%s::bigint[])",
            (partition, numbers),
        )
    )
    return FoundRecords([bodies[number] for number in numbers], total, plan.ends_at(places, taken, total))


def drop(link: Link, partition: str, run_id: str, after_step: int) -> int:
    """Remove the records of a run with a greater step; returns how many."""
    cursor = link.send(f"DELETE {_OF_RUN} AND step > %s", (partition, run_id, after_step))
    link.sync()
    return cursor.rowcount


def counts(link: Link, partition: str, run_id: str) -> dict[RecordKind, tuple[int, int]]:
    """Return for each kind of record of a run how many there are, and the greatest step."""
    found = link.fetch(f"SELECT kind, count(*), max(step) {_OF_RUN} GROUP BY kind", (partition, run_id))
    return {kind: (count, step) for kind, count, step in found}
