"""The trackers of one run: begun and ended with it, and told of its records in between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentlightning.training.records import RunLog
from agentlightning.training.run_folder import versions
from agentlightning.types.runs import Run, RunRecord, RunState
from agentlightning.utils.concurrency.loop_thread import call_in_thread
from agentlightning.utils.exceptions import readable
from agentlightning.utils.masking import masked_text

if TYPE_CHECKING:
    from agentlightning.trackers.feed import Feeds
    from agentlightning.trackers.tracker import Tracker

FINISH_SECONDS = 30.0
"""Trackers have so long to take what waits, once the run is over."""
HASTY_FINISH_SECONDS = 1.5
"""The same after an interruption."""
_READ_SECONDS = 2.0


class RunTracking:
    """Tells trackers of one run. Without any it does nothing."""

    def __init__(
        self, trackers: Sequence[Tracker], run_id: str | None, algorithm: str | None, config: dict[str, Any]
    ) -> None:
        self.result: Any = None
        """What the algorithm returned."""
        self._trackers, self._run_id = trackers, run_id or ""
        self._algorithm, self._config = algorithm, config
        self._feeds: Feeds | None = None

    def tell(self, records: Sequence[RunRecord]) -> None:
        """Pass records on. Never waits."""
        if self._feeds is not None:
            self._feeds.tell(records)

    @contextlib.asynccontextmanager
    async def around(self, run_log: RunLog) -> AsyncGenerator[None]:
        """Begin the trackers, and end them with what became of the body."""
        if not self._trackers:
            yield
            return
        from agentlightning.trackers.feed import Feeds
        from agentlightning.trackers.tracker import TrackedRun

        run = await _run_of(run_log)
        resumed = run is not None and run.starts > 1
        about = TrackedRun(self._run_id, self._algorithm, self._config, versions(), resumed=resumed)
        self._feeds = Feeds(self._trackers, about)
        try:
            yield
        except BaseException as error:  # whatever ended the body, trackers are told
            await self._end(run_log, error)
            raise
        await self._end(run_log, None)

    async def _end(self, run_log: RunLog, error: BaseException | None) -> None:
        from agentlightning.trackers.tracker import RunEnding

        feeds, self._feeds = self._feeds, None
        assert feeds is not None
        run = await _run_of(run_log)
        state = _state_of(run, error)
        told = None
        if error is not None and state == "failed":
            told = masked_text(f"{type(error).__name__}: {readable(error)}")
        model = getattr(self.result, "model_path", None)
        path = str(model) if isinstance(model, (str, Path)) else None
        ending = RunEnding(state, told, None if run is None else run.best, path)
        seconds = HASTY_FINISH_SECONDS if state in ("interrupted", "stopped") else FINISH_SECONDS
        await call_in_thread(lambda: feeds.end(ending, seconds), name="trackers-end")


async def _run_of(run_log: RunLog) -> Run | None:
    try:
        return await asyncio.wait_for(run_log.run(), _READ_SECONDS)
    except Exception:  # a store that is away, or knows no such run: trackers are told less
        return None


def _state_of(run: Run | None, error: BaseException | None) -> RunState:
    if error is None:
        return "succeeded"
    if run is not None and run.stop_reason is not None:
        return "stopped"
    return "interrupted" if isinstance(error, (asyncio.CancelledError, KeyboardInterrupt, SystemExit)) else "failed"
