"""Rollouts in short in PostgreSQL: a narrow row for each beside its record, its input as text, pages, and figures."""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

from agentlightning.store.postgres.link import Columns, Link
from agentlightning.store.rules.tx import Record
from agentlightning.store.summaries import sql
from agentlightning.store.summaries.aggregate import COLUMNS, AggregatePlan, Tally, aggregate_of, dimension_values
from agentlightning.store.summaries.facts import Facts, facts_of, input_text, preview_of, searched, summary_of
from agentlightning.store.summaries.plan import SummaryPlan
from agentlightning.store.summaries.sql import Condition, Dialect
from agentlightning.types import Outcome, RolloutAggregate, RolloutSummary, SummaryPage

SCHEMA = """
CREATE TABLE agl_summaries (
    partition text COLLATE "C" NOT NULL,
    number bigint NOT NULL,
    rollout_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C",
    status text COLLATE "C" NOT NULL,
    mode text COLLATE "C",
    step bigint,
    task text COLLATE "C",
    sample bigint,
    start_time double precision NOT NULL,
    end_time double precision,
    resources_id text COLLATE "C",
    resources_version bigint,
    attempts bigint NOT NULL,
    attempt_id text COLLATE "C",
    attempt_status text COLLATE "C",
    worker_id text COLLATE "C",
    outcome text COLLATE "C",
    outcome_reason text COLLATE "C",
    error_type text COLLATE "C",
    reward double precision,
    rewards text COLLATE "C",
    PRIMARY KEY (partition, rollout_id)
) WITH (fillfactor = 80);
CREATE INDEX agl_summaries_step ON agl_summaries (partition, run_id, step);
CREATE INDEX agl_summaries_start ON agl_summaries (partition, start_time, number);
CREATE TABLE agl_inputs (
    partition text COLLATE "C" NOT NULL,
    rollout_id text COLLATE "C" NOT NULL,
    preview text COLLATE "C" NOT NULL,
    searched text COLLATE "C" NOT NULL,
    PRIMARY KEY (partition, rollout_id)
)
"""
"""No index has a column that changes often, so that a change of a row is made beside it (HOT)."""
_NUMBER = "(SELECT number FROM agl_rollouts WHERE partition = %s AND rollout_id = %s)"
_CHANGING = tuple(name for name in Facts._fields if name not in ("rollout_id", "run_id"))
PUT = (
    f"INSERT INTO agl_summaries ({', '.join(Facts._fields)}, partition, number)"
    f" VALUES ({', '.join(['%s'] * len(Facts._fields))}, %s, {_NUMBER}) ON CONFLICT (partition, rollout_id)"
    f" DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in _CHANGING)}"
)
PUT_INPUT = (
    "INSERT INTO agl_inputs (partition, rollout_id, preview, searched) VALUES (%s, %s, %s, %s)"
    " ON CONFLICT (partition, rollout_id) DO UPDATE SET preview = excluded.preview, searched = excluded.searched"
)
TABLES = ("agl_summaries", "agl_inputs")
_ROW = ", ".join(f"s.{name}" for name in Facts._fields)
WITH_RECORDS = (
    f"SELECT r.rollout_id, r.body, {_ROW}, i.preview, i.searched FROM agl_rollouts r"
    " LEFT JOIN agl_summaries s ON s.partition = r.partition AND s.rollout_id = r.rollout_id"
    " LEFT JOIN agl_inputs i ON i.partition = r.partition AND i.rollout_id = r.rollout_id"
    " WHERE r.partition = %s ORDER BY r.number"
)
_SORTED = {"duration": "(s.end_time - s.start_time)", "spans": "r.span_count"}
_SPANS = "JOIN agl_rollouts r ON r.partition = s.partition AND r.rollout_id = s.rollout_id"


# --- writing -------------------------------------------------------------------------------------------------------


def put_values(partition: str, record: Record) -> tuple[object, ...]:
    """Return the values of `PUT`."""
    rollout_id = record.rollout.rollout_id
    return (*row_of(record), partition, partition, rollout_id)


def input_values(partition: str, record: Record) -> tuple[object, ...]:
    """Return the values of `PUT_INPUT`."""
    text = input_text(record.rollout.input)
    return partition, record.rollout.rollout_id, preview_of(text), searched(text)


def in_short(record: Record) -> tuple[object, ...]:
    """Return what is kept of a record in short."""
    return (*row_of(record), *input_values("", record)[2:])


def row_of(record: Record) -> tuple[str | float | None, ...]:
    """Return the facts of a record; what a program wrote into them may hold null bytes, which no text here has."""
    facts = facts_of(record.rollout, record.latest, len(record.attempts))
    return tuple(value.replace("\0", " ") if type(value) is str and "\0" in value else value for value in facts)


