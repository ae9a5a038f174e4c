"""The progress of a run while its algorithm runs: a live line on a terminal, and the summary at the end.

The rollouts come from the store's change feed, so the output is the same for every algorithm. Nothing is requested
if nothing would be shown (no terminal, no handler for INFO).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TextIO

from agentlightning.adapter.spans.rewards import final_reward
from agentlightning.base.terminal import counted, one_line
from agentlightning.semconv import AGL_ANNOTATION
from agentlightning.store.base import FINISHED, LightningStore
from agentlightning.training.progress import Style
from agentlightning.types import AttemptedRollout, EventPage, Rollout, RolloutEvent

logger = logging.getLogger(__name__)

PAGE = 200
LOOK_SECONDS = 0.5
"""Seconds that one request for changes is held open, and the longest time between two updates of the line."""
CATCH_UP_SECONDS = 0.3
"""Seconds for the first request for changes, and for the last one before the summary."""


@contextlib.asynccontextmanager
async def followed(report: RunReport, store: LightningStore, style: Style, *, live: bool) -> AsyncGenerator[None]:
    """Follow the run of the view `store` during the body, and show the summary when the body ends or fails.

    `live=False` shows no live line: the algorithm shows its own progress, and the summary is in the log.
    """
    stream: TextIO | None = sys.stderr  # a process without a terminal may have none
    shown = stream is not None and (style == "live" or (style == "auto" and stream.isatty()))
    if style == "none" or not (shown or style == "plain" or logger.isEnabledFor(logging.INFO)):
        yield
        return
    began = time.monotonic()
    draw, close = _shown(report, stream, began) if shown and live and stream else (_nothing, _nothing)
    feed = _Feed(store, report)
    with contextlib.suppress(Exception):  # a failure of the display must not end the run: `follow` retries and logs it
        await asyncio.wait_for(feed.begin(), CATCH_UP_SECONDS)
    following = asyncio.create_task(feed.follow(draw))
    try:
        yield
    finally:
        following.cancel()
        await asyncio.wait([following])
        with contextlib.suppress(asyncio.TimeoutError, asyncio.CancelledError):
            await asyncio.wait_for(feed.catch_up(), CATCH_UP_SECONDS)
        draw()
        close()
        line = report.line(time.monotonic() - began)
        logger.info(line)
        if style == "plain":
            print(one_line(line), file=stream, flush=True)


class _Feed:
    """Reads the changes of a run, and the rewards of ended rollouts, into a report."""

    def __init__(self, store: LightningStore, report: RunReport) -> None:
        self._store = store
        self._report = report
        self._cursor: str | None = None

    async def begin(self) -> None:
        """Read the current cursor, so that no rollout of the body ends before the first request for changes."""
        self._cursor = (await self._page(0.0)).cursor

    async def follow(self, draw: Callable[[], None]) -> None:
        try:
            while True:
                await self._take(await self._page(LOOK_SECONDS))
                draw()
        except NotImplementedError:  # a user's store without a change feed
            logger.debug("%s has no change feed", type(self._store).__name__)
        except Exception as error:  # a failure of the display must not end the run
            logger.warning("Cannot follow the progress of the run any further: %s", error)

    async def catch_up(self) -> None:
        try:
            while await self._take(await self._page(0.0)):
                pass
        except NotImplementedError:
            rollouts = await self._store.query_rollouts()
            await self._note([_standing(rollout) for rollout in rollouts])

    async def _page(self, timeout: float) -> EventPage:
        if self._cursor is None:
            return await self._store.query_events(limit=PAGE)
        return await self._store.query_events(after=self._cursor, limit=PAGE, timeout=timeout)

    async def _take(self, page: EventPage) -> bool:
        """Record the changes on a page and return whether there may be more."""
        await self._note(page.events)
        self._cursor = page.cursor
        return bool(page.events or page.runs)

    async def _note(self, events: Sequence[RolloutEvent]) -> None:
        rewards = await asyncio.gather(*(self._reward(event) for event in events))
        for event, reward in zip(events, rewards, strict=True):
            self._report.note(event, reward)

    async def _reward(self, event: RolloutEvent) -> float | None:
        if event.status not in FINISHED or event.outcome not in ("scored", "policy_fault"):
            return None
        return final_reward(await self._store.query_spans(event.rollout_id, event.attempt_id, name=AGL_ANNOTATION))


def _standing(rollout: Rollout) -> RolloutEvent:
    """Return the feed's event for the current state of a rollout."""
    attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
    return RolloutEvent(
        rollout_id=rollout.rollout_id,
        run_id=rollout.run_id,
        status=rollout.status,
        mode=rollout.mode,
        attempt_id=None if attempt is None else attempt.attempt_id,
        attempt_status=None if attempt is None else attempt.status,
        outcome=None if attempt is None else attempt.outcome,
        worker_id=None if attempt is None else attempt.worker_id,
        spans=0,
        start_time=rollout.start_time,
        end_time=rollout.end_time,
    )


