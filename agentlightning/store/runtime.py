"""Where a store's scripts meet time: runs them on the backend, wakes who waits for what they changed, and looks for
lost workers, lapsed attempts and what retention lets go: on a timer, and at most every `scan_debounce_seconds` within
calls. What the operations mean is in `scripts.py`; how they are called is in `engine.py`."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Hashable
from functools import partial
from typing import TypeVar

from agentlightning.errors import BadRequestError, BusyError
from agentlightning.store import retention, scripts
from agentlightning.store.backend import Backend, Notes, Tx
from agentlightning.store.follower import Follower
from agentlightning.store.kept_waits import KeptWait, KeptWaits
from agentlightning.store.reaper import forget, watch
from agentlightning.store.waiters import Key, Waiters
from agentlightning.types import Attempt, AttemptStatus, RetentionPolicy, Rollout

logger = logging.getLogger(__name__)
R = TypeVar("R")
_SWEEP_SECONDS = 5.0
"""Between two looks at what retention lets go."""
_CLOCK_SECONDS = 60.0
"""Between two comparisons of this machine's clock with that of the data."""
_RESOURCES_KEPT_SECONDS = 3600.0
"""With a retention policy, resources of a run without rollouts are kept for so long at least."""
_MAX_WAITERS = 20_000
_LOOK_AGAIN_SECONDS = 300.0
"""A waiter on shared data looks again at least so often: another process may have deleted what it waits for."""


