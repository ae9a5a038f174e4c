"""The data of the memory store: rollouts in slots, spans, rows, and values derived from records, which are places in
the queue, sorted views, changes, claims of workers, deadlines, sizes, and data that can be evicted.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from typing import cast

from agentlightning.store.base import FINISHED
from agentlightning.store.memory.eviction import SpanBudget
from agentlightning.store.memory.index import View
from agentlightning.store.memory.run_records import RunRecords
from agentlightning.store.memory.spans import KeptSpan, Rows
from agentlightning.store.rules.tx import Counts, Kind, Record, Row, RunRow
from agentlightning.store.summaries.plan import Entry as SummaryEntry

StoredSpan = bytes | KeptSpan
"""A stored span. A span with more content than most is stored as JSON."""
Entry = tuple[int, float, int, str]
"""(minus priority, available at, number, rollout id): the order in which rollouts are claimed."""


class RunQueue:
    """The queue of one run: entries that can be claimed now, and entries that can be claimed later.

    Most entries arrive in the order in which they are claimed. They are in a line with a cost that is independent of
    its length. Two heaps contain entries that arrive out of order, and entries that can only be claimed later. The
    owner adds an entry once, knows which entries are valid, and reports when one becomes invalid. An invalid entry is
    dropped when it is at the front.
    """

    __slots__ = ("_delayed", "_is_valid", "_left", "_line", "_ready")

    def __init__(self, is_valid: Callable[[Entry], bool]) -> None:
        self._is_valid = is_valid
        self._line: deque[Entry] = deque()
        self._ready: list[Entry] = []
        self._delayed: list[tuple[float, Entry]] = []
        self._left = 0

    def put(self, entry: Entry, *, ready: bool) -> None:
        """Add an entry. If it is not `ready`, it can be claimed from the time in it."""
        if not ready:
            heapq.heappush(self._delayed, (entry[1], entry))
        elif not self._line or self._line[-1] < entry:
            self._line.append(entry)
        else:
            heapq.heappush(self._ready, entry)

    def left(self) -> None:
        """Record that an entry became invalid. Invalid entries are dropped before they are more than half of all."""
        self._left += 1
        if 2 * self._left > len(self._line) + len(self._ready) + len(self._delayed) + 64:
            self._left = 0
            self._line = deque(filter(self._is_valid, self._line))
            self._ready = list(filter(self._is_valid, self._ready))
            self._delayed = [pair for pair in self._delayed if self._is_valid(pair[1])]
            heapq.heapify(self._ready)
            heapq.heapify(self._delayed)

    def take(self, now: float) -> Entry | None:
        """Remove and return the next entry to claim. `put` adds it again."""
        while self._delayed and self._delayed[0][0] <= now:
            heapq.heappush(self._ready, heapq.heappop(self._delayed)[1])
        while self._line or self._ready:
            in_line = not self._ready or (self._line and self._line[0] < self._ready[0])
            entry = self._line.popleft() if in_line else heapq.heappop(self._ready)
            if self._is_valid(entry):
                return entry
        return None

    def earliest(self) -> float | None:
        """Return a time at which an entry is available: a past time if one is available now, else the earliest; None if
        the queue is empty."""
        while self._line and not self._is_valid(self._line[0]):
            self._line.popleft()
        while self._ready and not self._is_valid(self._ready[0]):
            heapq.heappop(self._ready)
        while self._delayed and not self._is_valid(self._delayed[0][1]):
            heapq.heappop(self._delayed)
        for entries in (self._line, self._ready):
            if entries:
                return entries[0][1]
        return self._delayed[0][0] if self._delayed else None


class Deadlines:
    """The deadlines of rollouts, as a heap. Its entries can be too early, but never too late."""

    __slots__ = ("_at", "_heap")

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def put(self, rollout_id: str, deadline: float | None) -> None:
        """Set or clear the deadline of a rollout."""
        before = self._at.get(rollout_id)
        if deadline is None:
            self._at.pop(rollout_id, None)
            return
        self._at[rollout_id] = deadline
        if before is None or deadline < before:
            heapq.heappush(self._heap, (deadline, rollout_id))

    def due(self, now: float, limit: int) -> list[str]:
        """Return the rollouts with a deadline in the past, earliest deadline first. They stay in the heap."""
        late: dict[str, float] = {}
        while self._heap and self._heap[0][0] < now and len(late) < limit:
            _, rollout_id = heapq.heappop(self._heap)
            deadline = self._at.get(rollout_id)
            if deadline is None:
                continue
            if deadline < now:
                late[rollout_id] = deadline
            else:
                heapq.heappush(self._heap, (deadline, rollout_id))
        for rollout_id, deadline in late.items():
            heapq.heappush(self._heap, (deadline, rollout_id))
        return sorted(late, key=late.__getitem__)


class Slot:
    """One rollout. Slots are in the order of their last change."""

    __slots__ = ("change", "entry", "holder", "number", "record", "short")

    def __init__(self, record: Record, number: int) -> None:
        self.record = record
        self.number = number
        """Position in the order of insertion."""
        self.change = 0
        """Number of its last change."""
        self.entry: Entry | None = None
        """Place in the queue; None while it is not in a queue, and while a script that claimed it is running."""
        self.holder: str | None = None
        """The worker that has it in `Data.held`."""
        self.short: object = None
        """Short form of the record, created by `summaries.py`; None before its first use."""


class Data:
    """The contents of one store. The caller must hold the lock of its backend."""

    def __init__(self, budget: SpanBudget, run_records: RunRecords, rows: Rows) -> None:
        self.slots: dict[str, Slot] = {}
        self.spans: dict[str, dict[str, StoredSpan]] = {}
        """Spans of each rollout with spans, by `span_key`."""
        self.rows: dict[Kind, dict[str, Row]] = {}
        self.sizes: dict[str | None, Counts] = {}
        self.held: dict[str, dict[str, None]] = {}
        self.deadlines = Deadlines()
        self.budget = budget
        self.run_records = run_records
        self.rows_of_spans = rows
        self.last_change = 0
        self.entries: tuple[tuple[int, int], list[SummaryEntry]] | None = None
        """The entries that `summaries.py` created for all rollouts, and the time; None before their first use."""
        self._runs_changed: dict[str, int] = {}
        """Number of the last change of each run, in this order."""
        self._last_number = 0
        self._queues: dict[str | None, RunQueue] = {}
        self._views: dict[str | None, View] = {}

    # --- the queue -------------------------------------------------------------------------------------------------

    def take(self, run_id: str | None, now: float) -> Entry | None:
        """Remove the next entry to claim from the queue of a run."""
        queue = self._queues.get(run_id)
        entry = None if queue is None else queue.take(now)
        if entry is not None:
            self.slots[entry[3]].entry = None
        return entry

    def give_back(self, entry: Entry) -> None:
        """Put a taken entry back, if its rollout still exists, is queued, and has no other place."""
        slot = self.slots.get(entry[3])
        if slot is not None and slot.entry is None and slot.record.queued_at is not None:
            self._enter(slot, entry, ready=True)

    def next_available(self, run_id: str | None) -> float | None:
        """Return a time at which an entry in the queue of a run can be claimed; None if the queue is empty."""
        queue = self._queues.get(run_id)
        return None if queue is None else queue.earliest()

    def _enter(self, slot: Slot, entry: Entry, *, ready: bool) -> None:
        run_id = slot.record.rollout.run_id
        queue = self._queues.get(run_id)
        if queue is None:
            queue = self._queues[run_id] = RunQueue(self._is_valid)
        slot.entry = entry
        queue.put(entry, ready=ready)

    def _leave(self, slot: Slot) -> None:
        if slot.entry is not None:
            slot.entry = None
            self._queues[slot.record.rollout.run_id].left()

    def _is_valid(self, entry: Entry) -> bool:
        slot = self.slots.get(entry[3])
        return slot is not None and slot.entry is entry

    # --- records ---------------------------------------------------------------------------------------------------

    def view(self, order: str | None) -> View:
        """Return the view in this order. It is created at its first use."""
        view = self._views.get(order)
        if view is None:
            view = self._views[order] = View(order, ((slot.record, slot.number) for slot in self.slots.values()))
        return view

    def put(self, record: Record) -> None:
        """Insert or replace a record."""
        rollout = record.rollout
        rollout_id = rollout.rollout_id
        slot = self.slots.pop(rollout_id, None)
        if slot is None:
            previous = None
            self._last_number += 1
            slot = Slot(record, self._last_number)
        else:
            previous = slot.record
            slot.record = record
        self.last_change += 1
        slot.change = self.last_change
        self.slots[rollout_id] = slot
        if (
            previous is None
            or len(previous.attempts) != len(record.attempts)
            or previous.span_bytes != record.span_bytes
        ):
            self._count(previous, record)
        if previous is None or previous.rollout is not rollout or previous.queued_at != record.queued_at:
            for view in self._views.values():
                view.put(previous, record, slot.number)
            available = record.queued_at
            if available is not None and rollout.not_before is not None:
                available = max(available, rollout.not_before)
            entry = None if available is None else (-rollout.priority, available, slot.number, rollout_id)
            if slot.entry is not None and entry != slot.entry:
                self._leave(slot)
            if entry is not None and slot.entry is None:
                self._enter(slot, entry, ready=available == record.queued_at)
        holder = record.holder
        if holder != slot.holder:
            self._hold(slot, rollout_id, holder)
        if record.deadline is not None or (previous is not None and previous.deadline is not None):
            self.deadlines.put(rollout_id, record.deadline)
        if rollout.status in FINISHED:
            self.budget.ended(rollout_id, record.span_bytes)
        elif previous is not None and previous.rollout.status in FINISHED:
            self.budget.active(rollout_id)

    def remove(self, rollout_id: str) -> None:
        """Remove a record and its spans."""
        slot = self.slots.pop(rollout_id)
        self.entries = None
        record = slot.record
        for view in self._views.values():
            view.remove(record, slot.number)
        self._leave(slot)
        self._count(record, None)
        self._hold(slot, rollout_id, None)
        self.deadlines.put(rollout_id, None)
        self.budget.active(rollout_id)
        self.drop_spans(rollout_id, record.span_bytes)
        if record.rollout.run_id not in self.sizes:
            self._queues.pop(record.rollout.run_id, None)

    def put_row(self, kind: Kind, key: str, row: Row | None) -> None:
        """Insert, replace or (None) remove a row."""
        rows = self.rows.setdefault(kind, {})
        if row is None:
            rows.pop(key, None)
        else:
            rows[key] = row
        if kind == "run":
            self._runs_changed.pop(key, None)
            if row is not None:
                self.last_change += 1
                self._runs_changed[key] = self.last_change

    def changed_after(self, change: int) -> list[tuple[int, Record | RunRow]]:
        """Return the records and runs changed after this number, each with its number, in the order of changes."""
        slots = itertools.takewhile(lambda slot: slot.change > change, reversed(self.slots.values()))
        changes: list[tuple[int, Record | RunRow]] = [(slot.change, slot.record) for slot in slots]
        runs = itertools.takewhile(lambda item: item[1] > change, reversed(self._runs_changed.items()))
        of_runs = [(number, cast("RunRow", self.rows["run"][run_id])) for run_id, number in runs]
        if of_runs:
            return sorted([*changes, *of_runs], key=itemgetter(0))
        return changes[::-1]

    def _count(self, previous: Record | None, record: Record | None) -> None:
        if previous is None or record is None:  # one that changes stays in its run
            counted, sign = (previous, -1) if record is None else (record, 1)
            assert counted is not None
            run_id = counted.rollout.run_id
            counts = self.sizes.get(run_id)
            if counts is None:
                counts = self.sizes[run_id] = Counts()
            counts.rollouts += sign
            counts.attempts += sign * len(counted.attempts)
            counts.spans += sign * counted.span_count
            counts.span_bytes += sign * counted.span_bytes
            if not counts.rollouts:
                del self.sizes[run_id]
        else:
            counts = self.sizes[record.rollout.run_id]
            counts.attempts += len(record.attempts) - len(previous.attempts)
            counts.spans += record.span_count - previous.span_count
            counts.span_bytes += record.span_bytes - previous.span_bytes

    def _hold(self, slot: Slot, rollout_id: str, holder: str | None) -> None:
        before, slot.holder = slot.holder, holder
        if before is not None:
            held = self.held[before]
            held.pop(rollout_id, None)
            if not held:
                del self.held[before]
        if holder is not None:
            self.held.setdefault(holder, {})[rollout_id] = None

    # --- spans -----------------------------------------------------------------------------------------------------

    def add_spans(self, added: dict[str, dict[str, StoredSpan]], size: int) -> None:
        """Store spans by rollout. `size` is their approximate size as JSON in bytes."""
        for rollout_id, bodies in added.items():
            if rollout_id in self.spans:
                self.spans[rollout_id].update(bodies)
            elif bodies:
                self.spans[rollout_id] = bodies
        self.budget.bytes += size

    def drop_spans(self, rollout_id: str, size: int) -> None:
        """Remove the spans of a rollout. `size` is their size in bytes."""
        self.spans.pop(rollout_id, None)
        self.budget.bytes -= size

    def evict(self) -> None:
        """Evict spans until they are within their limit."""
        for rollout_id in self.budget.surplus():
            record = self.slots[rollout_id].record.copy()
            self.drop_spans(rollout_id, record.span_bytes)
            record.span_count, record.span_bytes, record.attempts_dropped = 0, 0, len(record.attempts)
            self.put(record)


def span_key(attempt_id: str, span_id: str) -> str:
    """Return the key of a span within its rollout: one string, to save memory. Attempt ids have no newline."""
    return f"{attempt_id}\n{span_id}"
