"""Who waits for what: callers parked until work arrives or rollouts end. Woken from any thread, at once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Collection, Iterable
from types import TracebackType

from typing_extensions import Self

from agentlightning.store.backend import Notes

Key = tuple[str, str | None]
"""("work", run id), ("end", rollout id) or `ANY_CHANGE`."""
ANY_CHANGE: Key = ("change", None)
_MANY = 64
"""Who waits for more events than so many is asked at each, rather than listed under each of them."""


class Waiter:
    """One parked caller, used as a context manager in the event loop that made it.

    The order that loses no event: enter, look at the store, `arm` with what is still missing, `wait`. What happens
    between entering and arming is remembered. One that is `kept` stays parked on leaving the block, and may be entered
    again, until `leave`.
    """

    __slots__ = ("_future", "_loop", "_owner", "kept", "keys", "pending", "seen", "touched", "woken")

    def __init__(self, owner: Waiters, keys: Collection[Key]) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self._loop.create_future()
        self.keys = keys
        self.seen: set[Key] = set()
        self.pending: set[Key] | None = None
        self.kept = False
        self.woken = False
        self.touched = False
        """Something that it waits for has happened, or may have."""

    def __enter__(self) -> Self:
        if not self.kept:
            self._owner.add(self)
        self.kept = False
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if not self.kept:
            self._owner.remove(self, gave_up=kind is not None)

    def leave(self) -> None:
        """Stop waiting, for one that was kept."""
        self.kept = False
        self._owner.remove(self, gave_up=False)

    def arm(self, missing: Iterable[Key]) -> None:
        """Wait for all of `missing` from here on, less what happened since entering."""
        self._owner.arm(self, set(missing))

    async def wait(self, timeout: float | None) -> None:
        """Return when everything has happened or when `timeout` seconds are over."""
        await asyncio.wait([self._future], timeout=timeout)

    def wake(self) -> None:
        """Wake the caller, from any thread."""
        self.woken = self.touched = True
        with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits there
            self._loop.call_soon_threadsafe(self._done)

    def _done(self) -> None:
        if not self._future.done():
            self._future.set_result(None)


class Waiters:
    """The parked callers of one store, by what they wait for; those who wait for very much in a list of their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_key: dict[Key, dict[Waiter, None]] = {}
        self._wide: dict[Waiter, None] = {}
        self.parked = 0
        """How many callers are entered."""

    def for_keys(self, keys: Collection[Key]) -> Waiter:
        """Return a waiter for these events; nothing is parked until it is entered."""
        return Waiter(self, keys if len(keys) <= _MANY else frozenset(keys))

    def add(self, waiter: Waiter) -> None:
        """Park a caller."""
        with self._lock:
            self.parked += 1
            if len(waiter.keys) > _MANY:
                self._wide[waiter] = None
                return
            for key in waiter.keys:
                self._by_key.setdefault(key, {})[waiter] = None

    def remove(self, waiter: Waiter, *, gave_up: bool) -> None:
        """Forget a caller. One that was woken for work and gave up passes the call on to the next."""
        with self._lock:
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
                        self._happened(next(iter(parked)), key)

    def arm(self, waiter: Waiter, missing: set[Key]) -> None:
        """Set what a caller still waits for; wakes it if all of that has happened since it was parked."""
        with self._lock:
            waiter.pending = missing - waiter.seen
            if not waiter.pending:
                waiter.wake()

    def wake(self, notes: Notes) -> None:
        """Tell the callers what happened; of those who wait for work, as many as rollouts may be claimed at once, and
        all of them for one that may be claimed later, since any of them may have given up by then."""
        with self._lock:
            for rollout_id in notes.finished:
                self._tell_all(("end", rollout_id))
            for run_id in notes.queued:
                key: Key = ("work", run_id)
                parked = self._by_key.get(key)
                waiter = next((w for w in parked if not w.woken and key not in w.seen), None) if parked else None
                if waiter is not None:
                    self._happened(waiter, key)
            for run_id in notes.delayed:
                self._tell_all(("work", run_id))
            self._tell_all(ANY_CHANGE)

    def wake_all(self) -> None:
        """Have every caller look again: something may have been missed."""
        with self._lock:
            for parked in (*self._by_key.values(), self._wide):
                for waiter in parked:
                    waiter.wake()

    def _tell_all(self, key: Key) -> None:
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
