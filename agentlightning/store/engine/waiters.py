"""Waiting callers, parked until a rollout is queued, rollouts end or anything changes, and woken from any thread.

A wait that timed out is kept for some seconds, because a client splits a long wait into several requests. Then the next
request of a wait for ten thousand rollouts need not check each one again, and the next claim of an idle runner need not
check the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Collection, Hashable, Iterable
from types import TracebackType
from typing import Any, Literal, Self

from agentlightning.store.base import FINISHED, QUEUING
from agentlightning.store.rules.tx import Backend, Notes, Record, RunRow

logger = logging.getLogger(__name__)

Key = tuple[str, str | None]
"""("work", run id), ("end", rollout id) or `ANY_CHANGE`."""
ANY_CHANGE: Key = ("change", None)
Again = tuple[Literal["work", "end"], Hashable]
"""The key of a wait that is likely to be repeated: what it waits for, and for which caller."""
MAX_WAITERS = 20_000
_MOST_KEPT = {"work": MAX_WAITERS, "end": 64}
_MANY = 64
"""A waiter for more keys than this is checked at every event instead of being indexed by its keys."""
_KEEP_SECONDS = 5.0
"""Seconds for which a wait is kept after a timeout."""


class Waiter:
    """One parked caller, used as a context manager in the event loop that created it.

    To miss no event: enter, check the store, `arm` with the missing keys, `wait`. Events between entering and arming
    are recorded. A waiter that is `kept` stays parked after the block and can be entered again.
    """

    __slots__ = (
        *("_bell", "_happened", "_loop", "_owner", "kept", "keys", "looked", "pending", "result", "seen", "touched"),
        "woken",
    )

    def __init__(self, owner: Waiters, keys: Collection[Key]) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._bell: asyncio.Future[None] | None = None
        self._happened = False
        self.keys = keys
        self.seen: set[Key] = set()
        self.pending: set[Key] | None = None
        self.kept = False
        self.woken = False
        self.touched = False
        """True if an event that it waits for has happened or may have happened."""
        self.result: Any = None
        """The last result of its caller, at the time `looked` (monotonic)."""
        self.looked = time.monotonic()

    def __enter__(self) -> Self:
        self._owner.enter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if not self.kept:
            self._owner.remove(self, gave_up=kind is not None)

    def arm(self, missing: Iterable[Key]) -> None:
        """Set the events to wait for to `missing`, except events that happened since entering."""
        with self._owner.lock:
            self.pending = set(missing) - self.seen
            if not self.pending:
                self.wake()

    async def wait(self, timeout: float) -> None:
        """Wait until all events have happened or `timeout` seconds (possibly infinite) are over."""
        if self._happened:
            return
        self._bell = self._loop.create_future()
        timer = None if timeout == math.inf else self._loop.call_later(max(0.0, timeout), self._ring)
        try:
            await self._bell
        finally:
            if timer is not None:
                timer.cancel()

    def wake(self) -> None:
        """Wake the caller, from any thread."""
        self.woken = self.touched = True
        with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits there
            self._loop.call_soon_threadsafe(self._done)

    def _done(self) -> None:
        self._happened = True
        self._ring()

    def _ring(self) -> None:
        if self._bell is not None and not self._bell.done():
            self._bell.set_result(None)


class Waiters:
    """The parked callers of one store, by the keys that they wait for. Callers with many keys are in a separate list.

    Usable from any thread. A kept wait continues only on its own event loop.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._by_key: dict[Key, dict[Waiter, None]] = {}
        self._wide: dict[Waiter, None] = {}
        self._kept: dict[str, dict[tuple[Again, asyncio.AbstractEventLoop], Waiter]] = {"work": {}, "end": {}}
        self.parked = 0
        """Number of callers that have entered."""

    def for_keys(self, keys: Collection[Key]) -> Waiter:
        """Return a waiter for these events. It is parked when it is entered."""
        return Waiter(self, keys if len(keys) <= _MANY else frozenset(keys))

    def enter(self, waiter: Waiter) -> None:
        """Park a caller. For a kept caller, earlier events have set `touched`."""
        with self.lock:
            if waiter.kept:
                waiter.kept = False
                return
            self.parked += 1
            if len(waiter.keys) > _MANY:
                self._wide[waiter] = None
                return
            for key in waiter.keys:
                self._by_key.setdefault(key, {})[waiter] = None

    def remove(self, waiter: Waiter, *, gave_up: bool) -> None:
        """Remove a caller. If it was woken for a rollout and gave up, wake the next one."""
        with self.lock:
            waiter.kept = False
            self.parked -= 1
            if self._wide.pop(waiter, waiter) is None:
                return
            for key in waiter.keys:
                parked = self._by_key.get(key)
                if parked is not None:
                    parked.pop(waiter, None)
                    if not parked:
                        del self._by_key[key]
                    elif gave_up and waiter.woken and key[0] == "work":
                        self._notify_one(key)

    def keep(self, again: Again, waiter: Waiter) -> bool:
        """Keep a wait parked after its block for some seconds, unless there are too many or another with the same key.
        Return False if an event has happened that must be handled first."""
        loop = asyncio.get_running_loop()
        kept = self._kept[again[0]]
        with self.lock:
            if waiter.touched:
                return False
            if (again, loop) in kept or len(kept) >= _MOST_KEPT[again[0]]:
                return True
            waiter.kept = True
            kept[again, loop] = waiter
        loop.call_later(_KEEP_SECONDS, self._let_go, again, loop, waiter)
        return True

    def take(self, again: Again, look_again: float | None) -> Waiter | None:
        """Return the kept wait with this key if no event has touched it. The caller then owns it."""
        with self.lock:
            waiter = self._kept[again[0]].pop((again, asyncio.get_running_loop()), None)
        if waiter is None:
            return None
        old = look_again is not None and time.monotonic() - waiter.looked > look_again
        if waiter.touched or old:
            self.remove(waiter, gave_up=False)
            return None
        return waiter

    def _let_go(self, again: Again, loop: asyncio.AbstractEventLoop, waiter: Waiter) -> None:
        with self.lock:
            if self._kept[again[0]].get((again, loop)) is not waiter:
                return
            del self._kept[again[0]][again, loop]
        self.remove(waiter, gave_up=False)

    def wake(self, notes: Notes) -> None:
        """Wake callers after changes. For rollouts that can be claimed now, wake the same number of callers; for a
        rollout that can be claimed later, wake all, because any of them may have given up by then."""
        with self.lock:
            for rollout_id in notes.finished:
                self._notify_all(("end", rollout_id))
            for run_id in notes.queued:
                self._notify_one(("work", run_id))
            for run_id in notes.delayed:
                self._notify_all(("work", run_id))
            self._notify_all(ANY_CHANGE)

    def wake_all(self) -> None:
        """Make every caller check again, because an event may have been missed."""
        with self.lock:
            for parked in (*self._by_key.values(), self._wide):
                for waiter in parked:
                    waiter.wake()

    def _notify_one(self, key: Key) -> None:
        """Wake one caller for a rollout. A kept caller may not return, so it is marked and another one is woken."""
        for waiter in self._by_key.get(key, ()):
            if waiter.kept:
                waiter.touched = True
            elif not waiter.woken and key not in waiter.seen:
                self._happened(waiter, key)
                return

    def _notify_all(self, key: Key) -> None:
        for waiter in self._by_key.get(key, ()):
            self._happened(waiter, key)
        for waiter in self._wide:
            if key in waiter.keys:
                self._happened(waiter, key)

    @staticmethod
    def _happened(waiter: Waiter, key: Key) -> None:
        waiter.touched = True
        if waiter.pending is None:
            waiter.seen.add(key)
        else:
            waiter.pending.discard(key)
            if not waiter.pending:
                waiter.wake()


