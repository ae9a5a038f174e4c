"""Eviction of spans when memory is full: those of ended rollouts, read ones first, then by age. Never active ones."""

from __future__ import annotations

from agentlightning.errors import BadRequestError
from agentlightning.utils.system_snapshot import memory_capacity_bytes

_DEFAULT_PART = 0.25
_SAFE_PART = 0.8


class SpanBudget:
    """Keeps the bytes of spans within a bound. Knows rollouts by id only; the store drops the ones that it names."""

    def __init__(self, limit: int, safe: int) -> None:
        self.limit = limit
        """Largest number of bytes of spans."""
        self.safe = safe
        """Number of bytes at which eviction stops."""
        self.bytes = 0
        self._ended: dict[str, int] = {}
        self._read: dict[str, int] = {}
        self._evictable = 0

    def room_for(self, size: int) -> bool:
        """Return True if `size` bytes fit after evicting everything that may be evicted."""
        return self.bytes - self._evictable + size <= self.limit

    def ended(self, rollout_id: str, size: int) -> None:
        """Record the bytes of spans of a rollout that has ended."""
        if not size:
            self.active(rollout_id)
            return
        sizes = self._read if rollout_id in self._read else self._ended
        self._evictable += size - sizes.get(rollout_id, 0)
        sizes[rollout_id] = size

    def active(self, rollout_id: str) -> None:
        """Record that a rollout runs (again) or was removed: its spans are not evicted."""
        self._evictable -= self._ended.pop(rollout_id, 0) + self._read.pop(rollout_id, 0)

    def read(self, rollout_id: str) -> None:
        """Record that the spans of a rollout were read."""
        size = self._ended.pop(rollout_id, None)
        if size is not None:
            self._read[rollout_id] = size

    def surplus(self) -> list[str]:
        """Return the rollouts whose spans must be dropped; none while the bound is kept."""
        if self.bytes <= self.limit:
            return []
        chosen: list[str] = []
        remaining = self.bytes
        for sizes in (self._read, self._ended):
            for rollout_id, size in sizes.items():
                if remaining <= self.safe:
                    return chosen
                chosen.append(rollout_id)
                remaining -= size
        return chosen


def span_budget(
    max_span_bytes: int | None = None, threshold: float | None = None, safe: float | None = None
) -> SpanBudget:
    """Return the bound that the arguments describe.

    Raises:
        BadRequestError: a size is negative, a part is outside 0 to 1, or the safe bound is not below the other.
    """
    if max_span_bytes is not None and threshold is not None:
        raise BadRequestError("Give max_span_bytes or eviction_memory_threshold, not both; they are the same bound")
    bound: object = threshold if max_span_bytes is None else max_span_bytes
    limit = _bytes("eviction_memory_threshold", _DEFAULT_PART if bound is None else bound)
    if limit < 1:
        raise BadRequestError(f"eviction_memory_threshold must be at least 1 bytes; got {bound!r}")
    safe_bytes = int(limit * _SAFE_PART) if safe is None else _bytes("safe_memory_threshold", safe)
    if safe_bytes >= limit:
        raise BadRequestError(
            f"safe_memory_threshold must be smaller than eviction_memory_threshold; got {safe_bytes} and {limit} bytes"
        )
    return SpanBudget(limit, safe_bytes)


def _bytes(name: str, value: float) -> int:
    if isinstance(value, int):
        if value < 0:
            raise BadRequestError(f"{name} must be non-negative; got {value} bytes")
        return value
    if not 0.0 <= value <= 1.0:
        raise BadRequestError(f"{name} ratio must be between 0 and 1; got {value} (an int would be bytes)")
    return int(value * memory_capacity_bytes())
