"""The store in memory: its class, and the execution of scripts over its data (`data.py`)."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from typing_extensions import override

from agentlightning.errors import BadRequestError, BusyError
from agentlightning.store.base import LightningStoreStatistics
from agentlightning.store.engine import EngineStore
from agentlightning.store.memory.data import Data, Entry, StoredSpan, span_key
from agentlightning.store.memory.eviction import SpanBudget, span_budget
from agentlightning.store.memory.index import suits
from agentlightning.store.memory.run_records import DEFAULT_BYTES, RunRecords
from agentlightning.store.memory.spans import BULK, DEFAULT_DECODED_BYTES, KeptSpan, Rows, row_of
from agentlightning.store.memory.summaries import entries_of
from agentlightning.store.rules.durable import page_of_records
from agentlightning.store.rules.query import FoundRecords, Plan, RecordPlan, read_cursor
from agentlightning.store.rules.tx import (
    Choice,
    Counts,
    Found,
    Kind,
    NewRunRecord,
    Notes,
    Record,
    Row,
    RunRow,
    SpanBody,
    Tx,
)
from agentlightning.store.summaries.aggregate import AggregatePlan, aggregate_entries
from agentlightning.store.summaries.plan import SummaryPlan, page_of_entries
from agentlightning.types import RecordKind, RetentionPolicy, RolloutAggregate, Span, SummaryPage
from agentlightning.utils.otlp.unread import UnreadSpan
from agentlightning.utils.system_snapshot import memory_capacity_bytes

if TYPE_CHECKING:
    from agentlightning.utils.metrics import MetricsBackend

R = TypeVar("R")
_encode = partial(Span.__pydantic_serializer__.to_json, exclude_defaults=True)
_NO_SPANS: dict[str, StoredSpan] = {}


class MemoryTx:
    """The primitives of one script. Reads the data, and buffers writes until the script ends.

    A saved record belongs to the store. A read-only script gets the store's own records, and a writing script gets
    copies.
    """

    __slots__ = ("_added", "_data", "_new", "_new_size", "_records", "_rows", "_spans", "_taken", "_write", "notes")

    def __init__(self, data: Data, write: bool) -> None:
        self.notes = Notes([], [], [], [], [], False, [])
        self._data = data
        self._write = write
        self._records: dict[str, Record | None] = {}
        self._taken: list[Entry] = []
        self._spans: dict[str, dict[str, StoredSpan]] = {}
        self._added = 0
        self._new: list[KeptSpan] = []
        """New spans to keep as rows, with a size of `_new_size` bytes."""
        self._new_size = 0
        self._rows: dict[tuple[Kind, str], Row | None] = {}

    def commit(self) -> None:
        """Apply the writes. Nothing here can fail half-way."""
        data = self._data
        if self._spans:
            data.add_spans(self._spans, self._added)
            if self._new:
                data.rows_of_spans.add(self._new, self._new_size)
        for rollout_id, record in self._records.items():
            if record is not None:
                data.put(record)
            elif rollout_id in data.slots:
                data.remove(rollout_id)
        if self._rows:
            for (row_kind, key), row in self._rows.items():
                data.put_row(row_kind, key, row)
        if data.budget.bytes > data.budget.limit:
            data.evict()

    def give_back(self) -> None:
        """Return rollouts that were claimed but are still queued to their queues."""
        for entry in self._taken:
            self._data.give_back(entry)

    def load(self, rollout_id: str) -> Record | None:
        if rollout_id in self._records:
            record = self._records[rollout_id]
            return None if record is None else record.copy()
        slot = self._data.slots.get(rollout_id)
        if slot is None:
            return None
        return slot.record.copy() if self._write else slot.record

    def save(self, record: Record) -> None:
        self._records[record.rollout.rollout_id] = record

    def delete(self, rollout_id: str) -> bool:
        if self.load(rollout_id) is None:
            return False
        self._records[rollout_id] = None
        self._spans.pop(rollout_id, None)
        return True

    def set_aside(self, rollout_id: str) -> None:
        raise AssertionError("a store in memory has no damaged records")

    def claim(self, run_id: str | None, now: float) -> Record | None:
        while (entry := self._data.take(run_id, now)) is not None:
            self._taken.append(entry)
            record = self.load(entry[3])
            if record is not None and record.queued_at is not None:
                return record
        return None

    def next_available(self, run_id: str | None) -> float | None:
        return self._data.next_available(run_id)

    def find(self, plan: Plan) -> Found:
        assert not self._write, "find is for reading scripts"
        slots = self._data.slots
        if not suits(plan):
            by_id = plan.ids is not None and not plan.any_of
            candidates = [slots[i] for i in dict.fromkeys(plan.ids or ()) if i in slots] if by_id else slots.values()
            chosen = sorted(candidates, key=lambda slot: slot.number)
            matches = [slot.record for slot in chosen if plan.matches(slot.record.rollout)]
            if plan.sort_by is None and plan.limit in (-1, 0) and not plan.offset and plan.after is None:
                return Found([] if plan.limit == 0 else matches, len(matches))
            return page_of_records(matches, {slot.record.rollout.rollout_id: slot.number for slot in chosen}, plan)
        view, total, by_name = self._data.view(plan.sort_by), plan.total, plan.id_contains is not None or plan.any_of
        keys = view.behind(plan)
        if by_name:
            keys = (key for key in keys if plan.matches(slots[key[2]].record.rollout))
        if total is None:
            total = sum(plan.matches(slot.record.rollout) for slot in slots.values()) if by_name else view.count(plan)
        if not plan.limit:
            return Found([], total)
        end = None if plan.limit == -1 else plan.offset + plan.one_more
        page, after = list(itertools.islice(keys, plan.offset, end)), None
        if 0 < plan.limit < len(page):
            page = page[: plan.limit]
            value, number, _ = page[-1]
            after = (None if plan.sort_by is None or value == math.inf else value, number)
        return Found([slots[key[2]].record for key in page], total, after)

    def find_summaries(self, plan: SummaryPlan) -> SummaryPage:
        return page_of_entries(entries_of(self._data), plan)

    def aggregate(self, plan: AggregatePlan) -> RolloutAggregate:
        return aggregate_entries(entries_of(self._data), plan)

    def runs(self) -> list[str | None]:
        return list(self._data.sizes)

    def counts(self, run_id: tuple[str | None] | None = None) -> Counts:
        chosen = self._data.sizes.values() if run_id is None else [self._data.sizes.get(run_id[0]) or Counts()]
        return Counts(
            sum(c.rollouts for c in chosen),
            sum(c.attempts for c in chosen),
            sum(c.spans for c in chosen),
            sum(c.span_bytes for c in chosen),
        )

    def changes(self, after: str, limit: int) -> tuple[list[Record | RunRow], str]:
        assert not self._write, "changes is for reading scripts"
        cursor = read_cursor(after, self._data.last_change)
        page = self._data.changed_after(cursor)[:limit]
        return [changed for _, changed in page], str(page[-1][0] if page else cursor)

    def last_change(self) -> str:
        return str(self._data.last_change)

    def due(self, now: float, limit: int) -> list[Record]:
        return [self._data.slots[rollout_id].record.copy() for rollout_id in self._data.deadlines.due(now, limit)]

    def held(self, worker_id: str, limit: int) -> list[tuple[str, str]]:
        slots = self._data.slots
        ids = {i for i in self._data.held.get(worker_id, ()) if i not in self._records}
        ids.update(i for i, record in self._records.items() if record is not None and record.holder == worker_id)
        newest = heapq.nlargest(limit, ids, key=lambda i: slots[i].number if i in slots else math.inf)
        records = [self._records.get(i) or slots[i].record for i in newest]
        return [(record.rollout.rollout_id, record.attempts[-1].attempt_id) for record in records]

    def any_held(self) -> bool:
        return bool(self._data.held)

    def add_spans(self, spans: Sequence[Span | UnreadSpan]) -> list[int]:
        sizes, is_bulk = list[int](), len(spans) > BULK
        place, stored, added = None, _NO_SPANS, dict[str, StoredSpan]()
        for span in spans:
            if span.rollout_id != place:
                place = span.rollout_id
                stored, added = self._data.spans.get(place, _NO_SPANS), self._spans.setdefault(place, {})
            key = span_key(span.attempt_id, span.span_id)
            if key in stored or key in added:
                sizes.append(0)
                continue
            if isinstance(span, UnreadSpan):
                added[key], size = KeptSpan(span, span.sequence_id), len(span)
            elif is_bulk or (encoded := row_of(span)) is None:
                body = added[key] = _encode(span)
                size = len(body)
            else:
                row, size, row_size = encoded
                kept_span = added[key] = KeptSpan(row, span.sequence_id)
                self._new.append(kept_span)
                self._new_size += row_size
            sizes.append(size)
        self._added += sum(sizes)
        if not self._data.budget.room_for(self._added):
            raise BusyError(
                f"The store is full: it has {self._data.budget.bytes} bytes of spans of rollouts that have not ended "
                f"(limit: {self._data.budget.limit}). End rollouts, increase max_span_bytes, or use sqlite:///FILE.",
                retry_after=2.0,
            )
        return sizes

    def span_bodies(
        self, rollout_id: str, attempt_id: str | None, span_id: str | None = None, choose: Choice | None = None
    ) -> Sequence[SpanBody]:
        bodies = self._span_bodies(rollout_id, attempt_id, span_id)
        return bodies if choose is None else [bodies[place] for place in choose(bodies)]

    def _span_bodies(self, rollout_id: str, attempt_id: str | None, span_id: str | None) -> Sequence[SpanBody]:
        stored, added = self._data.spans.get(rollout_id, {}), self._spans.get(rollout_id)
        bodies = {**stored, **added} if added else stored
        self._data.budget.read(rollout_id)
        if attempt_id is None and span_id is None:
            return list(bodies.values())
        if attempt_id is None:
            return [body for key, body in bodies.items() if key.partition("\n")[2] == span_id]
        if span_id is None:
            of_attempt = span_key(attempt_id, "")
            return [body for key, body in bodies.items() if key.startswith(of_attempt)]
        body = bodies.get(span_key(attempt_id, span_id))
        return [] if body is None else [body]

    def add_run_records(self, run_id: str, records: Sequence[NewRunRecord]) -> list[bool]:
        return self._data.run_records.add(run_id, records)

    def find_run_records(self, plan: RecordPlan) -> FoundRecords:
        return self._data.run_records.find(plan)

    def drop_run_records(self, run_id: str, after_step: int) -> int:
        return self._data.run_records.drop(run_id, after_step)

    def count_run_records(self, run_id: str) -> dict[RecordKind, tuple[int, int]]:
        return self._data.run_records.counts(run_id)

    def get(self, kind: Kind, key: str) -> Row | None:
        if (kind, key) in self._rows:
            return self._rows[kind, key]
        return self._data.rows.get(kind, {}).get(key)

    def put(self, kind: Kind, key: str, row: Row) -> None:
        self._rows[kind, key] = row

    def drop(self, kind: Kind, key: str) -> None:
        self._rows[kind, key] = None

    def scan(self, kind: Kind, limit: int | None = None) -> list[tuple[str, Row]]:
        stored = self._data.rows.get(kind, {})
        if not self._rows:
            return list(itertools.islice(stored.items(), limit))
        rows = dict(stored)
        rows.update({key: row for (k, key), row in self._rows.items() if k == kind and row is not None})
        pairs = ((key, row) for key, row in rows.items() if self._rows.get((kind, key), row) is not None)
        return list(itertools.islice(pairs, limit))

    def count_rows(self, kind: Kind) -> int:
        return len(self.scan(kind)) if self._rows else len(self._data.rows.get(kind, {}))


class MemoryBackend:
    """Run scripts inline under one lock, from any thread. Scripts never suspend and take microseconds."""

    shared = False
    persistent = False
    inline = True
    """`execute` can be called on an event loop."""
    keeps_unread = True
    """Spans from an exporter are kept unread."""

    def __init__(
        self,
        budget: SpanBudget | None = None,
        max_record_bytes: int = DEFAULT_BYTES,
        max_decoded_span_bytes: int = DEFAULT_DECODED_BYTES,
    ) -> None:
        if max_record_bytes < 1:
            raise BadRequestError(f"max_record_bytes must be at least 1; got {max_record_bytes}")
        if max_decoded_span_bytes < 0:
            raise BadRequestError(f"max_decoded_span_bytes must not be negative; got {max_decoded_span_bytes}")
        budget = budget or span_budget()
        self._lock = threading.Lock()
        self._data = Data(budget, RunRecords(max_record_bytes), Rows(min(max_decoded_span_bytes, budget.limit)))

    def execute(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        with self._lock:
            tx = MemoryTx(self._data, write)
            try:
                result = script(tx)
                if write:
                    tx.commit()
            finally:
                tx.give_back()
            return result, tx.notes

    async def run(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        return self.execute(script, write=write)

    def now(self) -> float:
        return time.time()

    def set_clock(self) -> None:
        """Do nothing, because there is only one clock."""

    def await_change(self, timeout: float) -> bool:
        """Return False, because no other process has this data."""
        return False

    def close(self) -> None:
        """Do nothing."""


class InMemoryLightningStore(EngineStore):
    """A store in the memory of this process. Usable from any thread and event loop.

    `max_span_bytes` is the largest size of the encoded spans (default: a quarter of the machine's memory). Above it,
    spans of ended rollouts are evicted, read ones first; reading evicted spans raises `GoneError`. Spans of rollouts
    that have not ended are never evicted: if they reach the limit, `add_span` raises `BusyError`.
    `eviction_memory_threshold` is the same limit, and `safe_memory_threshold` the size at which eviction stops, in
    bytes (int) or as a share of the machine's memory (float). The latest spans are also kept decoded for fast reading,
    in at most `max_decoded_span_bytes`. `max_record_bytes` is the largest size of run records: above it, the oldest
    ledger records lose their per-token part, then their other data, and are marked (`evicted`). `thread_safe` is
    ignored: the store is always thread-safe.
    """

    def __init__(
        self,
        *,
        thread_safe: bool = True,
        max_span_bytes: int | None = None,
        eviction_memory_threshold: float | None = None,
        safe_memory_threshold: float | None = None,
        max_record_bytes: int = DEFAULT_BYTES,
        max_decoded_span_bytes: int = DEFAULT_DECODED_BYTES,
        scan_debounce_seconds: float = 10.0,
        lease_seconds: float = 30.0,
        retention: RetentionPolicy | None = None,
        tracker: MetricsBackend | None = None,
    ) -> None:
        self._budget = span_budget(max_span_bytes, eviction_memory_threshold, safe_memory_threshold)
        super().__init__(
            MemoryBackend(self._budget, max_record_bytes, max_decoded_span_bytes),
            scan_debounce_seconds=scan_debounce_seconds, lease_seconds=lease_seconds, retention=retention,
            tracker=tracker,
        )  # fmt: skip

    @override
    async def statistics(self) -> LightningStoreStatistics:
        return {
            **(await super().statistics()),
            "eviction_threshold_bytes": self._budget.limit,
            "safe_threshold_bytes": self._budget.safe,
            "memory_capacity_bytes": memory_capacity_bytes(),
        }

    @override
    def __reduce__(self) -> str:
        raise TypeError(
            "InMemoryLightningStore cannot be sent to another process. "
            "Serve it with LightningStoreServer, or use sqlite:///FILE."
        )
