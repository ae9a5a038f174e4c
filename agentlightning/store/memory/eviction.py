"""Eviction of spans when memory is full: spans of ended rollouts, read ones first, then by age; never active ones."""

from __future__ import annotations

from agentlightning.errors import BadRequestError
from agentlightning.utils.system_snapshot import memory_capacity_bytes

_DEFAULT_PART = 0.25
_SAFE_PART = 0.8


class SpanBudget:
    """Keep the size of spans within a limit. It knows only the ids of rollouts; the store drops their spans."""

    def __init__(self, limit: int, safe: int) -> None:
        self.limit = limit
        """Largest size of spans in bytes."""
        self.safe = safe
        """Size in bytes at which eviction stops."""
        self.bytes = 0
        self._ended: dict[str, int] = {}
        self._read: dict[str, int] = {}
        self._evictable = 0

    def room_for(self, size: int) -> bool:
        """Return True if `size` bytes fit after evicting everything that can be evicted."""
        return self.bytes - self._evictable + size <= self.limit

    def ended(self, rollout_id: str, size: int) -> None:
        """Record the size of the spans of a rollout that has ended."""
        if not size:
            self.active(rollout_id)
            return
        sizes = self._read if rollout_id in self._read else self._ended
        self._evictable += size - sizes.get(rollout_id, 0)
        sizes[rollout_id] = size

    def active(self, rollout_id: str) -> None:
        """Record that a rollout is running (again) or was removed, so that its spans are not evicted."""
        self._evictable -= self._ended.pop(rollout_id, 0) + self._read.pop(rollout_id, 0)

    def read(self, rollout_id: str) -> None:
        """Record that the spans of a rollout were read."""
        size = self._ended.pop(rollout_id, None)
        if size is not None:
            self._read[rollout_id] = size

    def surplus(self) -> list[str]:
        """Return the rollouts with spans that must be dropped; none within the limit."""
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
    """Return the budget for the arguments.

    Raises:
        BadRequestError: a size is negative, a share is outside 0 to 1, or the safe limit is not below the other limit.
    """
    if max_span_bytes is not None and threshold is not None:
        raise BadRequestError("Pass max_span_bytes or eviction_memory_threshold, not both; they are the same limit")
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
        raise BadRequestError(f"{name} ratio must be between 0 and 1; got {value} (pass an int for bytes)")
    return int(value * memory_capacity_bytes())