class StoreRuntime:
    """Runs scripts for one store. Usable from any thread and any event loop at once."""

    def __init__(
        self,
        backend: Backend,
        *,
        scan_debounce_seconds: float,
        lease_seconds: float,
        policy: RetentionPolicy | None,
    ) -> None:
        if lease_seconds <= 0:
            raise BadRequestError(f"lease_seconds must be positive; got {lease_seconds}")
        self.backend = backend
        self.policy = policy
        self.started = time.monotonic()
        self.on_end: Callable[[Rollout], None] | None = None
        """Told of every rollout that a script of this process brings to its end."""
        self.on_attempt_end: Callable[[Attempt], None] | None = None
        """Told of every attempt that a script of this process brings to its end."""
        self._waiters = Waiters()
        self._kept = KeptWaits()
        self._follower = Follower(backend, self._waiters) if backend.shared else None
        self._look_again = _LOOK_AGAIN_SECONDS if backend.shared else None
        self._scan_debounce_seconds = scan_debounce_seconds
        self._lease_seconds = lease_seconds
        self._last_scan = float("-inf")
        self._last_sweep = time.monotonic()
        self._scanning = threading.Lock()
        self.now = backend.now
        """The clock that every process with this data shares, in wall-clock seconds."""
        self._clocks = (self.now(), time.monotonic())
        self._clock_set = time.monotonic()
        self._leases_hold_until = self.now() + lease_seconds if backend.persistent else 0.0
        self._watched_in = 0
        if policy is not None:
            self.watch()

    def close(self) -> None:
        """Stop looking and waiting; release the backend. May be called twice."""
        forget(self)
        if self._follower is not None:
            self._follower.stop()
        self.backend.close()

    def watch(self) -> None:
        """Have the timer of this process look at this store from now on: something in it has a limit in time."""
        if self._watched_in != os.getpid():
            self._watched_in = os.getpid()
            watch(self)

    def _watch_durable(self) -> None:
        """What was there before this process may have a limit in time already."""
        if self.backend.persistent:
            self.watch()

    # --- scripts ---------------------------------------------------------------------------------------------------

    async def read(self, script: Callable[[Tx], R]) -> R:
        """Run a script that changes nothing."""
        self._watch_durable()
        return (await self.backend.run(script, write=False))[0]

    async def write(self, script: Callable[[Tx], R]) -> R:
        """Run a script and wake who waits for what it changed."""
        self._watch_durable()
        result, notes = await self.backend.run(script)
        self._tell(notes)
        return result

    def write_now(self, script: Callable[[Tx], R]) -> R:
        """The same, blocking; for threads of our own."""
        result, notes = self.backend.execute(script)
        self._tell(notes)
        return result

    def _tell(self, notes: Notes) -> None:
        if self.on_end is not None:
            for rollout in notes.ended:
                self.on_end(rollout)
        if self.on_attempt_end is not None:
            for attempt in notes.attempts_ended:
                self.on_attempt_end(attempt)
        if notes.changed and self._waiters.parked:
            self._waiters.wake(notes)

    # --- waiting ---------------------------------------------------------------------------------------------------

    async def until(
        self,
        look: Callable[[], Awaitable[R]],
        missing: Callable[[R], Collection[Key]],
        keys: Collection[Key],
        timeout: float | None,
        due_in: Callable[[R], float | None] | None = None,
        again: Hashable = None,
    ) -> R:
        """Repeat `look` until nothing is `missing` in its result, or time is up; returns the last result.

        `due_in` gives the seconds after which another look is worth while though nothing has happened. `again` names a
        wait that is likely to be asked for again when time was up: it is then gone on with, and not begun anew.

        Raises:
            BusyError: too many callers wait already.
        """
        if self._waiters.parked >= _MAX_WAITERS:
            raise BusyError(f"{_MAX_WAITERS} callers wait at this store already; try again later")
        end = None if timeout is None else time.monotonic() + timeout
        kept = None if again is None else self._kept.take(again, self._look_again)
        while True:
            with self._waiters.for_keys(keys) if kept is None else kept.waiter as waiter:
                if kept is None:
                    looked = time.monotonic()
                    if self._follower is not None:
                        await self._follower.follow()
                    result = await look()
                    still = missing(result)
                    if not still or (end is not None and time.monotonic() >= end):
                        return result
                    waiter.arm(still)
                    all_missing = len(still) == len(keys)
                else:
                    looked, result, all_missing = kept.looked, kept.result, True
                    kept = None
                left = None if end is None else end - time.monotonic()
                due = due_in(result) if due_in is not None else None
                await waiter.wait(min((t for t in (left, due, self._look_again) if t is not None), default=None))
                time_is_up = end is not None and time.monotonic() >= end
                if time_is_up and all_missing and not waiter.touched and due is None:
                    if again is not None:
                        waiter.kept = self._kept.keep(again, KeptWait(waiter, result, looked))
                    return result  # all was missing and nothing has happened: another look would see the same

    # --- watching --------------------------------------------------------------------------------------------------

    @property
    def scan_interval(self) -> float:
        """Seconds between two looks of the timer."""
        return min(1.0, self._lease_seconds / 4)

    async def scan(self) -> None:
        """Look for lapsed attempts within a call, unless somebody did lately. Never fails the call."""
        now = time.monotonic()
        if now - self._last_scan < self._scan_debounce_seconds or not self._scanning.acquire(blocking=False):
            return
        try:
            self._last_scan = now
            for lapse in await self.read(self._lapsed_script()):
                await self.write(self._expire(lapse))
        except Exception:  # the call that happens to carry the scan must not suffer from it
            logger.exception("looking for lapsed attempts failed; the next scan tries again")
        finally:
            self._scanning.release()

    def scan_now(self) -> None:
        """Look for lapsed attempts, silent workers and what retention lets go; blocks. Called by the timer."""
        if time.monotonic() - self._clock_set >= _CLOCK_SECONDS:
            self._clock_set = time.monotonic()
            self.backend.set_clock()
        self._last_scan = time.monotonic()
        lapsed, _ = self.backend.execute(self._lapsed_script(), write=False)
        for rollout_id, attempt_id, to, reason in lapsed:
            try:
                if self.write_now(self._expire((rollout_id, attempt_id, to, reason))):
                    logger.warning("attempt %s of rollout %s is %s (%s)", attempt_id, rollout_id, to, reason)
            except Exception:  # one attempt's trouble must not keep the others from being noticed
                logger.exception("attempt %s of rollout %s could not be ended", attempt_id, rollout_id)
        if time.monotonic() - self._last_sweep >= min(_SWEEP_SECONDS, self._lease_seconds):
            self._last_sweep = time.monotonic()
            self.sweep_now()

    def sweep_now(self) -> None:
        """Forget workers long silent and tokens long used, and what the retention policy lets go; blocks."""
        now = self.now()
        self.write_now(lambda tx: scripts.forget_silent_workers(tx, now, self._lease_seconds))
        while self.write_now(lambda tx: scripts.forget_claim_tokens(tx, now)):
            pass
        if self.policy is not None:
            keep_seconds = max(_RESOURCES_KEPT_SECONDS, self.policy.max_age or 0.0)
            self.write_now(lambda tx: scripts.forget_resources(tx, now, keep_seconds))
            runs, _ = self.backend.execute(lambda tx: tx.runs(), write=False)
            for run_id in runs:
                while surplus := self.backend.execute(_surplus(self.policy, run_id, now), write=False)[0]:
                    self.write_now(partial(scripts.delete, rollout_ids=surplus, active="skip"))

    async def delete_surplus(self, policy: RetentionPolicy, run_id: tuple[str | None] | None) -> int:
        """Remove what goes beyond the policy in one run or in each, a page at a time; returns how many were removed."""
        deleted = 0
        for run in await self.read(lambda tx: tx.runs()) if run_id is None else run_id:
            while surplus := await self.read(_surplus(policy, run, self.now())):
                deleted += await self.write(partial(scripts.delete, rollout_ids=surplus, active="skip"))
        return deleted

    def _lapsed_script(self) -> Callable[[Tx], list[_Lapse]]:
        now = self.now()
        leases = self._leases_count(now)

        def script(tx: Tx) -> list[_Lapse]:
            lapsed: list[_Lapse] = []
            for record in tx.due(now, 256):
                attempt = record.latest
                status = scripts.lifecycle.health(attempt, record.rollout.config, now) if attempt else None
                if attempt is not None and status is not None:
                    lapsed.append((record.rollout.rollout_id, attempt.attempt_id, status, status))
            if leases:
                for rollout_id, attempt_id in scripts.lost_claims(tx, now, self._lease_seconds):
                    lapsed.append((rollout_id, attempt_id, "unresponsive", scripts.LEASE_EXPIRED))
            return lapsed

        return script

    def _expire(self, lapse: _Lapse) -> Callable[[Tx], bool]:
        rollout_id, attempt_id, to, reason = lapse
        return partial(
            scripts.expire,
            now=self.now(),
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            to=to,
            reason=reason,
            lease_seconds=self._lease_seconds,
        )

    def _leases_count(self, now: float) -> bool:
        """False for one lease after a start on durable data, and after the wall clock jumped or this process slept."""
        wall, mono = self._clocks
        self._clocks = (now, time.monotonic())
        gap = self._clocks[1] - mono
        jump = (now - wall) - gap
        if jump > max(1.0, self._lease_seconds / 10) or gap > self.scan_interval + self._lease_seconds / 4:
            self._leases_hold_until = now + self._lease_seconds
        elif jump < -1.0:
            self._leases_hold_until = min(self._leases_hold_until, now + self._lease_seconds)
        return now >= self._leases_hold_until


def _surplus(policy: RetentionPolicy, run_id: str | None, now: float) -> Callable[[Tx], list[str]]:
    return partial(retention.surplus, now=now, run_id=run_id, policy=policy)


_Lapse = tuple[str, str, AttemptStatus, str]
"""Rollout, attempt, what its status becomes, and why."""
