"""Where a store's scripts meet time: runs them on the backend, wakes who waits for what they changed, and looks for
lost workers, lapsed attempts and what retention lets go: on a timer, and at most every `scan_debounce_seconds` within
calls. What the operations mean is in `scripts.py`; how they are called is in `engine.py`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import TypeVar

from agentlightning.errors import BadRequestError, BusyError
from agentlightning.store import retention, scripts
from agentlightning.store.backend import Backend, Notes, Tx
from agentlightning.store.follower import Follower
from agentlightning.store.reaper import forget, watch
from agentlightning.store.waiters import Key, Waiters
from agentlightning.types import AttemptStatus, RetentionPolicy

logger = logging.getLogger(__name__)
R = TypeVar("R")
_SWEEP_SECONDS = 5.0
"""Between two looks at what retention lets go."""
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
        self._waiters = Waiters()
        self._follower = Follower(backend, self._waiters) if backend.shared else None
        self._look_again = _LOOK_AGAIN_SECONDS if backend.shared else None
        self._scan_debounce_seconds = scan_debounce_seconds
        self._lease_seconds = lease_seconds
        self._last_scan = float("-inf")
        self._last_sweep = time.monotonic()
        self._scanning = threading.Lock()
        self._clocks = (time.time(), time.monotonic())
        self._leases_hold_until = time.time() + lease_seconds if backend.persistent else 0.0
        if policy is not None:
            watch(self)

    def close(self) -> None:
        """Stop looking and waiting; release the backend. May be called twice."""
        forget(self)
        if self._follower is not None:
            self._follower.stop()
        self.backend.close()

    def watch(self) -> None:
        """Have the timer look at this store from now on: something in it has a limit in time."""
        watch(self)

    # --- scripts ---------------------------------------------------------------------------------------------------

    async def read(self, script: Callable[[Tx], R]) -> R:
        """Run a script that changes nothing."""
        return (await self.backend.run(script, write=False))[0]

    async def write(self, script: Callable[[Tx], R]) -> R:
        """Run a script and wake who waits for what it changed."""
        result, notes = await self.backend.run(script)
        self._tell(notes)
        return result

    def write_now(self, script: Callable[[Tx], R]) -> R:
        """The same, blocking; for threads of our own."""
        result, notes = self.backend.execute(script)
        self._tell(notes)
        return result

    def _tell(self, notes: Notes) -> None:
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
    ) -> R:
        """Repeat `look` until nothing is `missing` in its result, or time is up; returns the last result.

        `due_in` gives the seconds after which another look is worth while though nothing has happened.

        Raises:
            BusyError: too many callers wait already.
        """
        if self._waiters.parked >= _MAX_WAITERS:
            raise BusyError(f"{_MAX_WAITERS} callers wait at this store already; try again later")
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._waiters.for_keys(keys) as waiter:
                if self._follower is not None:
                    await self._follower.follow()
                result = await look()
                left = None if end is None else end - time.monotonic()
                still = missing(result)
                if not still or (left is not None and left <= 0):
                    return result
                waiter.arm(still)
                due = due_in(result) if due_in is not None else None
                await waiter.wait(min((t for t in (left, due, self._look_again) if t is not None), default=None))

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
            for script in map(_expire, await self.read(self._lapsed_script())):
                await self.write(script)
        except Exception:  # the call that happens to carry the scan must not suffer from it
            logger.exception("looking for lapsed attempts failed; the next scan tries again")
        finally:
            self._scanning.release()

    def scan_now(self) -> None:
        """Look for lapsed attempts, silent workers and what retention lets go; blocks. Called by the timer."""
        self._last_scan = time.monotonic()
        lapsed, _ = self.backend.execute(self._lapsed_script(), write=False)
        for rollout_id, attempt_id, to, reason in lapsed:
            self.write_now(_expire((rollout_id, attempt_id, to, reason)))
            logger.warning("attempt %s of rollout %s is %s (%s)", attempt_id, rollout_id, to, reason)
        if time.monotonic() - self._last_sweep >= min(_SWEEP_SECONDS, self._lease_seconds):
            self._last_sweep = time.monotonic()
            self.sweep_now()

    def sweep_now(self) -> None:
        """Forget workers long silent and tokens long used, and what the retention policy lets go; blocks."""
        now = time.time()
        self.write_now(lambda tx: scripts.forget_old_rows(tx, now, self._lease_seconds))
        if self.policy is not None:
            runs, _ = self.backend.execute(lambda tx: tx.runs(), write=False)
            for run_id in runs:
                while surplus := self.backend.execute(_surplus(self.policy, run_id), write=False)[0]:
                    self.write_now(partial(scripts.delete, rollout_ids=surplus, active="skip"))

    async def delete_surplus(self, policy: RetentionPolicy, run_id: tuple[str | None] | None) -> int:
        """Remove what goes beyond the policy in one run or in each, a page at a time; returns how many were removed."""
        deleted = 0
        for run in await self.read(lambda tx: tx.runs()) if run_id is None else run_id:
            while surplus := await self.read(_surplus(policy, run)):
                deleted += await self.write(partial(scripts.delete, rollout_ids=surplus, active="skip"))
        return deleted

    def _lapsed_script(self) -> Callable[[Tx], list[_Lapse]]:
        now = time.time()
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

    def _leases_count(self, now: float) -> bool:
        """False for one lease after a start on durable data, and after the wall clock jumped or this process slept."""
        wall, mono = self._clocks
        self._clocks = (now, time.monotonic())
        jump = (now - wall) - (self._clocks[1] - mono)
        if jump > max(1.0, self._lease_seconds / 10):
            self._leases_hold_until = now + self._lease_seconds
        elif jump < -1.0:
            self._leases_hold_until = min(self._leases_hold_until, now + self._lease_seconds)
        return now >= self._leases_hold_until


def _surplus(policy: RetentionPolicy, run_id: str | None) -> Callable[[Tx], list[str]]:
    return partial(retention.surplus, now=time.time(), run_id=run_id, policy=policy)


_Lapse = tuple[str, str, AttemptStatus, str]
"""Rollout, attempt, what its status becomes, and why."""


def _expire(lapse: _Lapse) -> Callable[[Tx], bool]:
    rollout_id, attempt_id, to, reason = lapse
    return partial(scripts.expire, now=time.time(), rollout_id=rollout_id, attempt_id=attempt_id, to=to, reason=reason)
