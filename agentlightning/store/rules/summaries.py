"""Summaries and figures out of whole records, for a backend that keeps nothing in short beside them."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.store.rules.tx import Record
from agentlightning.store.summaries.aggregate import AggregatePlan, aggregate_of, tally
from agentlightning.store.summaries.facts import facts_of, input_text, preview_of, searched
from agentlightning.store.summaries.plan import Entry, SummaryPlan, matching, page_of_entries
from agentlightning.types import RolloutAggregate, SummaryPage


def page_of_all(records: Iterable[Record], plan: SummaryPlan) -> SummaryPage:
    """Return one page of summaries out of all records, in the order in which they were inserted."""
    return page_of_entries(_entries(records), plan)


def aggregate_all(records: Iterable[Record], plan: AggregatePlan) -> RolloutAggregate:
    """Return figures of rollouts in groups out of all records."""
    found = [entry.facts for entry in matching(_entries(records), plan.chosen)]
    return aggregate_of(plan, tally(found, plan.by, plan.dimension))


class _Input:
    def __init__(self, value: object) -> None:
        self._value = value

    def searched(self) -> str:
        return searched(input_text(self._value))

    def preview(self) -> str:
        return preview_of(input_text(self._value))


def _entries(records: Iterable[Record]) -> list[Entry]:
    return [
        Entry(
            facts_of(record.rollout, record.latest, len(record.attempts)),
            place,
            record.span_count,
            _Input(record.rollout.input),
        )
        for place, record in enumerate(records)
    ]
