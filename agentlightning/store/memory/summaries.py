"""Entries for summaries and statistics of the records in memory. An entry is created at its first use after a change,
so that writes need no additional time."""

from __future__ import annotations

from typing import cast

from agentlightning.store.memory.data import Data, Slot
from agentlightning.store.rules.tx import Record
from agentlightning.store.summaries.facts import facts_of, input_text, preview_of, searched
from agentlightning.store.summaries.plan import Entry, Input


class _Short(Input):
    """The short form of a rollout, and the record from which it was created."""

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


def entries_of(data: Data) -> list[Entry]:
    """Return the entries of all rollouts; changed ones are created again. The caller holds the lock of the store."""
    moment = (data.last_change, len(data.slots))
    if data.entries is None or data.entries[0] != moment:
        data.entries = moment, [_entry(slot) for slot in data.slots.values()]
    return data.entries[1]


def _entry(slot: Slot) -> Entry:
    short = cast("_Short | None", slot.short)
    if short is None:
        short = slot.short = _Short()
    elif short.record is slot.record:
        return short.entry
    short.read(slot.record, slot.number)
    return short.entry
