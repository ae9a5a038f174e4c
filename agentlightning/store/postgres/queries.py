"""What the store asks of its tables: the texts of the queries, plans as WHERE and ORDER BY, cursors of the changes."""

from __future__ import annotations

import re
from functools import cache

from agentlightning.errors import BadRequestError
from agentlightning.store.postgres.link import Columns
from agentlightning.store.rules.durable import DAMAGED
from agentlightning.store.rules.query import Plan

LOAD = "SELECT body FROM agl_rollouts WHERE partition = %s AND rollout_id = %s"
GET = "SELECT version, body FROM agl_rows WHERE partition = %s AND kind = %s AND key = %s"


@cache
def locking_if_free(query: str) -> str:
    """Return the query of one row such that it gives nulls for a row that another transaction has locked. Takes the
    values of the query twice."""
    columns, _, rest = query.removeprefix("SELECT ").partition(" FROM ")
    nulls = ", ".join("NULL" for _ in columns.split(", "))
    return (
        f"WITH free AS ({query} FOR UPDATE SKIP LOCKED) SELECT {columns} FROM free"
        f" UNION ALL SELECT {nulls} FROM {rest} AND NOT EXISTS (SELECT FROM free)"
    )


KNOWN_SPANS = (
    "SELECT attempt_id, span_id FROM agl_spans WHERE partition = %s AND rollout_id = %s"
    " AND attempt_id = ANY(%s::text[]) AND span_id = ANY(%s::text[])"
)
DUE = "SELECT body, rollout_id FROM agl_rollouts WHERE partition = %s AND deadline < %s ORDER BY deadline LIMIT %s"
HELD = (
    "SELECT rollout_id, attempt_id FROM agl_rollouts WHERE partition = %s AND worker_id = %s"
    " AND rollout_id <> ALL(%s::text[]) ORDER BY number DESC LIMIT %s"
)
CHANGES = (
    "SELECT change < pg_snapshot_xmin(pg_current_snapshot()), change::text AS digits, number, body, rollout_id"
    f" FROM agl_rollouts WHERE partition = %s AND status <> '{DAMAGED}' AND (change, number) > (%s::xid8, %s)"
    " ORDER BY change, number LIMIT %s"
)
"""The first column says whether every transaction that began earlier has ended."""
RUN_NUMBER = 10**17
"""Stands for the number of a run's row in cursors: within a transaction the runs come last, all together."""
RUN_CHANGES = (
    f"SELECT change < pg_snapshot_xmin(pg_current_snapshot()), change::text AS digits, {RUN_NUMBER}::bigint, body, key"
    " FROM agl_rows WHERE partition = %s AND change >= %s::xid8 AND (change > %s::xid8 OR %s)"
    " ORDER BY change FETCH FIRST %s ROWS WITH TIES"
)
SET_ASIDE = (
    f"UPDATE agl_rollouts SET status = '{DAMAGED}', available_at = NULL, deadline = NULL, worker_id = NULL"
    " WHERE partition = %s AND rollout_id = %s"
)
SCAN = "SELECT key, version, body FROM agl_rows WHERE partition = %s AND kind = %s ORDER BY number LIMIT %s"


def of_run(run_id: str | None) -> tuple[str, tuple[str, ...]]:
    """Return the test for a run and its values, such that an index serves it."""
    return ("run_id IS NULL", ()) if run_id is None else ("run_id = %s", (run_id,))


def claim(run_id: str | None) -> tuple[str, tuple[str, ...]]:
    """Return the query of the record to be claimed next and its values between the partition and the moment."""
    run, values = of_run(run_id)
    return (
        f"SELECT body, rollout_id FROM agl_rollouts WHERE partition = %s AND {run} AND available_at <= %s"
        " AND rollout_id <> ALL(%s::text[])"
        " ORDER BY run_id, priority DESC, available_at, number LIMIT 1 FOR UPDATE SKIP LOCKED"
    ), values


def where(partition: str, plan: Plan) -> tuple[str, list[object]]:
    """Return the WHERE clause of a plan and its values."""
    tests: list[str] = []
    values: list[object] = [partition]
    for column, wanted in (("status", plan.status_in), ("rollout_id", plan.ids)):
        if wanted is not None and len(wanted) == 1:  # one value keeps the order of the index
            tests.append(f"{column} = %s")
            values.append(wanted[0])
        elif wanted is not None:
            tests.append(f"{column} = ANY(%s::text[])")
            values.append(list(wanted))
    if plan.id_contains is not None:
        tests.append("strpos(rollout_id, %s) > 0")
        values.append(plan.id_contains)
    clauses = ["partition = %s", *(["(" + (" OR " if plan.any_of else " AND ").join(tests) + ")"] if tests else [])]
    if plan.status_in is None or plan.any_of:
        clauses.append(f"status <> '{DAMAGED}'")
    if plan.run_id is not None:
        run, run_values = of_run(plan.run_id[0])
        clauses.append(run)
        values.extend(run_values)
    if plan.ended_before is not None:
        clauses.append("end_time < %s")
        values.append(plan.ended_before)
    return " WHERE " + " AND ".join(clauses), values


def order(plan: Plan) -> str | None:
    """Return the ORDER BY clause of a plan; None if the tables do not have what it is sorted by."""
    if plan.sort_by is None:
        return " ORDER BY number"
    if plan.sort_by not in ("start_time", "end_time"):
        return None
    direction = "DESC" if plan.descending else "ASC"
    run = "" if plan.run_id is None else f"run_id {direction}, "  # the same for all; the index begins with it
    return f" ORDER BY {run}{plan.sort_by} {direction}, number"


def first_of(rows: list[Columns], limit: int) -> list[Columns]:
    """Return the first of changed rollouts and runs, and what has the place of the last one."""
    rows.sort(key=_place)
    end = limit
    while limit < len(rows) and end < len(rows) and _place(rows[end]) == _place(rows[end - 1]):
        end += 1
    return rows[:end]


def _place(row: Columns) -> tuple[int, int]:
    return int(row[1]), row[2]


def read_cursor(text: str) -> tuple[str, int]:
    """Return the transaction and the number of the row behind which a cursor is.

    Raises:
        BadRequestError: not a cursor of this store.
    """
    found = re.fullmatch(r"(\d{1,19})(?:\.(\d{1,18}))?", text, re.ASCII)
    if found is None:
        raise no_cursor(text)
    return found[1], int(found[2] or 0)


def no_cursor(text: str) -> BadRequestError:
    return BadRequestError(f"{text[:100]!r} is no cursor of this store; take it from an earlier page, or '0'")
