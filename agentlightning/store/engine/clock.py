"""Time in a store: the clock of a database, the age of a wall-clock time, and the timer that scans when nobody calls.

Times in a store are wall-clock times, which all servers over the same data share. Servers over a database use the clock
of the database server, as its clients know it, so that machines whose clocks differ agree on the order of the queue, on
leases and on limits, up to half a round trip. Within the life of a server, its monotonic clock measures leases and
limits: the wall clock is watched, and each jump of it begins a new stretch.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

logger = logging.getLogger(__name__)
_JUMP_SECONDS = 1.0
_MOST_STRETCHES = 64
_NOTED_SECONDS = 0.05
"""Seconds that the end of a stretch may lie behind the wall clock, so that most calls need not record it."""
_WORTH_A_WARNING_SECONDS = 5.0


class SharedClock:
    """Wall-clock seconds of a server: this machine's monotonic clock, set by the server's last answer.

    Usable from any thread. A jump of this machine's own clock does not change it.
    """

    def __init__(self) -> None:
        self._at_zero: float | None = None
        """The server's time when this machine's monotonic clock stood at zero."""
        self._warned = False

    def now(self) -> float:
        """Return the server's time, or this machine's time before the server was asked."""
        return time.time() if self._at_zero is None else time.monotonic() + self._at_zero

    def set(self, ask: Callable[[], float]) -> None:
        """Ask the server for its time and record it (the answer counts as given half-way through the request)."""
        began = time.monotonic()
        theirs = ask()
        self._at_zero = theirs - (began + time.monotonic()) / 2
        ahead = self.now() - time.time()
        if abs(ahead) > _WORTH_A_WARNING_SECONDS and not self._warned:
            self._warned = True
            logger.warning(
                "the clock of this machine and that of the database differ by %.1f s; the store goes by the database's",
                ahead,
            )


def monotonic() -> float:
    """Return the seconds of the monotonic clock. Tests replace this."""
    return time.monotonic()


@dataclass(slots=True)
class _Stretch:
    """A period in which the wall clock and the monotonic clock advanced together."""

    wall: float
    mono: float
    end: float
    """Its last moment, by the wall clock."""


class Timeline:
    """The wall clock as one server has seen it, and the age of its times despite jumps. It measures leases and limits.
    Usable from any thread."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        wall, mono = wall_clock(), monotonic()
        self._stretches = [_Stretch(wall, mono, wall)]
        self.was_set_back = False
        """The wall clock jumped back, so the data may have times in the future. The reader resets it."""

    def now(self) -> float:
        """Return the wall-clock time, and record a jump."""
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
        """True if differences between wall-clock times may be wrong."""
        return len(self._stretches) > 1

    @property
    def latest(self) -> float:
        """The latest wall-clock time seen, however long ago."""
        return max(stretch.end for stretch in self._stretches)

    def age(self, since: float) -> float:
        """Return the seconds since a wall-clock time.

        A time that occurred twice, because the clock was set back, counts from the second one. A time in the future,
        written with another clock, counts from the moment at which this server first saw the wall clock.
        """
        self.now()
        mono, stretches = monotonic(), self._stretches
        later = stretches[0].mono
        for stretch in reversed(stretches):
            if stretch.wall <= since <= stretch.end + _JUMP_SECONDS + _NOTED_SECONDS:
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

    def age_at(self, moment: float) -> Callable[[float], float]:
        """Return a function for the age of wall-clock times at a moment of `monotonic`, whenever it is called.

        So a decision does not count time in which this process was paused after that moment.
        """
        return lambda since: max(0.0, self.age(since) - (monotonic() - moment))


class Watched(Protocol):
    """A store that the timer scans."""

    @property
    def scan_interval(self) -> float:
        """Seconds between two scans."""
        ...

    def scan_now(self) -> None:
        """Look for expired attempts."""
        ...


class _Reaper:
    """Detects lost workers and expired attempts: scans every watched store at its interval, in one daemon thread of the
    process. It holds weak references to stores and ends when none is left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stores: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def watch(self, store: Watched) -> None:
        with self._lock:
            self._stores.add(store)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="agl-reaper", daemon=True)
                self._thread.start()

    def forget(self, store: Watched) -> None:
        with self._lock:
            self._stores.discard(store)

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            with self._lock:
                stores = list(self._stores)
                if not stores:
                    self._thread = None
                    return
            interval = min(store.scan_interval for store in stores)
            for store in stores:
                try:
                    store.scan_now()
                except Exception:  # one store's trouble must not stop the watch over the others
                    with self._lock:
                        watched = store in self._stores
                    if watched:  # else it was closed during the look
                        logger.exception("looking for lapsed attempts failed; trying again in %.1f s", interval)
            del stores
            pause.wait(interval)


_reaper = _Reaper()


def watch(store: Watched) -> None:
    """Scan the store from now on, for as long as it lives. Cheap if it is watched already."""
    _reaper.watch(store)


def forget(store: Watched) -> None:
    """Stop scanning the store."""
    _reaper.forget(store)


def _after_fork() -> None:
    global _reaper
    _reaper = _Reaper()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
