"""Summaries of rollouts: a small row of facts for each record, its input as text, pages of summaries, and statistics.

In SQLite, the rows of one run are stored together, in the order of the rollouts. Reading all of them reads only a few
megabytes, whatever the size of the records. In PostgreSQL, no index has a column that changes often, so that a changed
row is written next to the old one (HOT).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from operator import itemgetter

from pydantic import ValidationError

from agentlightning.store.rules.durable import record_type
from agentlightning.store.rules.rewards import read_again
from agentlightning.store.rules.spans import readable_spans
from agentlightning.store.rules.tx import Record
from agentlightning.store.sql.dialect import Columns, Condition, Dialect
from agentlightning.store.sql.link import Link
from agentlightning.store.summaries.aggregate import COLUMNS, AggregatePlan, Tally, aggregate_of, dimension_values
from agentlightning.store.summaries.facts import (
    Facts,
    facts_of,
    input_text,
    preview_of,
    searched,
    summary_of,
)
from agentlightning.store.summaries.plan import SummaryPlan, tests_of
from agentlightning.types import Attempt, Rollout, RolloutAggregate, RolloutFilter, SummaryPage
from agentlightning.utils.rewards import MARKS

_COLUMNS = tuple("@run_key" if name == "run_id" else name for name in Facts._fields)
_INSERT = (
    f"INSERT INTO @summaries (@partition, number, {', '.join(_COLUMNS)}) VALUES (@own, (SELECT number FROM @rollouts"
    f" WHERE @here AND rollout_id = ?), {', '.join('?' * len(_COLUMNS))}) ON CONFLICT DO NOTHING"
)
_INSERT_INPUT = (
    "INSERT INTO @inputs (@partition, @input_key, preview, searched) VALUES (@own, @input_key_of, ?, ?)"
    " ON CONFLICT DO NOTHING"
)
_UPDATE_INPUT = "UPDATE @inputs SET preview = ?, searched = ? WHERE @input_of_rollout"
_REMOVE = ("DELETE FROM @summaries WHERE @of_rollout", "DELETE FROM @inputs WHERE @input_of_rollout")
_ROW = ", ".join(f"s.{name}" for name in _COLUMNS)
_WIDTH = len(_COLUMNS)
_OF_ATTEMPT = itemgetter(
    *("attempt_id", "status", "worker_id", "outcome", "outcome_reason", "error", "reward", "rewards")
)


# --- writing ---------------------------------------------------------------------------------------------------------


def insert(link: Link, record: Record) -> None:
    """Write the row and the input of a rollout. Its record must be written before."""
    rollout_id = record.rollout.rollout_id
    link.send(_INSERT, (rollout_id, *row_of(link.dialect, record)))
    link.send(_INSERT_INPUT, (rollout_id, *input_of(record.rollout)))


def update(link: Link, before: Record, record: Record) -> None:
    """Write the parts of a rollout's row and input that differ after a change of its record."""
    old, new = before.rollout, record.rollout
    count = len(record.attempts)
    if old is new and count == len(before.attempts) and (not count or _same(before.attempts[-1], record.attempts[-1])):
        return  # as after most spans: a sign of life is in no summary
    was, row = row_of(link.dialect, before), row_of(link.dialect, record)
    changed = [place for place in range(_WIDTH) if was[place] != row[place]]
    if changed:
        names = ", ".join(f"{_COLUMNS[place]} = ?" for place in changed)
        values = (*(row[place] for place in changed), new.rollout_id)
        link.send(f"UPDATE @summaries SET {names} WHERE @of_rollout", values)
    if old.input is not new.input:
        link.send(_UPDATE_INPUT, (*input_of(new), new.rollout_id))


def _same(before: Attempt, attempt: Attempt) -> bool:
    return before is attempt or _OF_ATTEMPT(before.__dict__) == _OF_ATTEMPT(attempt.__dict__)


def remove(link: Link, rollout_id: str) -> None:
    """Remove the row and the input of a rollout. Its record must still exist."""
    for statement in _REMOVE:
        link.send(statement, (rollout_id,))


def row_of(dialect: Dialect, record: Record) -> Columns:
    """Return the facts of a record as columns."""
    return dialect.row_of(facts_of(record.rollout, record.latest, len(record.attempts)))


def input_of(rollout: Rollout) -> tuple[str, str]:
    """Return a rollout's input in the form for display and in the form for searching."""
    text = input_text(rollout.input)
    return preview_of(text), searched(text)


def add_all(link: Link, rollouts: Iterable[tuple[str, bytes]]) -> None:
    """Write the summary of each rollout (id, record), and set the rewards in its record from its spans."""
    marked = " OR ".join("@has_bytes" for _ in MARKS)
    rewarding = set(link.fetch(f"SELECT DISTINCT rollout_id FROM @spans WHERE @here AND ({marked})", MARKS))
    spans = f"SELECT body FROM @spans WHERE @here AND rollout_id = ? AND ({marked}) ORDER BY number"
    for rollout_id, body in rollouts:
        try:
            record = record_type().validate_json(body)
        except ValidationError:  # reported when it is read; it must not block the upgrade of the others
            continue
        if (rollout_id,) in rewarding:
            rows = link.fetch(spans, (rollout_id, *MARKS))
            if read_again(record, readable_spans(row[0] for row in rows)):
                update = "UPDATE @rollouts SET body = ? WHERE @here AND rollout_id = ?"
                link.send(update, (record_type().dump_json(record), rollout_id))
        insert(link, record)


