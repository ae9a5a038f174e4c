"""Summaries and figures over the records in memory. The fields that they need are read from a record at the first use
after a change, so that writers pay nothing for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from agentlightning.store.memory.data import Data, Slot
from agentlightning.store.rules.tx import Record
from agentlightning.store.summaries.aggregate import AggregatePlan, aggregate_entries
from agentlightning.store.summaries.facts import facts_of, input_text, preview_of, searched
from agentlightning.store.summaries.plan import Entry, Input, SummaryPlan, page_of_entries
from agentlightning.types import RolloutAggregate, SummaryPage


class _Short(Input):
    """A short form of a rollout, and the record that it was read from."""

    __slots__ = ("_input", "_text", "entry", "record")

    def __init__(self) -> None:
        super().__init__()
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


class Shorts:
    """The short forms of all rollouts. The caller holds the lock of the store."""

    def __init__(self, data: Data) -> None:
        self._data = data
        self._read: tuple[int, int] = (-1, -1)
        self._entries: list[Entry] = []

    def find(self, plan: SummaryPlan) -> SummaryPage:
        """Return one page of summaries."""
        return page_of_entries(self._all(), plan)

    def aggregate(self, plan: AggregatePlan) -> RolloutAggregate:
        """Return figures of rollouts in groups."""
        return aggregate_entries(self._all(), plan)

    def _all(self) -> list[Entry]:
        slots = self._data.slots
        if self._read != (self._data.last_change, len(slots)):
            self._read, self._entries = (self._data.last_change, len(slots)), _entries(slots.values())
        return self._entries


def shorts_of(data: Data) -> Shorts:
    """Return the short forms of these data, which are made at the first call."""
    shorts = cast("Shorts | None", data.shorts)
    if shorts is None:
        shorts = data.shorts = Shorts(data)
    return shorts


def _entries(slots: Iterable[Slot]) -> list[Entry]:
    """Return the entries of rollouts; changed ones are read again."""
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
