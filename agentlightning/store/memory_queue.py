"""The queue of one run in memory: what may be claimed next, and what may be claimed later.

Two heaps, from which an entry that was overtaken is taken out when it comes to the top: adding, claiming and removing
cost O(log n) at most.
"""

from __future__ import annotations

import heapq

Entry = tuple[int, float, int, str]
"""(minus priority, available at, number, rollout id): the order in which rollouts are claimed."""


class RunQueue:
    """Entries by claim order; at most one is valid for each rollout."""

    __slots__ = ("_delayed", "_ready", "_valid")

    def __init__(self) -> None:
        self._ready: list[Entry] = []
        self._delayed: list[tuple[float, Entry]] = []
        self._valid: dict[str, Entry] = {}

    def put(self, entry: Entry, *, now_or_earlier: bool) -> None:
        """Add an entry, or move the rollout's entry to another place."""
        if self._valid.get(entry[3]) == entry:
            return
        self._valid[entry[3]] = entry
        if now_or_earlier:
            heapq.heappush(self._ready, entry)
        else:
            heapq.heappush(self._delayed, (entry[1], entry))
        if len(self._ready) + len(self._delayed) > 2 * len(self._valid) + 64:
            self._compact()

    def remove(self, rollout_id: str) -> None:
        """Take a rollout out of the queue, if it is in it."""
        self._valid.pop(rollout_id, None)

    def take(self, now: float) -> Entry | None:
        """Take out and return the entry to be claimed next; `put` gives it back."""
        while self._delayed and self._delayed[0][0] <= now:
            heapq.heappush(self._ready, heapq.heappop(self._delayed)[1])
        while self._ready:
            entry = heapq.heappop(self._ready)
            if self._valid.get(entry[3]) == entry:
                del self._valid[entry[3]]
                return entry
        return None

    def earliest(self) -> float | None:
        """Return a moment at which something is available: past if anything is, else the first one; None if empty."""
        while self._ready and self._valid.get(self._ready[0][3]) != self._ready[0]:
            heapq.heappop(self._ready)
        while self._delayed and self._valid.get(self._delayed[0][1][3]) != self._delayed[0][1]:
            heapq.heappop(self._delayed)
        if self._ready:
            return self._ready[0][1]
        return self._delayed[0][0] if self._delayed else None

    def _compact(self) -> None:
        self._ready = [entry for entry in self._ready if self._valid.get(entry[3]) == entry]
        self._delayed = [pair for pair in self._delayed if self._valid.get(pair[1][3]) == pair[1]]
        heapq.heapify(self._ready)
        heapq.heapify(self._delayed)


class Deadlines:
    """Which rollouts are past their deadline: a heap whose entries may be too early, never too late."""

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
        """Return rollouts whose deadline is past, the longest past first; they stay listed."""
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
