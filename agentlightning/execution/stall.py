"""Stall detector: a run in which nothing moves says so, once, and what each part waits for.

Progress is any change of a rollout of the run (a claim, a span, an end). While no rollout is open, an algorithm that
computes is progress as well.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from agentlightning.execution.base import AlgorithmBundle, StalledError
from agentlightning.execution.stall_report import stall_report
from agentlightning.execution.whereabouts import thread_whereabouts, whereabouts
from agentlightning.execution.work import open_work_counter, view_of
from agentlightning.store.base import LightningStore

logger = logging.getLogger(__name__)

OnStall = Literal["report", "raise"]

DEFAULT_SECONDS = 300.0
COMPUTING_SHARE = 0.2
"""A process that uses more of a core than this computes; one that waits uses next to nothing."""


@dataclass(frozen=True)
class StallPolicy:
    """When a run counts as stalled, and what follows."""

    seconds: float | None = DEFAULT_SECONDS
    """None is never."""
    on_stall: OnStall = "report"

    def look_seconds(self) -> float:
        """How often to look."""
        return min(5.0, max(0.05, (self.seconds or 0.0) / 10))


@dataclass
class StallDetector:
    """The watch over one run, in the process of its algorithm. Owned by the loop that supervises it."""

    policy: StallPolicy
    algorithm: AlgorithmBundle
    store: LightningStore
    position: Callable[[], list[str]] | None = None
    """Where the algorithm stands, if it is no task of this loop."""
    _cursor: str | None = field(default=None, init=False)
    _moved: float = field(default=0.0, init=False)
    _cpu: float = field(default=0.0, init=False)
    _looked: float = field(default=0.0, init=False)

    async def watch(self) -> None:
        """Report each stall once. Return only when the store cannot tell what changes.

        Raises:
            StalledError: the run stalls, and the policy is `raise`.
        """
        if self.policy.seconds is None:
            return
        view, run_id = view_of(self.algorithm, self.store), getattr(self.algorithm, "run_id", None)
        count_open_work = open_work_counter(self.algorithm, self.store)
        told = False
        self._moved = self._looked = time.monotonic()
        while True:
            try:
                if await self._has_moved(view, run_id) or (self._computes() and not await count_open_work()):
                    self._moved, told = time.monotonic(), False
                elif not told and time.monotonic() - self._moved >= self.policy.seconds:
                    told = True
                    await self._tell(view, run_id)
            except NotImplementedError:
                logger.warning("%s cannot tell what changes: a stall will not be noticed", type(self.store).__name__)
                return
            except OSError as error:  # a store that is away is told of by those who work with it
                logger.debug("Could not look for progress: %s", error)
            await asyncio.sleep(self.policy.look_seconds())

    async def _has_moved(self, view: LightningStore, run_id: str | None) -> bool:
        if self._cursor is not None:
            page = await view.query_events(after=self._cursor, limit=1, run_id=run_id)
            if not page.events:
                return False
        self._cursor = (await view.query_events(limit=1, run_id=run_id)).cursor
        return True

    def _computes(self) -> bool:
        """True if this process has computed since the last look."""
        cpu, now = time.process_time(), time.monotonic()
        share = (cpu - self._cpu) / max(now - self._looked, 1e-9)
        self._cpu, self._looked = cpu, now
        return share > COMPUTING_SHARE

    async def _tell(self, view: LightningStore, run_id: str | None) -> None:
        proxy: Any = getattr(self.algorithm, "llm_proxy", None)
        report = await stall_report(
            view,
            run_id,
            algorithm=self.position() if self.position else self._place(),
            gateway=proxy.stats() if proxy is not None else None,
        )
        text = f"No progress for {self.policy.seconds:g} s (stall_timeout). What each part waits for:\n{report}"
        if self.policy.on_stall == "raise":
            raise StalledError(text)
        logger.warning("%s", text)

    def _place(self) -> list[str]:
        """Where the algorithm stands: its thread if it is synchronous, else its task."""
        task = next((task for task in asyncio.all_tasks() if task.get_name() == "algorithm"), None)
        return thread_whereabouts("algorithm") or (whereabouts(task) if task is not None else [])
