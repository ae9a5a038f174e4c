"""StoreRuntime, which runs the scripts of a store on its backend and wakes the callers that wait for changes.

It also ends attempts of lost workers and attempts that exceed a limit, and deletes rollouts beyond the retention
policy: on a timer, and at most every `scan_debounce_seconds` within calls. The rules of the operations are in
`store/rules/`, and their methods in `store.py`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import TypeVar

from agentlightning.errors import BadRequestError, BusyError
from agentlightning.store.engine.clock import Timeline, forget, monotonic, watch
from agentlightning.store.engine.waiters import MAX_WAITERS, Again, Follower, Key, Waiters
from agentlightning.store.rules import lifecycle
from agentlightning.store.rules.claims import forget_claim_tokens, queue_now, queued_ahead
from agentlightning.store.rules.deletion import begin_deletion, delete, end_deletion, set_aside, surplus
from agentlightning.store.rules.idempotency import Call, forget_call_tokens
from agentlightning.store.rules.lifecycle import LEASE_EXPIRED
from agentlightning.store.rules.resources import forget_resources
from agentlightning.store.rules.runs import forget_runs
from agentlightning.store.rules.tx import Backend, Notes, Tx
from agentlightning.store.rules.updates import expire
from agentlightning.store.rules.workers import forget_silent_workers, lost_claims
from agentlightning.types import Attempt, AttemptStatus, RetentionPolicy, Rollout

logger = logging.getLogger(__name__)
R = TypeVar("R")
_SWEEP_SECONDS = 5.0
"""Seconds between two deletions for the retention policy."""
_CLOCK_SECONDS = 15.0
"""Seconds between two comparisons of this machine's clock with the clock of the data."""
_RESOURCES_KEPT_SECONDS = 3600.0
"""Minimum number of seconds for which a retention policy keeps the resources of a run without rollouts."""
_TOKENS_AT_ONCE, _QUEUED_AT_ONCE, _DUE_AT_ONCE = 1000, 256, 256
_DUE_AFTER_JUMP = 10_000
"""Attempts with a limit that are checked in one step while a jump of the clock makes deadlines unreliable."""
_LONGEST_LIMIT_SECONDS = 86_400.0
_LOOK_FOR_WORK_SECONDS = 30.0
"""Seconds between two checks of the queue for a waiting worker; each one updates its `last_dequeue_time`."""
_LOOK_AGAIN_SECONDS = 300.0
"""Seconds after which a waiter on shared data checks again, because another process may have deleted its rollout."""


