"""Which spans go when memory is full: those of ended rollouts, read ones first, the oldest first. Never active ones."""

from __future__ import annotations


class SpanBudget:
    """Keeps the bytes of spans within a bound. Knows rollouts by id only; the store drops what it names."""

    def __init__(self, limit: int, safe: int) -> None:
        self.limit = limit
        """Bytes of spans that are never exceeded."""
        self.safe = safe
        """Eviction goes on until so many bytes are left."""
        self.bytes = 0
        self._ended: dict[str, int] = {}
        self._read: dict[str, int] = {}
        self._evictable = 0

    def room_for(self, size: int) -> bool:
        """True if so many bytes fit, after evicting all that may be evicted."""
        return self.bytes - self._evictable + size <= self.limit

    def ended(self, rollout_id: str, size: int) -> None:
        """A rollout that has ended holds so many bytes of spans."""
        if not size:
            self.active(rollout_id)
            return
        known = self._read if rollout_id in self._read else self._ended
        self._evictable += size - known.get(rollout_id, 0)
        known[rollout_id] = size

    def active(self, rollout_id: str) -> None:
        """A rollout runs (again), or is gone: its spans stay where they are."""
        self._evictable -= self._ended.pop(rollout_id, 0) + self._read.pop(rollout_id, 0)

    def read(self, rollout_id: str) -> None:
        """Somebody has read the spans of a rollout."""
        size = self._ended.pop(rollout_id, None)
        if size is not None:
            self._read[rollout_id] = size

    def surplus(self) -> list[str]:
        """Return the rollouts to drop the spans of; none while the bound is kept."""
        if self.bytes <= self.limit:
            return []
        chosen: list[str] = []
        left = self.bytes
        for sizes in (self._read, self._ended):
            for rollout_id, size in sizes.items():
                if left <= self.safe:
                    return chosen
                chosen.append(rollout_id)
                left -= size
        return chosen
