"""The store in memory: dictionaries, sorted views, spans as encoded bytes within a bound. Gone with the process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import override

from agentlightning.errors import BadRequestError, BusyError
from agentlightning.store.backend import Counts, Kind, Notes, Record, Row, Tx
from agentlightning.store.base import FINISHED, LightningStoreStatistics
from agentlightning.store.engine import EngineStore
from agentlightning.store.eviction import SpanBudget
from agentlightning.store.memory_index import View, suits
from agentlightning.store.memory_queue import Deadlines, Entry, RunQueue
from agentlightning.store.query import Plan, page_of
from agentlightning.types import RetentionPolicy, Span
from agentlightning.utils.system_snapshot import memory_capacity_bytes

if TYPE_CHECKING:
    from agentlightning.utils.metrics import MetricsBackend

R = TypeVar("R")
SpanKey = tuple[str, str]
"""(attempt id, span id) within a rollout."""

_encode = Span.__pydantic_serializer__.to_json
_decode = Span.__pydantic_validator__.validate_json


class _Data:
    """What is there between two scripts."""

    def __init__(self, budget: SpanBudget) -> None:
        self.records: dict[str, Record] = {}
        self.numbers: dict[str, int] = {}
        self.changes: dict[str, int] = {}
        self.queues: dict[str | None, RunQueue] = {}
        self.deadlines = Deadlines()
        self.held: dict[str, dict[str, None]] = {}
        self.views: dict[str | None, View] = {}
        self.spans: dict[str, dict[SpanKey, bytes]] = {}
        self.rows: dict[Kind, dict[str, Row]] = {}
        self.sizes: dict[str | None, Counts] = {}
        self.budget = budget
        self.last_number = 0
        self.last_change = 0

    def view(self, order: str | None) -> View:
        """Return the view in this order, made at its first use."""
        view = self.views.get(order)
        if view is None:
            view = self.views[order] = View(order)
            for rollout_id, record in self.records.items():
                view.add(*view.key(record, self.numbers[rollout_id]))
        return view

    def put(self, rollout_id: str, record: Record, now_or_earlier: bool) -> None:
        """Replace a record and everything that is derived from it."""
        known = self.records.get(rollout_id)
        if known is None:
            self.last_number += 1
            self.numbers[rollout_id] = self.last_number
        number = self.numbers[rollout_id]
        if known is None or known.rollout is not record.rollout:
            self._move(known, record, number)
        self.records[rollout_id] = record
        self.last_change += 1
        self.changes.pop(rollout_id, None)
        self.changes[rollout_id] = self.last_change
        self._count(known, record)
        available = record.available_at
        if available is not None:
            queue = self.queues.setdefault(record.rollout.run_id, RunQueue())
            queue.put((-record.rollout.priority, available, number, rollout_id), now_or_earlier=now_or_earlier)
        elif known is not None and known.queued_at is not None:
            self.queues[record.rollout.run_id].remove(rollout_id)
        self._hold(rollout_id, known.holder if known else None, record.holder)
        if record.deadline is not None or (known is not None and known.deadline is not None):
            self.deadlines.put(rollout_id, record.deadline)
        if record.rollout.status in FINISHED:
            self.budget.ended(rollout_id, record.span_bytes)
        elif known is not None and known.rollout.status in FINISHED:
            self.budget.active(rollout_id)

    def remove(self, rollout_id: str) -> None:
        """Forget a record, its spans, and everything that is derived from it."""
        known = self.records.pop(rollout_id)
        number = self.numbers.pop(rollout_id)
        for view in self.views.values():
            view.remove(*view.key(known, number))
        self.changes.pop(rollout_id, None)
        self._count(known, None)
        if known.queued_at is not None:
            self.queues[known.rollout.run_id].remove(rollout_id)
        self._hold(rollout_id, known.holder, None)
        self.deadlines.put(rollout_id, None)
        self.budget.active(rollout_id)
        self.drop_spans(rollout_id)
        if known.rollout.run_id not in self.sizes:
            self.queues.pop(known.rollout.run_id, None)

    def drop_spans(self, rollout_id: str) -> None:
        """Free the spans of a rollout."""
        self.budget.bytes -= sum(map(len, self.spans.pop(rollout_id, {}).values()))

    def evict(self) -> None:
        """Bring the spans back within their bound."""
        for rollout_id in self.budget.surplus():
            known = self.records[rollout_id]
            record = known.copy()
            record.span_count, record.span_bytes, record.attempts_dropped = 0, 0, len(record.attempts)
            self.drop_spans(rollout_id)
            self.put(rollout_id, record, now_or_earlier=True)

    def _move(self, known: Record | None, record: Record, number: int) -> None:
        for view in self.views.values():
            place = view.key(record, number)
            if known is not None:
                before = view.key(known, number)
                if before == place:
                    continue
                view.remove(*before)
            view.add(*place)

    def _count(self, known: Record | None, record: Record | None) -> None:
        some = record or known
        assert some is not None
        run_id = some.rollout.run_id
        counts = self.sizes.get(run_id)
        if counts is None:
            counts = self.sizes[run_id] = Counts()
        if known is not None:
            counts.rollouts -= 1
            counts.attempts -= len(known.attempts)
            counts.spans -= known.span_count
            counts.span_bytes -= known.span_bytes
        if record is not None:
            counts.rollouts += 1
            counts.attempts += len(record.attempts)
            counts.spans += record.span_count
            counts.span_bytes += record.span_bytes
        elif not counts.rollouts:
            del self.sizes[run_id]

    def _hold(self, rollout_id: str, before: str | None, holder: str | None) -> None:
        if before == holder:
            return
        if before is not None:
            held = self.held[before]
            held.pop(rollout_id, None)
            if not held:
                del self.held[before]
        if holder is not None:
            self.held.setdefault(holder, {})[rollout_id] = None


class _MemoryTx:
    """One script: reads the data, keeps its writes aside until `apply`."""

    def __init__(self, data: _Data) -> None:
        self.notes = Notes()
        self._data = data
        self._records: dict[str, Record | None] = {}
        self._later: set[str] = set()
        self._taken: list[tuple[str | None, Entry]] = []
        self._spans: dict[str, dict[SpanKey, bytes]] = {}
        self._added = 0
        self._rows: dict[tuple[Kind, str], Row | None] = {}

    def load(self, rollout_id: str) -> Record | None:
        changed = rollout_id in self._records
        record = self._records[rollout_id] if changed else self._data.records.get(rollout_id)
        return None if record is None else record.copy()

    def save(self, record: Record) -> None:
        self._records[record.rollout.rollout_id] = record.copy()

    def delete(self, rollout_id: str) -> bool:
        if self.load(rollout_id) is None:
            return False
        self._records[rollout_id] = None
        self._spans.pop(rollout_id, None)
        return True

    def claim(self, run_id: str | None, now: float) -> Record | None:
        queue = self._data.queues.get(run_id)
        while queue is not None and (entry := queue.take(now)) is not None:
            self._taken.append((run_id, entry))
            record = self.load(entry[3])
            if record is not None and record.queued_at is not None:
                return record
        return None

    def next_available(self, run_id: str | None) -> float | None:
        queue = self._data.queues.get(run_id)
        return queue.earliest() if queue is not None else None

    def find(self, plan: Plan) -> tuple[list[Record], int]:
        assert not self._records, "find is for reading scripts"
        records = self._data.records
        if suits(plan):
            ids, total = self._data.view(plan.sort_by).page(plan)
            return [records[rollout_id].copy() for rollout_id in ids], total
        if plan.ids is not None and not plan.any_of:
            chosen = [records[i] for i in dict.fromkeys(plan.ids) if i in records]
        else:
            chosen = records.values()
        matches = {record.rollout.rollout_id: record for record in chosen if plan.matches(record.rollout)}
        rollouts = [record.rollout for record in matches.values()]
        page, total = page_of(rollouts, plan.sort_by, plan.descending, plan.limit, plan.offset)
        return [matches[rollout.rollout_id].copy() for rollout in page], total

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

    def changes(self, after: str, limit: int) -> tuple[list[Record], str]:
        cursor = read_cursor(after)
        newer = list(itertools.takewhile(lambda pair: pair[1] > cursor, reversed(self._data.changes.items())))
        page = newer[::-1][:limit]
        records = [self._data.records[rollout_id].copy() for rollout_id, _ in page]
        return records, str(page[-1][1] if page else max(cursor, 0))

    def last_change(self) -> str:
        return str(self._data.last_change)

    def due(self, now: float, limit: int) -> list[Record]:
        return [self._data.records[rollout_id].copy() for rollout_id in self._data.deadlines.due(now, limit)]

    def held(self, worker_id: str, limit: int) -> list[tuple[str, str]]:
        changed = [record for record in reversed(self._records.values()) if record and record.holder == worker_id]
        pairs = [(r.rollout.rollout_id, r.attempts[-1].attempt_id) for r in changed]
        for rollout_id in reversed(self._data.held.get(worker_id, {})):
            if len(pairs) >= limit:
                break
            if rollout_id not in self._records:
                pairs.append((rollout_id, self._data.records[rollout_id].attempts[-1].attempt_id))
        return pairs[:limit]

    def add_spans(self, spans: Sequence[Span]) -> list[int]:
        sizes: list[int] = []
        for span in spans:
            stored = self._data.spans.get(span.rollout_id, {})
            added = self._spans.setdefault(span.rollout_id, {})
            key = (span.attempt_id, span.span_id)
            if key in stored or key in added:
                sizes.append(0)
                continue
            body = added[key] = _encode(span)
            sizes.append(len(body))
            self._added += len(body)
        if not self._data.budget.room_for(self._added):
            raise BusyError(
                f"The store holds {self._data.budget.bytes} bytes of spans of rollouts that have not ended, of at most "
                f"{self._data.budget.limit}. End rollouts, give it more room (max_span_bytes), or use sqlite:///FILE.",
                retry_after=2.0,
            )
        return sizes

    def spans(self, rollout_id: str, attempt_id: str | None, span_id: str | None = None) -> list[Span]:
        stored, added = self._data.spans.get(rollout_id, {}), self._spans.get(rollout_id)
        bodies = {**stored, **added} if added else stored
        self._data.budget.read(rollout_id)
        if attempt_id is not None and span_id is not None:
            body = bodies.get((attempt_id, span_id))
            return [] if body is None else [_decode(body)]
        return [
            _decode(body)
            for key, body in bodies.items()
            if (attempt_id is None or key[0] == attempt_id) and (span_id is None or key[1] == span_id)
        ]

    def get(self, kind: Kind, key: str) -> Row | None:
        if (kind, key) in self._rows:
            return self._rows[kind, key]
        return self._data.rows.get(kind, {}).get(key)

    def put(self, kind: Kind, key: str, row: Row) -> None:
        self._rows[kind, key] = row

    def drop(self, kind: Kind, key: str) -> None:
        self._rows[kind, key] = None

    def scan(self, kind: Kind, limit: int | None = None) -> list[tuple[str, Row]]:
        rows = dict(self._data.rows.get(kind, {}))
        rows.update({key: row for (k, key), row in self._rows.items() if k == kind and row is not None})
        left = ((key, row) for key, row in rows.items() if self._rows.get((kind, key), row) is not None)
        return list(itertools.islice(left, limit))

    def count_rows(self, kind: Kind) -> int:
        return len(self.scan(kind)) if self._rows else len(self._data.rows.get(kind, {}))

    def apply(self) -> None:
        """Make the writes real; nothing here can fail half-way."""
        data = self._data
        for rollout_id, added in self._spans.items():
            if added:
                data.spans.setdefault(rollout_id, {}).update(added)
        data.budget.bytes += self._added
        for rollout_id, record in self._records.items():
            if record is not None:
                data.put(rollout_id, record, now_or_earlier=record.available_at == record.queued_at)
            elif rollout_id in data.records:
                data.remove(rollout_id)
        for (kind, key), row in self._rows.items():
            if row is None:
                data.rows.setdefault(kind, {}).pop(key, None)
            else:
                data.rows.setdefault(kind, {})[key] = row
        self.give_back(saved=self._records)
        if data.budget.bytes > data.budget.limit:
            data.evict()

    def give_back(self, saved: dict[str, Record | None] | None = None) -> None:
        """Put what was claimed and not saved back into its queue."""
        for run_id, entry in self._taken:
            if saved is None or entry[3] not in saved:
                self._data.queues.setdefault(run_id, RunQueue()).put(entry, now_or_earlier=True)


def read_cursor(text: str) -> int:
    """Return the number in a cursor.

    Raises:
        BadRequestError: it is none.
    """
    try:
        return int(text)
    except ValueError:
        raise BadRequestError(f"{text!r} is no cursor of this store; take it from an earlier page, or '0'") from None


class MemoryBackend:
    """Runs scripts inline under one lock, from any thread. Scripts never suspend: microseconds each."""

    shared = False
    persistent = False

    def __init__(self, budget: SpanBudget | None = None) -> None:
        self._lock = threading.Lock()
        self._data = _Data(budget or _budget(None, None, None))

    def execute(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        with self._lock:
            tx = _MemoryTx(self._data)
            try:
                result = script(tx)
            except BaseException:
                tx.give_back()
                raise
            if write:
                tx.apply()
            return result, tx.notes

    async def run(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        return self.execute(script, write=write)

    def await_change(self, timeout: float) -> bool:
        """No other process sees this data."""
        return False

    def close(self) -> None:
        """Nothing to release."""


class InMemoryLightningStore(EngineStore):
    """A store that lives in this process; usable from any thread and event loop.

    `max_span_bytes` bounds the encoded spans (a quarter of the machine's memory by default). Beyond it the spans of
    ended rollouts go, read ones first; who asks for them is told (`GoneError`). Spans of rollouts that have not ended
    never go: when they alone fill the bound, `add_span` raises `BusyError`. `eviction_memory_threshold` and
    `safe_memory_threshold` are the same bound and how far eviction goes, in bytes (int) or as a part of the machine's
    memory (float). `thread_safe` is accepted for programs that pass it; the store is always thread-safe.
    """

    def __init__(
        self,
        *,
        thread_safe: bool = True,
        max_span_bytes: int | None = None,
        eviction_memory_threshold: float | None = None,
        safe_memory_threshold: float | None = None,
        scan_debounce_seconds: float = 10.0,
        lease_seconds: float = 30.0,
        retention: RetentionPolicy | None = None,
        tracker: MetricsBackend | None = None,
    ) -> None:
        self._budget = _budget(max_span_bytes, eviction_memory_threshold, safe_memory_threshold)
        super().__init__(
            MemoryBackend(self._budget),
            scan_debounce_seconds=scan_debounce_seconds,
            lease_seconds=lease_seconds,
            retention=retention,
            tracker=tracker,
        )

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
            "InMemoryLightningStore lives in one process and cannot be sent to another: "
            "serve it with LightningStoreServer, or use sqlite:///FILE"
        )


_DEFAULT_PART = 0.25
_SAFE_PART = 0.8


def _budget(max_span_bytes: int | None, threshold: float | None, safe: float | None) -> SpanBudget:
    """Return the bound that the arguments describe.

    Raises:
        BadRequestError: a negative size, a part outside 0 to 1, or a safe bound that is not below the other.
    """
    if max_span_bytes is not None and threshold is not None:
        raise BadRequestError("Give max_span_bytes or eviction_memory_threshold, not both; they are the same bound")
    given: Any = threshold if max_span_bytes is None else max_span_bytes
    limit = _bytes("eviction_memory_threshold", _DEFAULT_PART if given is None else given)
    if limit < 1:
        raise BadRequestError(f"eviction_memory_threshold must be at least 1 bytes; got {given!r}")
    kept = int(limit * _SAFE_PART) if safe is None else _bytes("safe_memory_threshold", safe)
    if kept >= limit:
        raise BadRequestError(
            f"safe_memory_threshold must be smaller than eviction_memory_threshold; got {kept} and {limit} bytes"
        )
    return SpanBudget(limit, kept)


def _bytes(name: str, value: float) -> int:
    if isinstance(value, int):
        if value < 0:
            raise BadRequestError(f"{name} must be non-negative; got {value} bytes")
        return value
    if not 0.0 <= value <= 1.0:
        raise BadRequestError(f"{name} ratio must be between 0 and 1; got {value} (an int would be bytes)")
    return int(value * memory_capacity_bytes())
