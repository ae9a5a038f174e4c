"""What happened lately, in bounded memory: sums and percentiles over a sliding window. Time comes in as an argument."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentlightning.utils.id import SYSTEM_RANDOM

_SLOTS = 12
_SAMPLE = 256


@dataclass(slots=True)
class _Slot:
    """One part of the window. Beyond `_SAMPLE` values a random sample of them is kept."""

    start: float
    total: float = 0.0
    count: int = 0
    sample: list[float] = field(default_factory=list[float])

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1
        if len(self.sample) < _SAMPLE:
            self.sample.append(value)
        elif (place := SYSTEM_RANDOM.randrange(self.count)) < _SAMPLE:
            self.sample[place] = value


class Window:
    """Values of the last `seconds` and up to a twelfth more; all of them for None."""

    __slots__ = ("_seconds", "_slots", "_width")

    def __init__(self, seconds: float | None) -> None:
        self._seconds = float("inf") if seconds is None else seconds
        self._width = self._seconds / _SLOTS
        self._slots: deque[_Slot] = deque()

    def add(self, value: float, now: float) -> None:
        """Take one value."""
        self.forget(now)
        if not self._slots or now - self._slots[-1].start >= self._width:
            self._slots.append(_Slot(now))
        self._slots[-1].add(value)

    def forget(self, now: float) -> None:
        """Drop what is too old."""
        while self._slots and now - self._slots[0].start > self._seconds + self._width:
            self._slots.popleft()

    def __bool__(self) -> bool:
        return bool(self._slots)

    def rate(self, now: float, least: float) -> float:
        """Return the sum per second since the first value, counted as at least `least` seconds ago."""
        return sum(slot.total for slot in self._slots) / max(now - self._slots[0].start, least)

    def percentiles(self, wanted: Sequence[float]) -> list[float]:
        """Return percentiles (0 to 100), with linear interpolation."""
        weighted = sorted((value, slot.count / len(slot.sample)) for slot in self._slots for value in slot.sample)
        positions: list[float] = []
        before = 0.0
        for _, weight in weighted:
            positions.append(before + (weight - 1) / 2)
            before += weight
        values = [value for value, _ in weighted]
        return [_interpolated(positions, values, percent / 100 * (before - 1)) for percent in wanted]


def _interpolated(positions: Sequence[float], values: Sequence[float], position: float) -> float:
    """Return the value at a position between the given ones."""
    index = bisect_left(positions, position)
    if index == 0 or index == len(positions):
        return values[min(index, len(values) - 1)]
    low, high = positions[index - 1], positions[index]
    return values[index - 1] + (position - low) / (high - low) * (values[index] - values[index - 1])
