"""Rollouts in short as SQL over one SQLite connection: a narrow row for each beside its record, its input as text,
pages of them, and figures over many.

The rows of one run stand together, in the order in which the rollouts came, so that reading all of them is reading a
few megabytes, whatever is in the records.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, cast

from agentlightning.store.rules.tx import Record
from agentlightning.store.summaries import sql
from agentlightning.store.summaries.aggregate import COLUMNS, AggregatePlan, Tally, aggregate_of, dimension_values
from agentlightning.store.summaries.facts import (
    Facts,
    facts_of,
    input_text,
    preview_of,
    searched,
    summary_of,
)
from agentlightning.store.summaries.plan import SummaryPlan
from agentlightning.store.summaries.sql import Condition, Dialect
from agentlightning.types import Attempt, Rollout, RolloutAggregate, RolloutSummary, SummaryPage

SCHEMA = """
CREATE TABLE summaries (
    run TEXT NOT NULL, number INTEGER NOT NULL, rollout_id TEXT NOT NULL, status TEXT NOT NULL, mode TEXT, step INTEGER,
    task TEXT, sample INTEGER, start_time REAL NOT NULL, end_time REAL, resources_id TEXT, resources_version INTEGER,
    attempts INTEGER NOT NULL, attempt_id TEXT, attempt_status TEXT, worker_id TEXT, outcome TEXT, outcome_reason TEXT,
    error_type TEXT, reward REAL, rewards TEXT, PRIMARY KEY (run, number)
) WITHOUT ROWID;
CREATE INDEX summaries_step ON summaries (run, step, reward, outcome, mode, start_time, end_time);
CREATE INDEX summaries_start ON summaries (start_time, number);
CREATE TABLE inputs (number INTEGER PRIMARY KEY, preview TEXT NOT NULL, searched TEXT NOT NULL)
"""
"""`run` is empty for a rollout of no run, else its id behind a `/`. `number` is that of the rollout."""
_COLUMNS = ("run", *(name for name in Facts._fields if name != "run_id"))
_RUN = Facts._fields.index("run_id")
_READ = tuple(f"s.{'run' if name == 'run_id' else name}" for name in Facts._fields)
_INSERT = (
    f"INSERT OR REPLACE INTO summaries (number, {', '.join(_COLUMNS)}) VALUES ({', '.join('?' * (len(_COLUMNS) + 1))})"
)
_INSERT_INPUT = "INSERT OR REPLACE INTO inputs (number, preview, searched) VALUES (?, ?, ?)"
_OF_ATTEMPT = itemgetter(
    *("attempt_id", "status", "worker_id", "outcome", "outcome_reason", "error", "reward", "rewards")
)
Told = tuple[Rollout, Attempt | None, int]
"""What a summary is made of: a rollout, its latest attempt and how many it has."""
_SORTED = {"duration": "s.end_time - s.start_time", "spans": "r.span_count"}


# --- writing -------------------------------------------------------------------------------------------------------


def told_of(record: Record) -> Told:
    """Return what the summary of a record is made of."""
    attempts = record.attempts
    return record.rollout, attempts[-1] if attempts else None, len(attempts)


def insert(db: sqlite3.Connection, record: Record, number: int | None = None) -> None:
    """Write the row and the input of a rollout, whose record was written before, under this number if it is known."""
    if number is None:
        query = "SELECT number FROM rollouts WHERE rollout_id = ?"
        number = cast("int", db.execute(query, (record.rollout.rollout_id,)).fetchone()[0])
    db.execute(_INSERT, (number, *columns_of(told_of(record))))
    db.execute(_INSERT_INPUT, (number, *input_of(record.rollout)))


def update(db: sqlite3.Connection, number: int, before: Told, now: Told) -> None:
    """Write what of a rollout's row and input a change of its record changed."""
    rollout, attempt, count = before
    if now[0] is rollout and now[2] == count:  # as after most spans: a sign of life is in no summary
        latest = now[1]
        if latest is attempt or (latest and attempt and _OF_ATTEMPT(latest.__dict__) == _OF_ATTEMPT(attempt.__dict__)):
            return
    old, new = columns_of(before), columns_of(now)
    if old != new:
        changed = [i for i, (was, has) in enumerate(zip(old, new, strict=True)) if was != has]
        names = ", ".join(f"{_COLUMNS[i]} = ?" for i in changed)
        values = (*(new[i] for i in changed), old[0], number)
        db.execute(f"UPDATE summaries SET {names} WHERE run = ? AND number = ?", values)
    if rollout.input is not now[0].input:
        db.execute(_INSERT_INPUT, (number, *input_of(now[0])))