class StoreRuntime:
    """Run scripts for one store. Usable concurrently from any thread and event loop."""

    def __init__(
        self, backend: Backend, *, scan_debounce_seconds: float, lease_seconds: float, policy: RetentionPolicy | None
    ) -> None:
        if lease_seconds <= 0:
            raise BadRequestError(f"lease_seconds must be positive; got {lease_seconds}")
        self.backend = backend
        self._inline = getattr(backend, "inline", False)
        self.policy = policy
        self.started = time.monotonic()
        self.on_end: Callable[[Rollout], None] | None = None
        """Called with every rollout that a script of this process ends."""
        self.on_attempt_end: Callable[[Attempt], None] | None = None
        """Called with every attempt that a script of this process ends."""
        self._waiters = Waiters()
        self._follower = Follower(backend, self._waiters) if backend.shared else None
        self._look_again = _LOOK_AGAIN_SECONDS if backend.shared else None
        self._scan_debounce_seconds = scan_debounce_seconds
        self.lease_seconds = lease_seconds
        self._last_scan = float("-inf")
        self._last_sweep = time.monotonic()
        self._scanning = threading.Lock()
        self._timeline = Timeline(backend.now)
        self.now = self._timeline.now
        """The clock that every process with this data shares, in wall-clock seconds."""
        self._timeline.was_set_back = backend.persistent  # perhaps while no server ran
        self._due_until = math.inf if backend.persistent else 0.0
        self._clock_set = self._looked = monotonic()
        self._leases_hold_until = monotonic() + lease_seconds if backend.persistent else 0.0
        """Time from which lost workers are detected: one lease after a start on durable data, or after a pause."""
        self._woke = -math.inf
        """Time at which the timer last detected that this process resumed after a pause; -inf if it never did."""
        self._watched_in = 0
        if policy is not None:
            self.watch()

    def close(self) -> None:
        """Stop the scans and waits, and release the backend. May be called twice."""
        forget(self)
        if self._follower is not None:
            self._follower.stop()
        self.backend.close()

    def watch(self) -> None:
        """Start the scans of this store by the timer of the process, because something in it has a time limit."""
        if self._watched_in != os.getpid():
            self._watched_in = os.getpid()
            watch(self)

    # --- scripts ---------------------------------------------------------------------------------------------------

    async def read(self, script: Callable[[Tx], R]) -> R:
        """Run a script that changes nothing."""
        if self.backend.persistent:  # data from before this process may have a time limit already
            self.watch()
        result, notes = await self.backend.run(script, write=False)
        while notes.damaged:
            await self.write(partial(set_aside, rollout_ids=notes.damaged))
            result, notes = await self.backend.run(script, write=False)
        return result

    async def write(self, script: Callable[[Tx], R]) -> R:
        """Run a script and wake the callers that wait for its changes."""
        if self._inline:
            result, notes = self.backend.execute(script)
        else:
            if self.backend.persistent:
                self.watch()
            result, notes = await self.backend.run(script)
        if notes.changed:
            self._notify(notes)
        return result

    def write_now(self, script: Callable[[Tx], R]) -> R:
        """Same as `write`, blocking; for threads of this package."""
        result, notes = self.backend.execute(script)
        self._notify(notes)
        return result

    def _notify(self, notes: Notes) -> None:
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
        script_of: Callable[[R | None], Callable[[Tx], R]],
        missing: Callable[[R], Collection[Key]],
        keys: Collection[Key],
        timeout: float | None,
        *,
        write: bool = False,
        due_in: Callable[[R], float | None] | None = None,
        again: Again | None = None,
    ) -> R:
        """Run scripts until nothing is `missing` in a result or the timeout is over; return the last result.

        `script_of` creates each script from the previous result (None at first). `due_in` returns the seconds after
        which to check again even if nothing has changed. `again` is the key of a wait that is likely to be repeated
        after a timeout; the repeated wait then continues this one.

        Raises:
            BusyError: too many callers are waiting.
        """
        await self.settle()
        run = self.write if write else self.read
        before: R | None = None
        if timeout is not None and timeout <= 0:
            return await run(script_of(before))
        if self._waiters.parked >= MAX_WAITERS:
            raise BusyError(f"Too many callers are waiting for this store (the limit is {MAX_WAITERS}); retry later")
        end = math.inf if timeout is None else time.monotonic() + timeout
        look_again = _LOOK_FOR_WORK_SECONDS if again is not None and again[0] == "work" else self._look_again
        kept = None if again is None else self._waiters.take(again, look_again)
        while True:
            with kept or self._waiters.for_keys(keys) as waiter:
                if kept is None:
                    if self._follower is not None:
                        await self._follower.follow()
                    try:
                        result = waiter.result = before = await run(script_of(before))
                        still = missing(result)
                    except BaseException:  # a cancelled caller gives up, too
                        waiter.woken = True  # the work that woke it for the look before this one goes to another waiter
                        raise
                    if not still or time.monotonic() >= end:
                        return result
                    waiter.arm(still)
                    all_missing = len(still) == len(keys)
                else:
                    result = before = waiter.result
                    all_missing, kept = True, None
                    if waiter.touched:
                        continue
                due = due_in(result) if due_in is not None else None
                limits = (end - time.monotonic(), due, look_again)
                await waiter.wait(min(limit for limit in limits if limit is not None))
                over = time.monotonic() >= end and all_missing and not waiter.touched and due is None
                if over and (again is None or self._waiters.keep(again, waiter)):
                    return result  # all was missing and nothing has happened: another look would see the same

    # --- watching --------------------------------------------------------------------------------------------------

    @property
    def scan_interval(self) -> float:
        """Seconds between two scans by the timer."""
        return min(1.0, self.lease_seconds / 4)

    async def settle(self) -> float:
        """Return the start time of a call, after a `scan` if it is due."""
        now = self.now()
        if self._timeline.was_set_back or time.monotonic() - self._last_scan >= self._scan_debounce_seconds:
            await self.scan()
            return self.now()
        return now

    async def scan(self) -> None:
        """Check for expired attempts within a call, unless this was done recently. Also make rollouts claimable that
        have a queue time in the future because the clock was set back. Never fails the call."""
        looked = time.monotonic()
        due = looked - self._last_scan >= self._scan_debounce_seconds
        if not (due or self._timeline.was_set_back) or not self._scanning.acquire(blocking=False):
            return
        try:
            self._last_scan = looked
            if self._inline:
                self._look()
            else:
                await asyncio.to_thread(self._look)
        except Exception:  # the call that happens to carry the scan must not suffer from it
            logger.exception("scan for expired attempts failed; retrying at the next scan")
        finally:
            self._scanning.release()

    def scan_now(self) -> None:
        """Check for expired attempts, lost workers and data beyond the retention policy. Blocks; called by a timer."""
        if monotonic() - self._clock_set >= _CLOCK_SECONDS:
            self._set_clock()
        self._last_scan = time.monotonic()
        self._look()
        if time.monotonic() - self._last_sweep >= min(_SWEEP_SECONDS, self.lease_seconds):
            self._last_sweep = time.monotonic()
            self.sweep_now()

    def _look(self) -> None:
        lapsed, notes = self.backend.execute(self._lapsed_script(), write=False)
        if notes.damaged:
            self.write_now(partial(set_aside, rollout_ids=notes.damaged))
        if lapsed and self.backend.shared:  # somebody may have followed a jump of the clock before this process
            self._set_clock()
        now = self.now()
        if self._timeline.was_set_back:
            self._timeline.was_set_back = False
            try:
                ahead, _ = self.backend.execute(lambda tx: queued_ahead(tx, now), write=False)
                for start in range(0, len(ahead), _QUEUED_AT_ONCE):
                    self.write_now(partial(queue_now, now=now, rollout_ids=ahead[start : start + _QUEUED_AT_ONCE]))
            except Exception:  # the next look tries again
                self._timeline.was_set_back = True
                raise
        for lapse in lapsed:
            rollout_id, attempt_id, to, reason = lapse
            try:
                if self.write_now(self._expire(lapse)):
                    logger.warning("attempt %s of rollout %s is %s (%s)", attempt_id, rollout_id, to, reason)
            except Exception:  # one attempt's trouble must not keep the others from being noticed
                logger.exception("attempt %s of rollout %s could not be ended", attempt_id, rollout_id)

    def _set_clock(self) -> None:
        self._clock_set = monotonic()
        self.backend.set_clock()

    def sweep_now(self) -> None:
        """Delete lost workers, old tokens, and data beyond the retention policy. Blocks."""
        now, age = self.now(), self._timeline.age
        self.write_now(lambda tx: forget_silent_workers(tx, now, self.lease_seconds, age))
        most = _TOKENS_AT_ONCE
        while self.write_now(partial(forget_claim_tokens, now=now, most=most, age=age)):
            most += _TOKENS_AT_ONCE
        while self.write_now(partial(forget_call_tokens, now=now, age=age)):
            pass
        if self.policy is not None:
            keep_seconds = max(_RESOURCES_KEPT_SECONDS, self.policy.max_age or 0.0)
            while self.write_now(partial(forget_runs, now=now, policy=self.policy)):
                pass
            self.write_now(lambda tx: forget_resources(tx, now, keep_seconds))
            runs, _ = self.backend.execute(lambda tx: tx.runs(), write=False)
            for run_id in runs:
                while page := self.backend.execute(_surplus(self.policy, run_id, now), write=False)[0]:
                    self.write_now(partial(delete, now=now, rollout_ids=page, active="skip"))

    async def delete_surplus(self, policy: RetentionPolicy, run_id: tuple[str | None] | None, call: Call | None) -> int:
        """Remove rollouts beyond the policy in one run or all runs, a page at a time; return the number removed.

        A copy of the call continues where the first one was interrupted: rollouts that ended after the first call stay.
        """
        now, began = self.now(), None
        if call is not None:
            began = await self.write(partial(begin_deletion, now=now, call=call))
        if began is not None and began.answer:
            return int(began.answer)
        ended_before = None if began is None else began.time
        deleted = 0
        for run in await self.read(lambda tx: tx.runs()) if run_id is None else run_id:
            while page := await self.read(_surplus(policy, run, now, ended_before)):
                removed = await self.write(partial(delete, now=now, rollout_ids=page, active="skip"))
                assert isinstance(removed, int), "it refuses nothing"
                deleted += removed
        if call is not None:
            await self.write(partial(end_deletion, call=call, removed=deleted))
        return deleted

    def _lapsed_script(self) -> Callable[[Tx], list[_Lapse]]:
        now = self.now()
        looked = monotonic()
        age = self._timeline.age_at(looked)  # a sleep between this line and the verdict is no worker's silence
        gap, self._looked = looked - self._looked, looked
        if gap > self.scan_interval + self.lease_seconds / 4:  # this process slept
            self._woke = looked
            self._leases_hold_until = max(self._leases_hold_until, looked + self.lease_seconds)
        leases_count = looked >= self._leases_hold_until
        due_until, most = max(now, self._due_until), _DUE_AT_ONCE
        if self._timeline.latest > now + 1.0:  # the clock was set back: deadlines were written by the later one
            due_until = max(due_until, self._timeline.latest + _LONGEST_LIMIT_SECONDS)
        if due_until > now + 1.0 or self._timeline.has_jumped:  # then many are listed that are not due
            most = _DUE_AFTER_JUMP

        def script(tx: Tx) -> list[_Lapse]:
            lapsed: list[_Lapse] = []
            ahead = 0.0
            for record in tx.due(due_until, most):
                attempt = record.latest
                if attempt is None:
                    continue
                ahead = max(ahead, attempt.start_time, attempt.last_heartbeat_time or 0.0)
                status = lifecycle.health(attempt, record.rollout.config, now, age)
                silence = record.rollout.config.unresponsive_seconds or 0.0
                if status == "unresponsive" and looked - self._woke <= silence:
                    continue  # it may have tried to be heard while this process stood still
                if status is not None:
                    lapsed.append((record.rollout.rollout_id, attempt.attempt_id, status, status))
            if self._due_until == math.inf:  # the first look: did the clock stand later when the data were written?
                self._due_until = ahead + _LONGEST_LIMIT_SECONDS if ahead > now + 1.0 else 0.0
            if leases_count:
                for rollout_id, attempt_id in lost_claims(tx, now, self.lease_seconds, age):
                    lapsed.append((rollout_id, attempt_id, "unresponsive", LEASE_EXPIRED))
            return lapsed

        return script

    def _expire(self, lapse: _Lapse) -> Callable[[Tx], bool]:
        now, age = self.now(), self._timeline.age_at(self._looked)
        return lambda tx: expire(tx, now, *lapse, self.lease_seconds, age)


def _surplus(
    policy: RetentionPolicy, run_id: str | None, now: float, ended_before: float | None = None
) -> Callable[[Tx], list[str]]:
    return partial(surplus, now=now, run_id=run_id, policy=policy, ended_before=ended_before)


_Lapse = tuple[str, str, AttemptStatus, str]
"""Rollout, attempt, new status of the attempt, and reason."""
