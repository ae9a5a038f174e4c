"""Pages of summaries and figures of groups as SQL, for the databases that keep a row of facts for each rollout.

The rows stand in a table `s` with a column for each of the facts and `number`, the place of the rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentlightning.store.summaries.aggregate import COLUMNS, AggregatePlan
from agentlightning.store.summaries.facts import searched, task_text
from agentlightning.store.summaries.plan import SummaryPlan
from agentlightning.types import RolloutFilter

Values = tuple[object, ...]
Condition = tuple[str, Values]


@dataclass(frozen=True, slots=True)
class Dialect:
    """What differs between the databases."""

    mark: str
    """Stands for a value."""
    here: Condition
    """True of all rows of the store."""
    of_run: Callable[[str | None], Condition]
    one_of: Callable[[str, Sequence[str]], Condition]
    """True of a column that has one of these values."""
    has_text: Callable[[str, str], Condition]
    """True of a column with a text in it."""
    with_input: Callable[[str], Condition]
    """True of rollouts with a text in their inputs, given in the form in which case does not matter."""


def where(chosen: RolloutFilter, dialect: Dialect) -> tuple[str, list[object]]:
    """Return a filter as a condition on `s`, and its values."""
    mark = dialect.mark
    tests: list[Condition] = [dialect.here]
    if "run_id" in chosen.model_fields_set:
        tests.append(dialect.of_run(chosen.run_id or None))
    for name in ("status", "mode", "outcome", "rollout_id"):
        if (wanted := getattr(chosen, f"{name}_in")) is not None:
            tests.append(dialect.one_of(f"s.{name}", wanted))
    for name in ("outcome_reason", "worker_id", "resources_id", "resources_version"):
        if (value := getattr(chosen, name)) is not None:
            tests.append((f"s.{name} = {mark}", (value,)))
    if chosen.task is not None:
        tests.append((f"s.task = {mark}", (task_text(chosen.task),)))
    for column in ("step", "reward"):
        for end, than in (("from", ">="), ("to", "<=")):
            if (bound := getattr(chosen, f"{column}_{end}")) is not None:
                tests.append((f"s.{column} {than} {mark}", (bound,)))
    if chosen.has_reward is not None:
        tests.append((f"s.reward IS {'NOT ' if chosen.has_reward else ''}NULL", ()))
    if chosen.started_after is not None:
        tests.append((f"s.start_time >= {mark}", (chosen.started_after,)))
    if chosen.started_before is not None:
        tests.append((f"s.start_time < {mark}", (chosen.started_before,)))
    if chosen.rollout_id_contains:
        tests.append(dialect.has_text("s.rollout_id", chosen.rollout_id_contains))
    if chosen.input_contains:
        tests.append(dialect.with_input(searched(chosen.input_contains)))
    return " AND ".join(test for test, _ in tests), [value for _, values in tests for value in values]


def behind(plan: SummaryPlan, sorted_by: str, mark: str) -> Condition:
    """Return the condition on rows that come behind the place where the page begins."""
    than = "<" if plan.descending else ">"
    if plan.after is None:
        return "true", ()
    value, place = plan.after
    if value is None:
        return f"{sorted_by} IS NULL AND s.number {than} {mark}", (place,)
    test = f"{sorted_by} {than} {mark} OR ({sorted_by} = {mark} AND s.number {than} {mark})"
    return f"({sorted_by} IS NULL OR {test})", (value, value, place)


def order(plan: SummaryPlan, value: str, number: str) -> str:
    """Return the order of a page."""
    way = "DESC" if plan.descending else "ASC"
    nulls_last = "" if plan.sort_by in _ALWAYS_THERE else f"{value} IS NULL, "
    return f"ORDER BY {nulls_last}{value} {way}, {number} {way}"


_ALWAYS_THERE = {"start_time", "status", "attempts", "spans"}
"""What no rollout is without: in its order a database may read along an index."""


def columns_of_groups(plan: AggregatePlan) -> str:
    """Return the columns that the rollouts of a group have in common, each with a comma behind it."""
    return "".join(f"s.{column}, " for column in COLUMNS[plan.by])


TALLY = (
    "s.outcome, count(*), coalesce(sum(s.end_time - s.start_time), 0.0), count(s.end_time), min(s.start_time),"
    " max(s.start_time)"
)
"""What is counted of the rollouts of a group with one outcome, as `Tally.add` takes it."""
