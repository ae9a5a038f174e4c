"""Keeps trackers from the run: each has a thread and a bounded queue, and what it does wrong is counted."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from agentlightning.trackers.tracker import RunEnding, TrackedRun, Tracker
from agentlightning.types.runs import RunRecord
from agentlightning.utils.exceptions import readable
from agentlightning.utils.masking import masked_text

logger = logging.getLogger(__name__)

MOST_WAITING = 1000
"""Records that wait for a tracker; further ones are dropped."""
_LOOK_SECONDS = 0.1
"""How often an idle thread looks whether the run has ended."""
_TOLD = frozenset(("step", "evaluation", "alarm", "checkpoint", "prompt"))


class Feed:
    """Tells one tracker of one run. `tell` may be called by any thread and never waits."""

    def __init__(self, tracker: Tracker, run: TrackedRun, *, most_waiting: int = MOST_WAITING) -> None:
        self.name = type(tracker).__name__
        self.failures = 0
        """Calls of the tracker that raised."""
        self.dropped = 0
        """Records that it was not told of."""
        self._tracker, self._run = tracker, run
        self._waiting: queue.Queue[RunRecord] = queue.Queue(most_waiting)
        self._ending: RunEnding | None = None
        self._given_up = False
        self._thread = threading.Thread(target=self._feed, name=f"tracker-{self.name}", daemon=True)
        self._thread.start()

    def tell(self, record: RunRecord) -> None:
        """Pass a record on, or count it as dropped."""
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            if not self.dropped:
                logger.warning(
                    "%s is slower than the run: %d records wait, further ones are dropped and counted",
                    *(self.name, self._waiting.maxsize),
                )
            self.dropped += 1

    def end(self, ending: RunEnding) -> None:
        """Let the tracker finish once it has what waits. Returns at once."""
        self._ending = ending

    def join(self, seconds: float) -> bool:
        """Wait for the tracker to have finished; False if it has not by then: the rest is lost."""
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            self._given_up = True
            logger.warning("%s has not finished in time; %d records are lost", self.name, self._waiting.qsize())
            return False
        if self.failures or self.dropped:
            logger.warning("%s: %d calls failed, %d records were dropped", self.name, self.failures, self.dropped)
        return True

    def _feed(self) -> None:
        if not self._try("start", partial(self._tracker.start, self._run)):
            while self._ending is None:  # what waits is counted, and memory stays bounded
                self._take()
            self.dropped += self._waiting.qsize()
            return
        while not self._given_up:
            ended = self._ending is not None  # asked first: what was told before the end is in the queue
            record = self._take(count=False)
            if record is not None:
                self._try("record", partial(self._tracker.record, record))
            elif ended and self._ending is not None:
                self._try("finish", partial(self._tracker.finish, self._ending))
                return

    def _take(self, *, count: bool = True) -> RunRecord | None:
        try:
            record = self._waiting.get(timeout=_LOOK_SECONDS)
        except queue.Empty:
            return None
        self.dropped += count
        return record

    def _try(self, what: str, call: Callable[[], None]) -> bool:
        try:
            call()
        except BaseException as error:  # SystemExit, too: a tracker never ends the run
            if not self.failures:
                told = masked_text(f"{type(error).__name__}: {readable(error)}")
                logger.warning(
                    "%s failed (%s); training goes on%s: %s",
                    *(self.name, what, " without it" if what == "start" else ", further failures are counted", told),
                )
            self.failures += 1
            return False
        return True


class Feeds:
    """Tells all trackers of one run."""

    def __init__(self, trackers: Sequence[Tracker], run: TrackedRun) -> None:
        self._feeds = [Feed(tracker, run) for tracker in trackers]

    def tell(self, records: Sequence[RunRecord]) -> None:
        """Pass on the records that trackers are told of. Never waits."""
        for record in records:
            if record.kind in _TOLD:
                for feed in self._feeds:
                    feed.tell(record)

    def end(self, ending: RunEnding, seconds: float) -> None:
        """Let all finish, and wait so many seconds for them together."""
        until = time.monotonic() + seconds
        for feed in self._feeds:
            feed.end(ending)
        for feed in self._feeds:
            feed.join(until - time.monotonic())
