"""The queue of one run in memory: what may be claimed next, and what may be claimed later.

Entries mostly come in the order in which they are claimed: those stand in line, which costs the same however long it
is. Two heaps hold what comes out of order, and what may be claimed later only. The owner knows which entries are valid;
one that is not is dropped when it comes to the front.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

Entry = tuple[int, float, int, str]
"""(minus priority, available at, number, rollout id): the order in which rollouts are claimed."""


class RunQueue:
    """Entries by claim order. The owner puts an entry in once and says so when one that is in it stops being valid."""

    __slots__ = ("_delayed", "_is_valid", "_left", "_line", "_ready")

    def __init__(self, is_valid: Callable[[Entry], bool]) -> None:
        self._is_valid = is_valid
        self._line: deque[Entry] = deque()
        self._ready: list[Entry] = []
        self._delayed: list[tuple[float, Entry]] = []
        self._left = 0

    def put(self, entry: Entry, *, ready: bool) -> None:
        """Add an entry; one that is not `ready` may be claimed from the moment on that it names."""
        if not ready:
            heapq.heappush(self._delayed, (entry[1], entry))
        elif not self._line or self._line[-1] < entry:
            self._line.append(entry)
        else:
            heapq.heappush(self._ready, entry)

    def left(self) -> None:
        """An entry is no longer valid. Those that are not are dropped before they are more than half."""
        self._left += 1
        if 2 * self._left > len(self._line) + len(self._ready) + len(self._delayed) + 64:
            self._left = 0
            self._line = deque(filter(self._is_valid, self._line))
            self._ready = list(filter(self._is_valid, self._ready))
            self._delayed = [pair for pair in self._delayed if self._is_valid(pair[1])]
            heapq.heapify(self._ready)
            heapq.heapify(self._delayed)

    def take(self, now: float) -> Entry | None:
        """Take out and return the entry to be claimed next; `put` gives it back."""
        while self._delayed and self._delayed[0][0] <= now:
            heapq.heappush(self._ready, heapq.heappop(self._delayed)[1])
        while self._line or self._ready:
            in_line = not self._ready or (self._line and self._line[0] < self._ready[0])
            entry = self._line.popleft() if in_line else heapq.heappop(self._ready)
            if self._is_valid(entry):
                return entry
        return None

    def earliest(self) -> float | None:
        """Return a moment at which something is available: past if anything is, else the first one; None if empty."""
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