def _shown(report: RunReport, stream: TextIO, began: float) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return two functions: one redraws the run's line, the other replaces it with a table at the end.

    Only one line: runners write to the same terminal, and a redrawn table would overwrite their output.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(file=stream)

    def now() -> Any:
        return Text(one_line(report.status(time.monotonic() - began)), no_wrap=True, overflow="ellipsis")

    def close() -> None:
        live.stop()
        console.print(report.table(time.monotonic() - began))

    live = Live(now(), console=console, refresh_per_second=4, transient=True)
    live.start()
    return (lambda: live.update(now())), close


def _nothing() -> None:
    pass


_UNCLAIMED = {"cancelled": "not run"}
"""Display names for statuses of rollouts that ended without an attempt; others are shown unchanged."""


class EndedRollout(NamedTuple):
    """A rollout of the run that has ended."""

    outcome: str
    """Outcome of its latest attempt; the status of the rollout if no runner claimed it."""
    seconds: float
    """Seconds from enqueueing to the end."""
    reward: float | None = None


@dataclass
class RunReport:
    """The rollouts of one run that were reported so far."""

    name: str
    """Name of the run in messages."""
    place: str
    """The store of its rollouts, for messages."""
    ended: dict[str, EndedRollout] = field(default_factory=dict[str, EndedRollout])
    """Ended rollouts by rollout id."""
    statuses: dict[str, str] = field(default_factory=dict[str, str])
    """Statuses of open rollouts by rollout id."""

    def note(self, event: RolloutEvent, reward: float | None) -> None:
        """Record the state of a rollout; a later call replaces an earlier one."""
        if event.status not in FINISHED:
            self.ended.pop(event.rollout_id, None)
            self.statuses[event.rollout_id] = event.status
            return
        self.statuses.pop(event.rollout_id, None)
        seconds = max(0.0, (event.end_time or event.start_time) - event.start_time)
        self.ended[event.rollout_id] = EndedRollout(
            event.outcome or _UNCLAIMED.get(event.status, event.status), seconds, reward
        )

    @property
    def outcomes(self) -> Counter[str]:
        """Ended rollouts by outcome."""
        return Counter(rollout.outcome for rollout in self.ended.values())

    @property
    def rewards(self) -> list[float]:
        """Rewards of the rollouts that have one."""
        return [rollout.reward for rollout in self.ended.values() if rollout.reward is not None]

    @property
    def waiting(self) -> int:
        """Rollouts in the queue."""
        return sum(status in ("queuing", "requeuing") for status in self.statuses.values())

    @property
    def running(self) -> int:
        """Rollouts that are running."""
        return len(self.statuses) - self.waiting

    def line(self, seconds: float) -> str:
        """Return the end of the run in one line."""
        parts = [f"{counted(len(self.ended), 'rollout')} in {seconds:.1f} s{_listed(self.outcomes)}"]
        if self.statuses:
            parts.append(f"{len(self.statuses)} not at an end")
        parts.append(self.reward_text())
        if self.ended:
            parts.append(self.duration_text())
        return f"{self.name}: {'; '.join(parts)}; kept in {self.place}"

    def status(self, seconds: float) -> str:
        """Return the state of the run in one line."""
        counts = f"{len(self.ended)} ended{_listed(self.outcomes)}, {self.running} running, {self.waiting} waiting"
        return f"{self.name}, {seconds:.0f} s: {counts}; {self.reward_text()}"

    def reward_text(self) -> str:
        """Return the mean reward and the number of rewards."""
        rewards = self.rewards
        return f"mean reward {math.fsum(rewards) / len(rewards):.3f} (of {len(rewards)})" if rewards else "no reward"

    def duration_text(self) -> str:
        """Return the durations of rollouts from enqueueing to the end."""
        seconds = sorted(rollout.seconds for rollout in self.ended.values())
        return (
            f"from queue to end: median {quantile(seconds, 0.5):.2f} s, 90% within "
            f"{quantile(seconds, 0.9):.2f} s, longest {seconds[-1]:.2f} s"
        )

    def table(self, seconds: float) -> Any:
        """Return the state of the run as a table of rich."""
        from rich.table import Table
        from rich.text import Text

        title = Text(one_line(f"{self.name}, {seconds:.0f} s"))
        table = Table(box=None, pad_edge=False, show_header=False, title=title)
        table.title_justify = "left"
        table.add_row("rollouts", f"{len(self.ended)} ended, {self.running} running, {self.waiting} waiting")
        for outcome, count in sorted(self.outcomes.items()):
            table.add_row(Text(one_line(f"  {outcome}")), str(count))
        table.add_row("reward", self.reward_text())
        if self.ended:
            table.add_row("time", self.duration_text())
        table.add_row("kept in", Text(one_line(self.place)))
        return table


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile of sorted values: the smallest that is not exceeded by at least `share` of them."""
    assert ordered
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def _listed(outcomes: Counter[str]) -> str:
    return f" ({', '.join(f'{count} {name}' for name, count in sorted(outcomes.items()))})" if outcomes else ""
