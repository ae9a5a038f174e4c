"""Claims of rollouts from the queue for the lanes of a runner, by long polling."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any

from agentlightning.errors import BusyError, StoreUnreachableError
from agentlightning.runner.base import StopEvent
from agentlightning.store.base import LightningStore
from agentlightning.types import AttemptedRollout
from agentlightning.utils.backoff import Outage, backoff_delays
from agentlightning.utils.id import SYSTEM_RANDOM

logger = logging.getLogger(__name__)

SHORTEST_PAUSE, LONGEST_PAUSE = 0.01, 1.0
"""Minimum and maximum seconds between requests to a store that does not support long polling."""
LONGEST_HOLD = 20.0
"""Maximum seconds for which the store is requested to hold a request open, after empty replies."""
HOLD_SPREAD = 0.25
"""Random share of this time, so that runners that started together do not send requests together."""
LONGEST_PART = 5.0
"""Seconds between two checks of the clock while a request is open."""
MOST_CLAIMS = 32
"""Maximum claims per request; keeps responses small, and leaves work for other runners."""


class Claims:
    """Requests work from a store for one worker; used by one event loop, with several lanes.

    One request is open at a time, for the number of waiting lanes, so that 200 lanes cost no more than one and every
    claimed rollout can run immediately. The store holds a request open for `poll_interval` seconds, and up to
    `LONGEST_HOLD` while there is no work; if it responds immediately, the next requests follow after growing pauses.
    `close` returns claims that no lane has taken. The worker holds a claim until it is returned, or until the lane
    that runs it releases it.
    """

    def __init__(
        self,
        store: LightningStore,
        worker_id: str,
        held: set[str],
        poll_interval: float,
        store_unreachable_timeout: float,
    ) -> None:
        self._store = store
        self._worker_id = worker_id
        self._held = held
        self._poll_interval = max(poll_interval, SHORTEST_PAUSE)
        self._outage = Outage(store_unreachable_timeout)
        self._turn = asyncio.Lock()
        self._lanes = 0
        self._claimed: deque[AttemptedRollout] = deque()

    async def next(self, stopping: Stopping, exit_when_idle: float | None = None) -> AttemptedRollout | None:
        """Return a claimed rollout; None once the stop event is set or there was no work for `exit_when_idle` seconds.

        Raises:
            StoreUnreachableError: the store did not respond for `store_unreachable_timeout` seconds.
        """
        idle_until = None if exit_when_idle is None else time.monotonic() + exit_when_idle
        others = self._turn.locked()
        self._lanes += 1
        try:
            async with self._turn:
                if others and idle_until is not None and not self._claimed and time.monotonic() >= idle_until:
                    return None  # the request of another lane covered this lane, too
                delays = backoff_delays(SHORTEST_PAUSE, min(LONGEST_PAUSE, self._poll_interval))
                hold = longest = self._poll_interval
                while not stopping.is_set():
                    if self._claimed:
                        return self._claimed.popleft()
                    began = time.monotonic()
                    wait = hold if idle_until is None else min(hold, max(0.0, idle_until - began))
                    pause = await self._ask(wait, stopping, began)
                    if self._claimed:
                        continue
                    if idle_until is not None and not self._outage.tries and time.monotonic() >= idle_until:
                        return None
                    if time.monotonic() - began < wait / 2:  # it was not held open
                        await stopping.pause(max(pause, next(delays)))
                    else:
                        longest = max(longest, min(2 * longest, LONGEST_HOLD))
                        hold = max(self._poll_interval, longest * SYSTEM_RANDOM.uniform(1 - HOLD_SPREAD, 1))
                return None
        finally:
            self._lanes -= 1

    async def close(self) -> None:
        """Return the claims of lanes that have ended."""
        while self._claimed:
            rollout = self._claimed.popleft()
            try:
                await self._store.update_rollout(rollout.rollout_id, status="requeuing")
            except Exception as error:  # heartbeats no longer name it: its lease runs out
                logger.warning("[%s] rollout %s was not requeued: %s", self._worker_id, rollout.rollout_id, error)
            finally:
                self._held.discard(rollout.attempt.attempt_id)

    def _take(self, answer: list[AttemptedRollout] | AttemptedRollout | None) -> None:
        for rollout in [answer] if isinstance(answer, AttemptedRollout) else answer or ():
            self._held.add(rollout.attempt.attempt_id)
            self._claimed.append(rollout)

    async def _ask(self, wait: float, stopping: Stopping, began: float) -> float:
        """Claim for all waiting lanes; return the pause in seconds that the store requests.

        If the call is cancelled, the request is ended, and claims that still arrive are returned to the queue.
        """
        await asyncio.sleep(0)  # one request for lanes that begin together
        patience, limit = (
            wait + max(self._outage.seconds - self._outage.away, self._outage.try_seconds),
            min(self._lanes, MOST_CLAIMS),
        )
        request = None
        try:
            if limit > 1:
                claiming = self._store.dequeue_many_rollouts(limit=limit, worker_id=self._worker_id, timeout=wait)
            else:  # with the operation that every store has
                claiming = self._store.dequeue_rollout(worker_id=self._worker_id, timeout=wait)
            request = asyncio.ensure_future(claiming)
            end = began + patience
            while not request.done():  # in parts, to notice that this process was suspended
                if stopping.noticed.done():
                    return 0.0
                part = min(end - time.monotonic(), LONGEST_PART)
                if self._outage.expect(max(part, 0.0)):
                    began, end = time.monotonic(), time.monotonic() + patience
                elif part <= 0:
                    raise TimeoutError(f"no response within {patience:g} s")
                else:
                    await asyncio.wait({request, stopping.noticed}, timeout=part, return_when=asyncio.FIRST_COMPLETED)
            self._take(request.result())
        except BusyError as error:
            return error.retry_after
        except OSError as error:
            if not self._outage.tries:
                logger.warning("[%s] the store does not respond (%s); retrying", self._worker_id, error)
            if self._outage.failed(began) or (
                isinstance(error, StoreUnreachableError) and self._outage.away >= self._outage.seconds
            ):  # our own client has already retried
                raise StoreUnreachableError(
                    f"Worker {self._worker_id} stops: the store did not respond for {self._outage.away:.0f} s "
                    f"(store_unreachable_timeout={self._outage.seconds:g}); last error: {error}"
                ) from error
            return 0.0
        finally:
            if request is not None and not request.done():
                request.cancel()
                await asyncio.wait({request}, timeout=SHORTEST_PAUSE * 10)
                if request.done() and not request.cancelled() and request.exception() is None:
                    self._take(request.result())
                    await self.close()
        if self._outage.tries:
            logger.info("[%s] the store responds again", self._worker_id)
        self._outage.answered()
        return 0.0


LOOK_SECONDS = 0.1
"""Seconds between checks of the event, which may belong to another thread or process that cannot wake this loop."""


class Stopping:
    """Watches an event from construction to `close`; needs a running event loop. Without an event it is never set."""

    def __init__(self, event: StopEvent | None) -> None:
        self._event = event
        self.noticed = asyncio.ensure_future(self._watch())
        """Done shortly after the event is set."""

    def is_set(self) -> bool:
        """True as soon as the event is set."""
        return self._event is not None and self._event.is_set()

    async def pause(self, seconds: float) -> None:
        """Sleep until the event is detected, at most."""
        await asyncio.wait({self.noticed}, timeout=seconds)

    async def until_set(self, work: Coroutine[object, object, None]) -> bool:
        """Await some work until the event is detected; return whether the work was done."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task, self.noticed}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            return task.done()
        finally:
            await cancel_all([task])

    async def close(self) -> None:
        """End the watch."""
        self.noticed.cancel()
        await asyncio.wait({self.noticed})

    async def _watch(self) -> None:
        if self._event is None:
            await asyncio.get_running_loop().create_future()
        while not self.is_set():  # noqa: ASYNC110 -- see LOOK_SECONDS
            await asyncio.sleep(LOOK_SECONDS)


async def all_or_first_failure(tasks: list[asyncio.Task[None]]) -> None:
    """Wait for all. If one fails, or the waiter is cancelled, cancel the others and wait for their ends."""
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel all, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
