"""Finds the intervals of time around a moment or another interval, with a slack for clocks that differ."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

SLACK_SECONDS: Final = 0.05
"""Maximum difference between the clocks of gateway and tracer, in seconds."""


class Interval(NamedTuple):
    """Seconds since the epoch."""

    start: float
    end: float

    def holds(self, inner: Interval, slack: float = SLACK_SECONDS) -> bool:
        return inner.start >= self.start - slack and inner.end <= self.end + slack

    def is_apart_from(self, other: Interval) -> bool:
        return other.end <= self.start or other.start >= self.end


class Intervals:
    """Finds the intervals that contain another one, in logarithmic time."""

    def __init__(self, intervals: Sequence[Interval]) -> None:
        self._intervals = intervals
        self._places = sorted(range(len(intervals)), key=lambda at: intervals[at].start)
        self._starts = [intervals[at].start for at in self._places]
        self._size = 1 << max(0, len(intervals) - 1).bit_length()
        self._latest = [float("-inf")] * (2 * self._size)
        """A tree: the latest end among the intervals below each node."""
        for leaf, at in enumerate(self._places):
            self._latest[self._size + leaf] = intervals[at].end
        for place in range(self._size - 1, 0, -1):
            self._latest[place] = max(self._latest[2 * place], self._latest[2 * place + 1])

    def around(self, inner: Interval, slack: float = SLACK_SECONDS) -> Iterator[int]:
        """Yield the indices of the intervals that contain `inner` within the slack, ordered by start."""
        count = bisect_right(self._starts, inner.start + slack)
        waiting = [(1, 0, self._size)]
        while waiting:
            place, low, high = waiting.pop()
            if low >= count or self._latest[place] < inner.end - slack:
                continue
            if place >= self._size:
                yield self._places[low]
                continue
            middle = (low + high) // 2
            waiting += [(2 * place + 1, middle, high), (2 * place, low, middle)]


def narrowed(inner: Interval, around: list[int], intervals: Mapping[int, Interval] | Sequence[Interval]) -> list[int]:
    """Return the only interval that contains `inner` without slack, if it overlaps with none of the others.

    If intervals overlap, a small clock difference could select the wrong one.
    """
    exactly = [at for at in around if intervals[at].holds(inner, 0.0)]
    if len(exactly) != 1:
        return around
    own = intervals[exactly[0]]
    return exactly if all(at == exactly[0] or own.is_apart_from(intervals[at]) for at in around) else around
