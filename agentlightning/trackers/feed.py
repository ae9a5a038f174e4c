"""Isolates the run from its trackers: each has a thread and a bounded queue, and its failures are counted."""

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
"""Largest number of records that wait for a tracker; further ones are dropped."""
_KINDS = frozenset(("step", "evaluation", "alarm", "checkpoint", "prompt"))


class Feed:
    """Passes the records of one run to one tracker. `tell` may be called from any thread and never waits."""

    def __init__(self, tracker: Tracker, run: TrackedRun, *, most_waiting: int = MOST_WAITING) -> None:
        self.name = type(tracker).__name__
        self.failures = 0
        """Number of calls of the tracker that raised."""
        self.dropped = 0
        """Number of records that the tracker did not get."""
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
                "%s is slower than the run: %d records wait, further ones are dropped and counted",
                *(self.name, self._most_waiting),
            )
        self.dropped += 1

    def end(self, ending: RunEnding) -> None:
        """Make the tracker finish after the waiting records. Returns at once."""
        self._waiting.put(ending)

    def join(self, seconds: float) -> bool:
        """Wait until the tracker has finished; return False if it has not in time: the remaining records are lost."""
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            self._given_up = True
            lost = max(0, self._waiting.qsize() - 1)  # one of them is the ending
            logger.warning("%s has not finished in time; %d records are lost", self.name, lost)
            return False
        if self.failures or self.dropped:
            logger.warning("%s: %d calls failed, %d records were dropped", self.name, self.failures, self.dropped)
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
                    "%s failed (%s); training goes on%s: %s",
                    *(self.name, name, " without it" if name == "start" else ", further failures are counted", text),
                )
            self.failures += 1
            return False
        return True


class Feeds:
    """Passes the records of one run to all its trackers."""

    def __init__(self, trackers: Sequence[Tracker], run: TrackedRun) -> None:
        self._feeds = [Feed(tracker, run) for tracker in trackers]

    def tell(self, records: Sequence[RunRecord]) -> None:
        """Pass on the records of the kinds that trackers receive. Never waits."""
        for record in records:
            if record.kind in _KINDS:
                for feed in self._feeds:
                    feed.tell(record)

    def end(self, ending: RunEnding, seconds: float) -> None:
        """Make all trackers finish, and wait at most `seconds` for all of them together."""
        until = time.monotonic() + seconds
        for feed in self._feeds:
            feed.end(ending)
        for feed in self._feeds:
            feed.join(until - time.monotonic())
