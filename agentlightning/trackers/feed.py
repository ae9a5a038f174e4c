"""Isolates the run from its trackers: each has a thread and a limited queue, and its failures are counted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agentlightning.trackers.tracker import RunEnding, TrackedRun, Tracker
from agentlightning.training.records import RunLog
from agentlightning.training.run_folder import versions
from agentlightning.types.runs import Run, RunRecord, RunState
from agentlightning.utils.concurrency.loop_thread import call_in_thread
from agentlightning.utils.exceptions import readable
from agentlightning.utils.masking import masked_text

logger = logging.getLogger(__name__)

MOST_WAITING = 1000
"""Maximum number of records that wait for a tracker; additional records are dropped."""
_KINDS = frozenset(("step", "evaluation", "alarm", "checkpoint", "prompt"))


class Feed:
    """Passes the records of one run to one tracker. `tell` may be called from any thread and never blocks."""

    def __init__(self, tracker: Tracker, run: TrackedRun, *, most_waiting: int = MOST_WAITING) -> None:
        self.name = type(tracker).__name__
        self.failures = 0
        """Number of calls of the tracker that raised an error."""
        self.dropped = 0
        """Number of records that the tracker did not receive."""
        self._tracker, self._run, self._most_waiting = tracker, run, most_waiting
        self._waiting = queue.SimpleQueue[RunRecord | RunEnding]()
        self._given_up = False
        self._thread = threading.Thread(target=self._feed, name=f"tracker-{self.name}", daemon=True)
        self._thread.start()

    def tell(self, record: RunRecord) -> None:
        """Pass a record on, or count it as dropped."""
        if self._waiting.qsize() < self._most_waiting:
            self._waiting.put(record)
            return
        if not self.dropped:
            logger.warning(
                "%s is slower than the run: %d records are waiting; further records are dropped and counted",
                *(self.name, self._most_waiting),
            )
        self.dropped += 1

    def end(self, ending: RunEnding) -> None:
        """Make the tracker finish after the waiting records. Returns immediately."""
        self._waiting.put(ending)

    def join(self, seconds: float) -> bool:
        """Wait until the tracker has finished; return False if it does not in time: remaining records are lost."""
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            self._given_up = True
            lost = max(0, self._waiting.qsize() - 1)  # one of them is the ending
            logger.warning("%s did not finish in time; records lost: %d", self.name, lost)
            return False
        if self.failures or self.dropped:
            logger.warning("%s: failed calls: %d, dropped records: %d", self.name, self.failures, self.dropped)
        return True

    def _feed(self) -> None:
        is_started = self._try("start", partial(self._tracker.start, self._run))
        while not self._given_up:
            item = self._waiting.get()
            if isinstance(item, RunEnding):
                if is_started:
                    self._try("finish", partial(self._tracker.finish, item))
                return
            if is_started:
                self._try("record", partial(self._tracker.record, item))
            else:
                self.dropped += 1

    def _try(self, name: str, call: Callable[[], None]) -> bool:
        try:
            call()
        except BaseException as error:  # SystemExit, too: a tracker never ends the run
            if not self.failures:
                text = masked_text(f"{type(error).__name__}: {readable(error)}")
                logger.warning(
                    "%s failed (%s); training continues%s: %s",
                    *(self.name, name, " without it" if name == "start" else ", further failures are counted", text),
                )
            self.failures += 1
            return False
        return True


FINISH_SECONDS = 30.0
"""Seconds after the end of the run for trackers to write pending records."""
HASTY_FINISH_SECONDS = 1.5
"""Seconds after an interruption for trackers to write pending records."""
_READ_SECONDS = 2.0


class RunTracking:
    """Passes the records of one run to its trackers, if any. `about` returns the algorithm's name and the settings."""

    def __init__(
        self, trackers: Sequence[Tracker], run_id: str | None, about: Callable[[], tuple[str | None, dict[str, Any]]]
    ) -> None:
        self.result: Any = None
        """The algorithm's return value."""
        self._trackers, self._run_id, self._about = trackers, run_id or "", about
        self._feeds: list[Feed] = []

    def tell(self, records: Sequence[RunRecord]) -> None:
        """Pass on the records of the kinds that trackers receive. Never blocks."""
        for record in records:
            if record.kind in _KINDS:
                for feed in self._feeds:
                    feed.tell(record)

    @contextlib.asynccontextmanager
    async def around(self, run_log: RunLog) -> AsyncGenerator[None]:
        """Start the trackers, and end them with the result or error of the body."""
        if not self._trackers:
            yield
            return
        run = await _run_of(run_log)
        resumed = run is not None and run.starts > 1
        about = TrackedRun(self._run_id, *self._about(), versions(), resumed=resumed)
        self._feeds = [Feed(tracker, about) for tracker in self._trackers]
        try:
            yield
        except BaseException as error:  # trackers get every kind of end
            await self._end(run_log, error)
            raise
        await self._end(run_log, None)

    async def _end(self, run_log: RunLog, error: BaseException | None) -> None:
        feeds, self._feeds = self._feeds, []
        run = await _run_of(run_log)
        state = _state_of(run, error)
        error_text = None
        if error is not None and state == "failed":
            error_text = masked_text(f"{type(error).__name__}: {readable(error)}")
        model = getattr(self.result, "model_path", None)
        path = str(model) if isinstance(model, (str, Path)) else None
        ending = RunEnding(state, error_text, None if run is None else run.best, path)
        seconds = HASTY_FINISH_SECONDS if state in ("interrupted", "stopped") else FINISH_SECONDS
        until = time.monotonic() + seconds
        for feed in feeds:
            feed.end(ending)
        await call_in_thread(lambda: [feed.join(until - time.monotonic()) for feed in feeds], name="trackers-end")


async def _run_of(run_log: RunLog) -> Run | None:
    try:
        return await asyncio.wait_for(run_log.run(), _READ_SECONDS)
    except Exception:  # an unreachable store, or an unknown run: trackers get less information
        return None


def _state_of(run: Run | None, error: BaseException | None) -> RunState:
    if error is None:
        return "succeeded"
    if run is not None and run.stop_reason is not None:
        return "stopped"
    return "interrupted" if isinstance(error, (asyncio.CancelledError, KeyboardInterrupt, SystemExit)) else "failed"
