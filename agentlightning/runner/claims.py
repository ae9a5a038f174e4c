"""Claims: the next rollout of the queue for each lane of a runner, waited for without asking all the time."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque

from agentlightning.errors import BusyError, StoreUnreachableError
from agentlightning.runner.stopping import Stopping
from agentlightning.store.base import LightningStore
from agentlightning.types import AttemptedRollout

logger = logging.getLogger(__name__)

SHORTEST_PAUSE, LONGEST_PAUSE = 0.01, 1.0
"""Seconds between questions to a store that cannot hold one open."""
MOST_CLAIMS = 32
"""Claims of one question; keeps a reply small, and other runners of the same queue at work."""


class Claims:
    """Asks a store for work on behalf of one worker; used by one event loop, by several lanes at once.

    One question is open at a time, for as many rollouts as there are lanes that wait, so that 200 lanes cost no more
    than one and nothing is claimed that could not be played at once. The store holds a question open for
    `poll_interval` seconds; one that answers at once is asked again after growing pauses. `close` gives back what no
    lane has taken.
    """

    def __init__(
        self, store: LightningStore, worker_id: str, poll_interval: float, store_unreachable_timeout: float
    ) -> None:
        self._store = store
        self._worker_id = worker_id
        self._poll_interval = max(poll_interval, SHORTEST_PAUSE)
        self._store_unreachable_timeout = store_unreachable_timeout
        self._away_since: float | None = None
        self._turn = asyncio.Lock()
        self._lanes = 0
        self._claimed: deque[AttemptedRollout] = deque()

    async def next(self, stopping: Stopping, exit_when_idle: float | None = None) -> AttemptedRollout | None:
        """Return a claimed rollout; None once the stop event is set or nothing came for `exit_when_idle` seconds.

        Raises:
            StoreUnreachableError: the store did not answer for `store_unreachable_timeout` seconds.
        """
        idle_until = None if exit_when_idle is None else time.monotonic() + exit_when_idle
        others = self._turn.locked()
        self._lanes += 1
        try:
            async with self._turn:
                if others and idle_until is not None and not self._claimed and time.monotonic() >= idle_until:
                    return None  # whoever asked meanwhile asked for this lane, too
                return await self._wait(stopping, idle_until)
        finally:
            self._lanes -= 1

    async def close(self) -> None:
        """Give back what was claimed for lanes that have ended meanwhile."""
        while self._claimed:
            await self._give_back(self._claimed.popleft())

    async def _wait(self, stopping: Stopping, idle_until: float | None) -> AttemptedRollout | None:
        pause = SHORTEST_PAUSE
        while not stopping.is_set():
            if self._claimed:
                return self._claimed.popleft()
            began = time.monotonic()
            wait = self._poll_interval if idle_until is None else min(self._poll_interval, max(0.0, idle_until - began))
            claims, asked = await self._ask(wait, stopping, began)
            if claims:
                self._claimed.extend(claims)
                continue
            if idle_until is not None and time.monotonic() >= idle_until:
                return None
            if time.monotonic() - began < wait / 2:  # it was not held open
                await stopping.pause(max(asked, pause * random.uniform(0.75, 1.25)))
                pause = min(pause * 2, LONGEST_PAUSE, self._poll_interval)
        return None

    async def _ask(self, wait: float, stopping: Stopping, began: float) -> tuple[list[AttemptedRollout], float]:
        """Return claims, and the pause (seconds) that the store asks for."""
        question = asyncio.create_task(self._dequeue(wait))
        try:
            await asyncio.wait({question, stopping.noticed}, return_when=asyncio.FIRST_COMPLETED)
            if not question.done():
                return [], 0.0
            claims = question.result()
        except BusyError as error:
            return [], error.retry_after
        except OSError as error:
            self._note_away(began, error)
            return [], 0.0
        finally:
            await self._withdraw(question)
        if self._away_since is not None:
            logger.info("[%s] the store answers again", self._worker_id)
            self._away_since = None
        return claims, 0.0

    async def _dequeue(self, wait: float) -> list[AttemptedRollout]:
        """Claim for all lanes that wait; a question for one of them takes the way that every store has."""
        if self._lanes > 1:
            limit = min(self._lanes, MOST_CLAIMS)
            return await self._store.dequeue_many_rollouts(limit=limit, worker_id=self._worker_id, timeout=wait)
        claim = await self._store.dequeue_rollout(worker_id=self._worker_id, timeout=wait)
        return [] if claim is None else [claim]

    async def _withdraw(self, question: asyncio.Task[list[AttemptedRollout]]) -> None:
        """End a question that nobody waits for; a claim that came in between goes back to the queue."""
        if question.done():
            return
        question.cancel()
        await asyncio.wait({question}, timeout=SHORTEST_PAUSE * 10)
        if question.done() and not question.cancelled() and question.exception() is None:
            for rollout in question.result():
                await self._give_back(rollout)

    async def _give_back(self, rollout: AttemptedRollout) -> None:
        try:
            await self._store.update_rollout(rollout.rollout_id, status="requeuing")
        except Exception as error:  # the lease of the claim will run out
            logger.warning("[%s] rollout %s was not given back: %s", self._worker_id, rollout.rollout_id, error)

    def _note_away(self, began: float, error: OSError) -> None:
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = began
            logger.warning("[%s] the store does not answer (%s); asking again", self._worker_id, error)
        if now - self._away_since > self._store_unreachable_timeout:
            raise StoreUnreachableError(
                f"Worker {self._worker_id} gives up: the store did not answer for {now - self._away_since:.0f} s "
                f"(store_unreachable_timeout={self._store_unreachable_timeout:g}); last error: {error}"
            ) from error