# --- reading -------------------------------------------------------------------------------------------------------


def find(link: Link, partition: str, plan: SummaryPlan) -> SummaryPage:
    """Return one page of summaries."""
    where, values = sql.where(plan.chosen, _dialect(partition))
    total = link.fetch(f"SELECT count(*) FROM agl_summaries s WHERE {where}", values, once=True)[0][0]
    sorted_by = _SORTED.get(plan.sort_by, f"s.{plan.sort_by}")
    joined = _SPANS if plan.sort_by == "spans" else ""
    behind, of_place = sql.behind(plan, sorted_by, "%s")
    page = (
        f"SELECT s.partition, s.rollout_id, s.number, {sorted_by} AS value FROM agl_summaries s {joined}"
        f" WHERE {where} AND {behind} {sql.order(plan, sorted_by, 's.number')} LIMIT %s OFFSET %s"
    )
    query = (
        f"SELECT {_ROW}, r.span_count, i.preview, p.value, p.number FROM ({page}) p"
        f" JOIN agl_summaries s ON s.partition = p.partition AND s.rollout_id = p.rollout_id {_SPANS}"
        " JOIN agl_inputs i ON i.partition = s.partition AND i.rollout_id = s.rollout_id"
        f" {sql.order(plan, 'p.value', 'p.number')}"
    )
    found = link.fetch(query, (*values, *of_place, plan.limit + 1, plan.offset), once=True)
    return plan.page([(_summary(row), row[-2:]) for row in found], total)


def _summary(row: Columns) -> RolloutSummary:
    width = len(Facts._fields)
    return summary_of(Facts(*row[:width]), row[width], row[width + 1])


def aggregate(link: Link, partition: str, plan: AggregatePlan) -> RolloutAggregate:
    """Return figures of rollouts in groups."""
    where, values = sql.where(plan.chosen, _dialect(partition))
    listed, width = sql.columns_of_groups(plan), len(COLUMNS[plan.by])
    outcomes = ", ".join(f"count(*) FILTER (WHERE s.outcome = '{name}')" for name in _OUTCOMES)
    rewards = "string_agg(float8send(s.reward), ''::bytea ORDER BY s.reward)" if plan.dimension is None else "NULL"
    grouped = f" GROUP BY {listed.removesuffix(', ')}" if listed else ""
    query = (  # one pass, in the order of the index where there is one
        f"SELECT {listed}count(*), coalesce(sum(s.end_time - s.start_time), 0.0), count(s.end_time), min(s.start_time),"
        f" max(s.start_time), {rewards}, {outcomes} FROM agl_summaries s WHERE {where}{grouped}"
    )
    tallies: dict[tuple[Any, ...], Tally] = {}
    for row in link.fetch(query, values, once=True):
        key, (count, seconds, ended, first, last, packed), counts = (
            row[:width],
            row[width : width + 6],
            row[width + 6 :],
        )
        if count:
            told = Counter({name: number for name, number in zip(_OUTCOMES, counts, strict=True) if number})
            tallies[key] = Tally(key, count, told, seconds, ended, first, last, _numbers(packed or b""))
    if plan.dimension is not None:
        texts: dict[tuple[Any, ...], list[str]] = {}
        query = f"SELECT {listed}s.rewards FROM agl_summaries s WHERE {where} AND s.rewards IS NOT NULL"
        for row in link.fetch(query, values, once=True):
            texts.setdefault(row[:-1], []).append(row[-1])
        for key, found in texts.items():
            tallies[key].rewards = sorted(dimension_values(found, plan.dimension))
    return aggregate_of(plan, tallies.values())


def _numbers(text: bytes) -> Sequence[float]:
    """Return the numbers of which this is the binary form, one behind the other."""
    numbers = array("d", text)
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers


def _dialect(partition: str) -> Dialect:
    def with_input(text: str) -> Condition:
        chosen = "SELECT rollout_id FROM agl_inputs WHERE partition = %s AND strpos(searched, %s) > 0"
        return f"(s.rollout_id IN ({chosen})) IS TRUE", (partition, text)  # read once and hashed, and not as a join

    return Dialect("%s", ("s.partition = %s", (partition,)), _of_run, _one_of, _has_text, with_input)


_OUTCOMES: tuple[str, ...] = get_args(Outcome)


def _of_run(run_id: str | None) -> Condition:
    return ("s.run_id IS NULL", ()) if run_id is None else ("s.run_id = %s", (run_id,))


def _one_of(column: str, values: Sequence[str]) -> Condition:
    return f"{column} = ANY(%s::text[])", (list(values),)


def _has_text(column: str, text: str) -> Condition:
    return f"strpos({column}, %s) > 0", (text,)
