"""The age of a wall-clock time, whatever the wall clock did since: leases and limits are measured by this.

Times in a store are wall-clock times, which all servers over the same data share. Within the life of a server their
distance is measured by its monotonic clock: the wall clock is watched, and each jump of it begins a new stretch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)
_JUMP_SECONDS = 1.0
_MOST_STRETCHES = 64
_NOTED_SECONDS = 0.05
"""How far the end of a stretch may lie behind the wall clock: most calls need not note it."""


def monotonic() -> float:
    """Return seconds of a clock that nobody sets. Tests replace this."""
    return time.monotonic()


@dataclass(slots=True)
class _Stretch:
    """A time in which the wall clock went like the monotonic one."""

    wall: float
    mono: float
    end: float
    """The last moment of it, by the wall clock."""


class Timeline:
    """The wall clock as one server has seen it. Usable from any thread."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        wall, mono = wall_clock(), monotonic()
        self._stretches = [_Stretch(wall, mono, wall)]
        self.was_set_back = False
        """The wall clock jumped back: there may be times in the data that are still to come. Reset by who looked."""

    def now(self) -> float:
        """Return the wall-clock time, and note a jump."""
        before = monotonic()
        wall = self._wall_clock()
        last = self._stretches[-1]
        if abs(wall - last.wall - before + last.mono) <= _JUMP_SECONDS and wall - last.end <= _NOTED_SECONDS:
            return wall
        mono = monotonic()
        if mono - before > _JUMP_SECONDS / 4:
            return wall  # this thread stood still in between: no conclusion is possible
        with self._lock:
            last = self._stretches[-1]
            expected = last.wall + mono - last.mono
            jump = wall - expected
            if abs(jump) <= max(_JUMP_SECONDS, 0.001 * (mono - last.mono)):  # a clock that is slewed drifts
                last.end = max(last.end, wall)
                return wall
            last.end = max(last.end, expected)
            self._stretches = [*self._stretches[1 - _MOST_STRETCHES :], _Stretch(wall, mono, wall)]
            self.was_set_back = self.was_set_back or jump < 0
        way = "back" if jump < 0 else "ahead"
        text = "the clock of the store jumped %s by %.1f s; leases and limits go on by the monotonic clock"
        logger.warning(text, way, abs(jump))
        return wall

    @property
    def has_jumped(self) -> bool:
        """True if distances between wall-clock times may say nothing."""
        return len(self._stretches) > 1

    @property
    def latest(self) -> float:
        """The latest wall-clock time that was seen, however long ago."""
        return max(stretch.end for stretch in self._stretches)

    def age(self, since: float) -> float:
        """Return how many seconds ago a wall-clock time was.

        One that was twice, because the clock was set back, counts from the second time. One that is still to come, so
        that somebody with another clock wrote it, counts from when this server first knew the time.
        """
        self.now()
        mono, stretches = monotonic(), self._stretches
        later = stretches[0].mono
        for stretch in reversed(stretches):
            if stretch.wall <= since <= stretch.end + _JUMP_SECONDS:
                return max(0.0, mono - (stretch.mono + since - stretch.wall))
        earliest = min(stretch.wall for stretch in stretches)
        if since < earliest:  # before this server began: there is the wall clock alone
            first = stretches[0]
            return mono - first.mono + max(0.0, first.wall - since)
        for stretch in stretches:  # in a gap, over which the clock jumped
            if stretch.wall > since:
                later = stretch.mono
                break
        return mono - later
