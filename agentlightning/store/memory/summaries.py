"""Summaries and figures over the records in memory. What they need of a record is read out of it when it is first asked
for after a change, so that whoever writes pays nothing for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from agentlightning.store.memory.data import Slot
from agentlightning.store.rules.tx import Record
from agentlightning.store.summaries.aggregate import AggregatePlan, aggregate_of, tally
from agentlightning.store.summaries.facts import facts_of, input_text, preview_of, searched
from agentlightning.store.summaries.plan import Entry, SummaryPlan, matching, page_of_entries
from agentlightning.types import RolloutAggregate, SummaryPage


class _Short:
    """What is known of a rollout in short, and the record that it was read out of."""

    __slots__ = ("_input", "_text", "entry", "record")

    def __init__(self) -> None:
        self._input: object = None
        self._text: str | None = None

    def read(self, record: Record, place: int) -> None:
        """Read a record."""
        self.record = record
        latest = record.attempts[-1] if record.attempts else None
        self.entry = Entry(facts_of(record.rollout, latest, len(record.attempts)), place, record.span_count, self)

    def searched(self) -> str:
        value = self.record.rollout.input
        if self._text is None or self._input is not value:
            self._input, self._text = value, searched(input_text(value))
        return self._text

    def preview(self) -> str:
        return preview_of(input_text(self.record.rollout.input))


def find(slots: Iterable[Slot], plan: SummaryPlan) -> SummaryPage:
    """Return one page of summaries."""
    return page_of_entries(_entries(slots), plan)


def aggregate(slots: Iterable[Slot], plan: AggregatePlan) -> RolloutAggregate:
    """Return figures of rollouts in groups."""
    found = [entry.facts for entry in matching(_entries(slots), plan.chosen)]
    return aggregate_of(plan, tally(found, plan.by, plan.dimension))


def _entries(slots: Iterable[Slot]) -> list[Entry]:
    """Return the entries of rollouts, those that changed read again. The store's lock is held."""
    entries: list[Entry] = []
    for slot in slots:
        short = cast("_Short | None", slot.short)
        if short is None:
            short = slot.short = _Short()
            short.read(slot.record, slot.number)
        elif short.record is not slot.record:
            short.read(slot.record, slot.number)
        entries.append(short.entry)
    return entries