def remove(db: sqlite3.Connection, rollout_id: str) -> None:
    """Remove the row and the input of a rollout, whose record is still there."""
    found = db.execute("SELECT run_id, number FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
    if found is not None:
        db.execute("DELETE FROM summaries WHERE run = ? AND number = ?", (_run(found[0]), found[1]))
        db.execute("DELETE FROM inputs WHERE number = ?", (found[1],))


def columns_of(told: Told) -> tuple[str | float | None, ...]:
    """Return the values of a rollout's row, but for its number."""
    facts = facts_of(*told)
    return (_run(facts.run_id), facts[0], *facts[2:])


def input_of(rollout: Rollout) -> tuple[str, str]:
    """Return a rollout's input as it is shown, and as it is searched."""
    text = input_text(rollout.input)
    return preview_of(text), searched(text)


def _run(run_id: str | None) -> str:
    return "" if run_id is None else f"/{run_id}"


def problems(db: sqlite3.Connection, record: Record) -> Iterator[str]:
    """Yield what the row and the input of a rollout contradict in its record."""
    rollout_id, columns = record.rollout.rollout_id, columns_of(told_of(record))
    number = "number = (SELECT number FROM rollouts WHERE rollout_id = ?)"
    query = f"SELECT {', '.join(_COLUMNS)} FROM summaries WHERE run = ? AND {number}"
    found = db.execute(query, (columns[0], rollout_id)).fetchone()
    text = db.execute(f"SELECT preview, searched FROM inputs WHERE {number}", (rollout_id,)).fetchone()
    if found is None or text is None:
        yield "it has no summary" if found is None else "its input is not searched"
        return
    for column, value, expected in zip(_COLUMNS, found, columns, strict=True):
        if value != expected:
            yield f"column {column} of its summary is {value!r}, its record says {expected!r}"
    if text != input_of(record.rollout):
        yield "what is searched of its input is not its input"


# --- reading -------------------------------------------------------------------------------------------------------


def find(db: sqlite3.Connection, plan: SummaryPlan) -> SummaryPage:
    """Return one page of summaries."""
    where, values = sql.where(plan.chosen, _DIALECT)
    total: int = db.execute(f"SELECT count(*) FROM summaries s WHERE {where}", values).fetchone()[0]
    sorted_by = _SORTED.get(plan.sort_by, f"s.{plan.sort_by}")
    tables = "summaries s"
    if plan.sort_by == "spans":  # an index of rollouts has them, which is read beside this table
        run = "CASE WHEN r.run_id IS NULL THEN '' ELSE '/' || r.run_id END"
        tables = f"rollouts r CROSS JOIN summaries s ON s.run = {run} AND s.number = r.number"
    behind, of_place = sql.behind(plan, sorted_by, "?")
    page = (
        f"SELECT s.run AS run, s.number AS number, {sorted_by} AS value FROM {tables} WHERE {where} AND {behind}"
        f" {sql.order(plan, sorted_by, 's.number')} LIMIT ? OFFSET ?"
    )
    found = db.execute(
        f"SELECT {', '.join(_READ)}, r.span_count, i.preview, p.value, p.number FROM ({page}) p"
        " JOIN summaries s ON s.run = p.run AND s.number = p.number JOIN rollouts r ON r.number = p.number"
        f" JOIN inputs i ON i.number = p.number {sql.order(plan, 'p.value', 'p.number')}",
        (*values, *of_place, plan.limit + 1, plan.offset),
    )
    return plan.page([(_summary(row), row[-2:]) for row in found], total)


def _summary(row: tuple[Any, ...]) -> RolloutSummary:
    fields = list(row[: len(Facts._fields)])
    fields[_RUN] = fields[_RUN][1:] or None
    return summary_of(Facts(*fields), row[len(fields)], row[len(fields) + 1])


def _of_run(run_id: str | None) -> Condition:
    return "s.run = ?", (_run(run_id),)


def _one_of(column: str, values: Sequence[str]) -> Condition:
    return f"{column} IN (SELECT value FROM json_each(?))", (json.dumps(list(values)),)


def _has_text(column: str, text: str) -> Condition:
    return f"instr({column}, ?) > 0", (text,)


def _with_input(text: str) -> Condition:
    return "s.number IN (SELECT number FROM inputs WHERE instr(searched, ?) > 0)", (text,)


_DIALECT = Dialect("?", ("true", ()), _of_run, _one_of, _has_text, _with_input)


# --- figures -------------------------------------------------------------------------------------------------------


def aggregate(db: sqlite3.Connection, plan: AggregatePlan) -> RolloutAggregate:
    """Return figures of rollouts in groups."""
    where, values = sql.where(plan.chosen, _DIALECT)
    listed, width = sql.columns_of_groups(plan), len(COLUMNS[plan.by])
    tallies: dict[tuple[Any, ...], Tally] = {}
    scored: dict[tuple[Any, ...], int] = {}
    for row in db.execute(
        f"SELECT {listed}{sql.TALLY}, count(s.reward) FROM summaries s WHERE {where} GROUP BY {listed}s.outcome"
        f" ORDER BY {listed}s.outcome",
        values,
    ):
        key = row[:width]
        tallies.setdefault(key, Tally(key)).add(*row[width:-1])
        scored[key] = scored.get(key, 0) + row[-1]
    if plan.dimension is None:
        rewards = db.cursor()
        rewards.row_factory = _first
        query = f"SELECT s.reward FROM summaries s WHERE {where} AND s.reward NOT NULL ORDER BY {listed}s.reward"
        ordered = iter(rewards.execute(query, values))
        for key, count in scored.items():
            tallies[key].rewards = list(islice(ordered, count))
    else:
        texts: dict[tuple[Any, ...], list[str]] = {}
        query = f"SELECT {listed}s.rewards FROM summaries s WHERE {where} AND s.rewards NOT NULL"
        for row in db.execute(query, values):
            texts.setdefault(row[:-1], []).append(row[-1])
        for key, found in texts.items():
            tallies[key].rewards = sorted(dimension_values(found, plan.dimension))
    return aggregate_of(plan, tallies.values())


def _first(_: sqlite3.Cursor, row: tuple[Any, ...]) -> Any:
    return row[0]
