"""The records of runs in memory, in the order of their steps, and their size limit.

Above the limit, the oldest ledger records lose their per-token part, then their other data, and are marked.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence
from itertools import islice
from operator import attrgetter
from typing import Any

from agentlightning.errors import BusyError
from agentlightning.store.rules.query import FoundRecords, RecordPlan
from agentlightning.store.rules.tx import NewRunRecord
from agentlightning.types import RecordKind

DEFAULT_BYTES = 256 << 20
_SAFE_PART = 0.8
_LEFT = 160
"""Largest size in bytes of a ledger record without its data, excluding its name."""
_PLACE = attrgetter("place")
_STEP = attrgetter("step")


class _Stored:
    """One record."""

    __slots__ = ("body", "gone", "kind", "name", "place", "step")

    def __init__(self, record: NewRunRecord, number: int) -> None:
        self.kind: RecordKind = record.kind
        self.step, self.name, self.body = record[1:]
        self.place = (record.step, number)
        self.gone = False


class _Run:
    """The records of one run: all records, the records of each kind and of each name, each list in order."""

    def __init__(self) -> None:
        self.by_key: dict[tuple[str, int, str], _Stored] = {}
        self.all: list[_Stored] = []
        self.kinds: dict[RecordKind, list[_Stored]] = {}
        self.names: dict[str, list[_Stored]] = {}

    def lists_of(self, stored: _Stored) -> tuple[list[_Stored], ...]:
        return self.all, self.kinds.setdefault(stored.kind, []), self.names.setdefault(stored.name, [])


class RunRecords:
    """The records of all runs of one store. The caller must hold the lock of the store."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self._number = 0
        self._runs: dict[str, _Run] = {}
        self._whole: deque[_Stored] = deque()
        """Ledger records with all their data, oldest first."""
        self._partial: deque[_Stored] = deque()
        """Ledger records without their per-token part."""
        self._evictable = 0

    def add(self, run_id: str, records: Sequence[NewRunRecord]) -> list[bool]:
        """Store the records that do not exist yet; return for each one whether it was new.

        Raises:
            BusyError: they do not fit even after eviction. Nothing was stored.
        """
        present = self._runs[run_id].by_key.keys() if run_id in self._runs else ()
        new: dict[tuple[str, int, str], NewRunRecord] = {}
        fresh = [record[:3] not in present and new.setdefault(record[:3], record) is record for record in records]
        size = sum(len(record.body) for record in new.values())
        evictable = self._evictable + sum(
            _evictable(record.kind, record.name, len(record.body)) for record in new.values()
        )
        if self.bytes + size - evictable > self.limit:
            raise BusyError(
                f"The store is full: it has {self.bytes} bytes of run records, the limit is {self.limit}, and {size} "
                "more do not fit. Delete runs, increase max_record_bytes, or use sqlite:///FILE.",
                retry_after=2.0,
            )
        run = self._runs.setdefault(run_id, _Run()) if new else _Run()
        for key, record in new.items():
            self._number += 1
            stored = run.by_key[key] = _Stored(record, self._number)
            for entries in run.lists_of(stored):
                if not entries or entries[-1].place < stored.place:
                    entries.append(stored)
                else:
                    insort(entries, stored, key=_PLACE)
            if record.kind == "ledger":
                self._whole.append(stored)
        self.bytes += size
        self._evictable = evictable
        if self.bytes > self.limit:
            self._evict()
        return fresh

    def find(self, plan: RecordPlan) -> FoundRecords:
        """Return one page of records."""
        run = self._runs.get(plan.run_id)
        if run is None:
            return FoundRecords([], 0, None)
        kinds = None if plan.kind_in is None else set(plan.kind_in)
        if plan.name is not None:
            entries = run.names.get(plan.name, [])
        elif kinds is not None and len(kinds) == 1:
            entries, kinds = next((run.kinds[kind] for kind in run.kinds if kind in kinds), list[_Stored]()), None
        else:
            entries = run.all
        first = 0 if plan.step_from is None else bisect_left(entries, plan.step_from, key=_STEP)
        end = len(entries) if plan.step_to is None else bisect_right(entries, plan.step_to, key=_STEP)
        if kinds is not None:
            entries = [stored for stored in entries[first:end] if stored.kind in kinds]
            first, end = 0, len(entries)
        total = max(0, end - first) if plan.total is None or plan.after is None else plan.total
        if plan.after is not None and plan.descending:
            end = min(end, bisect_left(entries, plan.after, key=_PLACE))
        elif plan.after is not None:
            first = max(first, bisect_right(entries, plan.after, key=_PLACE))
        chosen = range(first, max(first, end))
        page = (chosen[::-1] if plan.descending else chosen)[plan.offset :]
        count = plan.cut(len(entries[index].body) for index in page)
        last = entries[page[count - 1]].place if count and count < len(page) and plan.limit != -1 else None
        return FoundRecords([entries[index].body for index in islice(page, count)], total, last)

    def drop(self, run_id: str, after_step: int) -> int:
        """Remove the records of a run after a step; return the number removed."""
        run = self._runs.get(run_id)
        if run is None:
            return 0
        removed = run.all[bisect_right(run.all, after_step, key=_STEP) :]
        for stored in removed:
            stored.gone = True
            self.bytes -= len(stored.body)
            self._evictable -= _evictable(stored.kind, stored.name, len(stored.body))
            del run.by_key[stored.kind, stored.step, stored.name]
        if not run.by_key:
            del self._runs[run_id]
        elif removed:
            for entries in (run.all, *run.kinds.values(), *run.names.values()):
                del entries[bisect_right(entries, after_step, key=_STEP) :]
            run.names = {name: entries for name, entries in run.names.items() if entries}
        if removed:
            self._whole = deque(stored for stored in self._whole if not stored.gone)
            self._partial = deque(stored for stored in self._partial if not stored.gone)
        return len(removed)

    def counts(self, run_id: str) -> dict[RecordKind, tuple[int, int]]:
        """Return the number of records and the greatest step of each kind of record of a run."""
        run = self._runs.get(run_id)
        return {} if run is None else {kind: (len(e), e[-1].step) for kind, e in run.kinds.items() if e}

    def _evict(self) -> None:
        """Evict data until the records are slightly below the limit."""
        safe = int(self.limit * _SAFE_PART)
        while self.bytes > safe and self._whole:
            stored = self._whole.popleft()
            self._partial.append(stored)
            record = json.loads(stored.body)
            if record["data"].pop("rows", None) is not None:
                record["data"]["evicted"] = True
                self._shrink(stored, record)
        while self.bytes > safe and self._partial:
            stored = self._partial.popleft()
            self._shrink(stored, {**json.loads(stored.body), "data": {"evicted": True}})

    def _shrink(self, stored: _Stored, record: dict[str, Any]) -> None:
        body = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
        if len(body) < len(stored.body):
            self.bytes += len(body) - len(stored.body)
            self._evictable -= _evictable(stored.kind, stored.name, len(stored.body))
            self._evictable += _evictable(stored.kind, stored.name, len(body))
            stored.body = body


def _evictable(kind: str, name: str, size: int) -> int:
    """Return the number of bytes that eviction of a record frees at least."""
    if kind != "ledger" or size <= _LEFT:
        return 0
    return max(0, size - _LEFT - len(json.dumps(name, ensure_ascii=False).encode()))