# --- changes of other processes ------------------------------------------------------------------------------------

_SHORTEST_PAUSE = 0.02
_LONGEST_PAUSE = 0.1
"""Longest pause between two checks in seconds. It is short after a change and grows while nothing changes."""
_IDLE_CHECKS = 100
"""The thread ends after this many checks without a waiting caller."""
_PAGE = 1000


class Follower:
    """Wake the waiters of one store after other processes changed shared data.

    While a caller waits, one thread checks whether another process may have changed the data, and reads the rollouts
    that changed since its cursor.
    """

    def __init__(self, backend: Backend, waiters: Waiters) -> None:
        self._backend = backend
        self._waiters = waiters
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._stop = threading.Event()

    async def follow(self) -> None:
        """Start to follow all changes while a caller is parked. Returns when following has started."""
        with self._lock:
            if self._running():
                return
        (cursor, _) = await self._backend.run(lambda tx: tx.last_change(), write=False)
        with self._lock:
            if not self._running():
                self._pid = os.getpid()
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(cursor, self._stop), name="agl-store-follower", daemon=True
                )
                self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._stop.set()
        if thread is not None and self._pid == os.getpid() and thread is not threading.current_thread():
            thread.join(5.0)

    def _running(self) -> bool:
        return self._thread is not None and self._pid == os.getpid()

    def _run(self, cursor: str, stop: threading.Event) -> None:
        idle, pause = 0, _SHORTEST_PAUSE
        while not stop.is_set():
            try:
                changed = self._backend.await_change(pause)
                pause = _SHORTEST_PAUSE if changed else min(pause * 1.1, _LONGEST_PAUSE)
                if changed:
                    cursor = self._tell(cursor)
            except Exception:  # the cause (a server that restarts) passes; the waiters check by themselves
                logger.exception("following the changes of the store failed; retrying")
                self._waiters.wake_all()
                stop.wait(1.0)
            idle = 0 if self._waiters.parked else idle + 1
            if idle > _IDLE_CHECKS:
                with self._lock:
                    if not self._waiters.parked and self._thread is threading.current_thread():
                        self._thread = None
                        return

    def _tell(self, cursor: str) -> str:
        while True:
            (records, cursor), _ = self._backend.execute(lambda tx, at=cursor: tx.changes(at, _PAGE), write=False)
            if records:
                self._waiters.wake(notes_of(records))
            if len(records) < _PAGE:
                return cursor


def notes_of(records: list[Record | RunRow]) -> Notes:
    """Return the notes for waiters about changed rollouts and runs."""
    notes, now = Notes(changed=True), time.time()
    for record in records:
        if isinstance(record, RunRow):
            continue
        available = record.available_at
        if record.rollout.status in QUEUING and available is not None:
            (notes.queued if available <= now else notes.delayed).append(record.rollout.run_id)
        elif record.rollout.status in FINISHED:
            notes.finished.append(record.rollout.rollout_id)
    return notes
