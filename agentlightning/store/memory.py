"""The store in memory: dictionaries, the queue as an ordered view, spans as encoded bytes. Gone with the process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from typing_extensions import override

from agentlightning.store.backend import Counts, Kind, Notes, Record, Row, Tx
from agentlightning.store.engine import EngineStore
from agentlightning.store.query import Plan, page_of
from agentlightning.types import Span

R = TypeVar("R")
SpanKey = tuple[str, str]
"""(attempt id, span id) within a rollout."""

_encode = Span.__pydantic_serializer__.to_json
_decode = Span.__pydantic_validator__.validate_json


class _Data:
    """What is there between two scripts."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.queues: dict[str | None, dict[str, None]] = {}
        self.deadlines: dict[str, float] = {}
        self.held: dict[str, dict[str, None]] = {}
        self.spans: dict[str, dict[SpanKey, bytes]] = {}
        self.rows: dict[Kind, dict[str, Row]] = {}
        self.attempts = 0
        self.span_count = 0
        self.span_bytes = 0


class _MemoryTx:
    """One script: reads the data, keeps its writes aside until `apply`."""

    def __init__(self, data: _Data) -> None:
        self.notes = Notes()
        self._data = data
        self._records: dict[str, Record] = {}
        self._spans: dict[str, dict[SpanKey, bytes]] = {}
        self._rows: dict[tuple[Kind, str], Row | None] = {}

    def load(self, rollout_id: str) -> Record | None:
        record = self._records.get(rollout_id) or self._data.records.get(rollout_id)
        return None if record is None else record.copy()

    def save(self, record: Record) -> None:
        self._records[record.rollout.rollout_id] = record.copy()

    def claim(self, run_id: str | None) -> Record | None:
        for rollout_id in self._data.queues.get(run_id, ()):
            record = self._records.get(rollout_id) or self._data.records[rollout_id]
            if record.queued_at is not None:
                return record.copy()
        return None

    def find(self, plan: Plan) -> tuple[list[Record], int]:
        assert not self._records, "find is for reading scripts"
        records = self._data.records
        if plan.ids is not None and not plan.any_of:
            chosen = [records[i] for i in dict.fromkeys(plan.ids) if i in records]
        else:
            chosen = records.values()
        matches = {record.rollout.rollout_id: record for record in chosen if plan.matches(record.rollout)}
        rollouts = [record.rollout for record in matches.values()]
        page, total = page_of(rollouts, plan.sort_by, plan.descending, plan.limit, plan.offset)
        return [matches[rollout.rollout_id].copy() for rollout in page], total

    def due(self, now: float, limit: int) -> list[Record]:
        late = [rollout_id for rollout_id, deadline in self._data.deadlines.items() if deadline < now]
        return [self._data.records[rollout_id].copy() for rollout_id in late[:limit]]

    def held(self, worker_id: str, limit: int) -> list[tuple[str, str]]:
        changed = [record for record in reversed(self._records.values()) if record.holder == worker_id]
        pairs = [(r.rollout.rollout_id, r.attempts[-1].attempt_id) for r in changed]
        for rollout_id in reversed(self._data.held.get(worker_id, {})):
            if len(pairs) >= limit:
                break
            if rollout_id not in self._records:
                pairs.append((rollout_id, self._data.records[rollout_id].attempts[-1].attempt_id))
        return pairs[:limit]

    def add_spans(self, spans: Sequence[Span]) -> list[bool]:
        new: list[bool] = []
        for span in spans:
            stored = self._data.spans.get(span.rollout_id, {})
            added = self._spans.setdefault(span.rollout_id, {})
            key = (span.attempt_id, span.span_id)
            is_new = key not in stored and key not in added
            if is_new:
                added[key] = _encode(span)
            new.append(is_new)
        return new

    def spans(self, rollout_id: str, attempt_id: str | None) -> list[Span]:
        bodies = {**self._data.spans.get(rollout_id, {}), **self._spans.get(rollout_id, {})}
        return [_decode(body) for key, body in bodies.items() if attempt_id is None or key[0] == attempt_id]

    def get(self, kind: Kind, key: str) -> Row | None:
        if (kind, key) in self._rows:
            return self._rows[kind, key]
        return self._data.rows.get(kind, {}).get(key)

    def put(self, kind: Kind, key: str, row: Row) -> None:
        self._rows[kind, key] = row

    def drop(self, kind: Kind, key: str) -> None:
        self._rows[kind, key] = None

    def scan(self, kind: Kind) -> list[tuple[str, Row]]:
        rows = dict(self._data.rows.get(kind, {}))
        rows.update({key: row for (k, key), row in self._rows.items() if k == kind and row is not None})
        return [(key, row) for key, row in rows.items() if self._rows.get((kind, key), row) is not None]

    def apply(self) -> None:
        """Make the writes real; nothing here can fail half-way."""
        data = self._data
        for rollout_id, record in self._records.items():
            self._apply_record(rollout_id, record)
        for rollout_id, added in self._spans.items():
            data.spans.setdefault(rollout_id, {}).update(added)
            data.span_count += len(added)
            data.span_bytes += sum(map(len, added.values()))
        for (kind, key), row in self._rows.items():
            if row is None:
                data.rows.setdefault(kind, {}).pop(key, None)
            else:
                data.rows.setdefault(kind, {})[key] = row

    def _apply_record(self, rollout_id: str, record: Record) -> None:
        data = self._data
        known = data.records.get(rollout_id)
        data.attempts += len(record.attempts) - (len(known.attempts) if known else 0)
        data.records[rollout_id] = record
        queue = data.queues.setdefault(record.rollout.run_id, {})
        if record.queued_at is None:
            queue.pop(rollout_id, None)
        elif known is None or known.queued_at != record.queued_at:
            queue.pop(rollout_id, None)
            queue[rollout_id] = None
        before, holder = known.holder if known else None, record.holder
        if before is not None and before != holder:
            data.held[before].pop(rollout_id, None)
        if holder is not None and before != holder:
            data.held.setdefault(holder, {})[rollout_id] = None
        if record.deadline is None:
            data.deadlines.pop(rollout_id, None)
        else:
            data.deadlines[rollout_id] = record.deadline


class MemoryBackend:
    """Runs scripts inline under one lock, from any thread. Scripts never suspend: microseconds each."""

    shared = False
    persistent = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._data = _Data()

    def execute(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        with self._lock:
            tx = _MemoryTx(self._data)
            result = script(tx)
            if write:
                tx.apply()
            return result, tx.notes

    async def run(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        return self.execute(script, write=write)

    def counts(self) -> Counts:
        data = self._data
        return Counts(len(data.records), data.attempts, data.span_count, data.span_bytes)

    def close(self) -> None:
        """Nothing to release."""


class InMemoryLightningStore(EngineStore):
    """A store that lives in this process; usable from any thread and event loop.

    `thread_safe` is accepted for programs that pass it; the store is always thread-safe.
    """

    def __init__(
        self, *, thread_safe: bool = True, scan_debounce_seconds: float = 10.0, lease_seconds: float = 30.0
    ) -> None:
        super().__init__(MemoryBackend(), scan_debounce_seconds=scan_debounce_seconds, lease_seconds=lease_seconds)

    @override
    def __reduce__(self) -> str:
        raise TypeError(
            "InMemoryLightningStore lives in one process and cannot be sent to another: "
            "serve it with LightningStoreServer, or use sqlite:///FILE"
        )