def problems(link: Link, record: Record) -> Iterator[str]:
    """Yield the differences between a rollout's record and its row and input."""
    rollout_id = record.rollout.rollout_id
    rows = link.fetch(f"SELECT {', '.join(_COLUMNS)} FROM @summaries WHERE @of_rollout", (rollout_id,))
    texts = link.fetch("SELECT preview, searched FROM @inputs WHERE @input_of_rollout", (rollout_id,))
    if not rows or not texts:
        yield "the input cannot be searched" if rows else "it has no summary"
        return
    for column, value, expected in zip(Facts._fields, rows[0], row_of(link.dialect, record), strict=True):
        if value != expected:
            yield f"column {column} of the summary is {value!r}, but the record has {expected!r}"
    if texts != [input_of(record.rollout)]:
        yield "the text for searching differs from the input"


# --- reading ---------------------------------------------------------------------------------------------------------

_SORTED = {"duration": "(s.end_time - s.start_time)", "spans": "r.span_count"}
_ALWAYS_THERE = {"start_time", "status", "attempts", "spans"}
"""Values that every rollout has, so that a database can read an index in their order."""


def find(link: Link, plan: SummaryPlan) -> SummaryPage:
    """Return one page of summaries."""
    where, values = _where(plan.chosen, link.dialect)
    total: int = link.fetch(f"SELECT count(*) FROM @summaries s WHERE {where}", values, once=True)[0][0]
    sorted_by = _SORTED.get(plan.sort_by, f"s.{plan.sort_by}")
    behind, of_place = _behind(plan, sorted_by)
    page = (
        f"SELECT @page_key, s.number AS number, {sorted_by} AS value"
        f" FROM {'@with_spans' if plan.sort_by == 'spans' else '@summaries s'}"
        f" WHERE {where} AND {behind} {_order(plan, sorted_by, 's.number')} LIMIT ? OFFSET ?"
    )
    rows = link.fetch(
        f"SELECT {_ROW}, r.span_count, i.preview, p.value, p.number FROM ({page}) p @of_page"
        f" {_order(plan, 'p.value', 'p.number')}",
        (*values, *of_place, plan.limit + 1, plan.offset),
        once=True,
    )
    facts_of_row = link.dialect.facts_of
    return plan.page([(summary_of(facts_of_row(row[:_WIDTH]), *row[_WIDTH:-2]), row[-2:]) for row in rows], total)


def _where(chosen: RolloutFilter, dialect: Dialect) -> tuple[str, list[object]]:
    """Return a filter as a condition on `s`, and its values."""
    tests: list[Condition] = [("s.@here", ())]
    for column, test, operand in tests_of(chosen):
        if column == "run_id":
            tests.append(dialect.of_run_key(operand[0]))
        elif test == "in":
            tests.append(dialect.one_of(f"s.{column}", operand))
        elif test == "contains":
            tests.append((f"@instr(s.{column}, ?) > 0", (operand,)))
        elif test == "is given":
            tests.append((f"s.{column} IS {'NOT ' if operand else ''}NULL", ()))
        else:
            tests.append((f"s.{column} {test} ?", (operand,)))
    if chosen.input_contains:
        tests.append(("@with_input", (searched(chosen.input_contains),)))
    return " AND ".join(test for test, _ in tests), [value for _, values in tests for value in values]


def _behind(plan: SummaryPlan, sorted_by: str) -> Condition:
    """Return the condition for rows after the position where the page begins."""
    than = "<" if plan.descending else ">"
    if plan.after is None:
        return "true", ()
    value, place = plan.after
    if value is None:
        return f"{sorted_by} IS NULL AND s.number {than} ?", (place,)
    test = f"{sorted_by} {than} ? OR ({sorted_by} = ? AND s.number {than} ?)"
    return f"({sorted_by} IS NULL OR {test})", (value, value, place)


def _order(plan: SummaryPlan, value: str, number: str) -> str:
    way = "DESC" if plan.descending else "ASC"
    nulls_last = "" if plan.sort_by in _ALWAYS_THERE else f"{value} IS NULL, "
    return f"ORDER BY {nulls_last}{value} {way}, {number} {way}"


# --- figures ---------------------------------------------------------------------------------------------------------

_TALLY = (
    "s.outcome, count(*), coalesce(sum(s.end_time - s.start_time), 0.0), count(s.end_time), min(s.start_time),"
    " max(s.start_time), count(s.reward)"
)


def aggregate(link: Link, plan: AggregatePlan) -> RolloutAggregate:
    """Return statistics of rollouts by group."""
    where, values = _where(plan.chosen, link.dialect)
    listed, width = "".join(f"s.{column}, " for column in COLUMNS[plan.by]), len(COLUMNS[plan.by])
    tallies: dict[Columns, Tally] = {}
    scored: dict[Columns, int] = {}
    query = f"SELECT {listed}{_TALLY} FROM @summaries s WHERE {where} GROUP BY {listed}s.outcome"
    for row in link.fetch(f"{query} ORDER BY {listed}s.outcome", values, once=True):
        key = row[:width]
        tallies.setdefault(key, Tally(key)).add(*row[width:-1])
        scored[key] = scored.get(key, 0) + row[-1]
    if plan.dimension is None:
        query = f"SELECT s.reward FROM @summaries s WHERE {where} AND s.reward IS NOT NULL ORDER BY {listed}s.reward"
        ordered = chain.from_iterable(link.fetch(query, values, once=True))
        for key, count in scored.items():
            tallies[key].rewards = list(islice(ordered, count))
    else:
        texts: dict[Columns, list[str]] = {}
        query = f"SELECT {listed}s.rewards FROM @summaries s WHERE {where} AND s.rewards IS NOT NULL"
        for row in link.fetch(query, values, once=True):
            texts.setdefault(row[:-1], []).append(row[-1])
        for key, rewards in texts.items():
            tallies[key].rewards = sorted(dimension_values(rewards, plan.dimension))
    return aggregate_of(plan, tallies.values())
