"""Time in a store: the clock of a database, the age of a wall-clock time, and the timer that scans the store.

Times in a store are wall-clock times, which are common to all servers over the same data. Servers over a database use
the clock of the database server. So machines with different clocks agree on the order of the queue, on leases and on
limits, with an error of at most half a round trip. While a server runs, it measures leases and limits with its
monotonic clock. It watches the wall clock, and each jump starts a new stretch.
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
"""Largest lag of the recorded end of a stretch in seconds, so that most calls need not record it."""
_WORTH_A_WARNING_SECONDS = 5.0


class SharedClock:
    """Wall-clock seconds of a database server, measured with this machine's monotonic clock.

    It is set by the last response of the server. A jump of this machine's wall clock does not change it. Thread-safe.
    """

    def __init__(self) -> None:
        self._at_zero: float | None = None
        """The server's time when this machine's monotonic clock was zero."""
        self._warned = False

    def now(self) -> float:
        """Return the server's time; before the first request to the server, this machine's time."""
        return time.time() if self._at_zero is None else time.monotonic() + self._at_zero

    def set(self, ask: Callable[[], float]) -> None:
        """Request the server's time and record it, as the time at the middle of the request."""
        began = time.monotonic()
        theirs = ask()
        self._at_zero = theirs - (began + time.monotonic()) / 2
        ahead = self.now() - time.time()
        if abs(ahead) > _WORTH_A_WARNING_SECONDS and not self._warned:
            self._warned = True
            logger.warning(
                "the clocks of this machine and of the database differ by %.1f s; the store uses the database's clock",
                ahead,
            )


def monotonic() -> float:
    """Return the seconds of the monotonic clock. Tests replace this function."""
    return time.monotonic()


@dataclass(slots=True)
class _Stretch:
    """A period in which the wall clock and the monotonic clock advanced together."""

    wall: float
    mono: float
    end: float
    """End of the stretch, as wall-clock time."""


class Timeline:
    """The history of the wall clock in one server, which gives correct ages despite jumps. It measures leases and
    limits. Usable from any thread."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        wall, mono = wall_clock(), monotonic()
        self._stretches = [_Stretch(wall, mono, wall)]
        self.was_set_back = False
        """True after the wall clock jumped back, so that stored times can be in the future. The reader resets it."""

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
        text = "the clock of the store jumped %s by %.1f s; leases and limits use the monotonic clock"
        logger.warning(text, way, abs(jump))
        return wall

    @property
    def has_jumped(self) -> bool:
        """True if differences between wall-clock times may be wrong."""
        return len(self._stretches) > 1

    @property
    def latest(self) -> float:
        """The latest wall-clock time that this server has seen."""
        return max(stretch.end for stretch in self._stretches)

    def age(self, since: float) -> float:
        """Return the seconds since a wall-clock time.

        If the clock was set back and a time occurred twice, the age counts from the second occurrence. The age of a
        time in the future, written with another clock, counts from the start of this server.
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
        """Return a function for the age of wall-clock times at a given time of `monotonic`.

        So a decision does not include time in which this process was paused after that time.
        """
        return lambda since: max(0.0, self.age(since) - (monotonic() - moment))


class Watched(Protocol):
    """A store that the timer scans."""

    @property
    def scan_interval(self) -> float:
        """Seconds between two scans."""
        ...

    def scan_now(self) -> None:
        """Check for expired attempts."""
        ...


class _Reaper:
    """Scan every watched store at its interval for lost workers and expired attempts, in one daemon thread of the
    process. It holds weak references to the stores, and the thread ends when there are no more stores."""

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
                        logger.exception("scan for expired attempts failed; retrying in %.1f s", interval)
            del stores
            pause.wait(interval)


_reaper = _Reaper()


def watch(store: Watched) -> None:
    """Start to scan the store; does nothing if it is already scanned. Scanning ends with the store's lifetime."""
    _reaper.watch(store)


def forget(store: Watched) -> None:
    """Stop scanning the store."""
    _reaper.forget(store)


def _after_fork() -> None:
    global _reaper
    _reaper = _Reaper()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
