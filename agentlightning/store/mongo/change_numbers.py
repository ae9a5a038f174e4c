"""The numbers that order a partition: changes, rows and queue places, allocated from one counter document.

A number is allocated before its document is written, so for a moment a reader does not find it. `Horizon` knows up to
which number every change is visible. For the changes of this process that is exact. Changes of others are known only
from the moved counter: a reader waits for such a number until a document has it, or for `FOREIGN_SECONDS` after this
process first saw the counter beyond it. In return, a flush writes a change within `FRESH_SECONDS` of allocating its
number, or allocates a new one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pymongo import ReturnDocument
from pymongo.collection import Collection as MongoCollection
from pymongo.errors import ConnectionFailure
from pymongo.write_concern import WriteConcern

from agentlightning.errors import StoreWriteError
from agentlightning.store.mongo.schema import Document
from agentlightning.store.rules.durable import check_not_newer

FOREIGN_SECONDS = 1.0
FRESH_SECONDS = 0.5


class Horizon:
    """The visible changes. Pure: times (monotonic seconds) are arguments. Not thread-safe."""

    def __init__(self) -> None:
        self.top = 0
        """The largest number known to be allocated."""
        self._own: dict[int, int] = {}
        """First and last number of each flush of this process that is in progress."""
        self._foreign: list[tuple[int, int, float]] = []
        """First and last number that others allocated, and the time at which this was noticed."""

    def observe(self, top: int, now: float) -> None:
        """Record that the counter is at `top`: numbers above the last look were allocated by others."""
        if top > self.top:
            self._foreign.append((self.top + 1, top, now))
            self.top = top

    def allocated(self, first: int, last: int, now: float) -> None:
        """Record that a flush of this process allocated the numbers from `first` to `last`."""
        self.observe(first - 1, now)
        if last >= first:
            self._own[first] = last
            self.top = max(self.top, last)

    def finished(self, first: int, now: float, *, sure: bool) -> None:
        """Record that a flush is over; `sure` means that nothing of it can still reach the server."""
        last = self._own.pop(first, None)
        if last is not None and not sure:
            self._foreign.append((first, last, now))

    def unsure(self, now: float) -> bool:
        """Return True while others may still be writing changes that the counter has counted."""
        self._foreign = [span for span in self._foreign if now - span[2] < FOREIGN_SECONDS]
        return bool(self._foreign)

    def visible(self, now: float, after: int, seen: Collection[int]) -> int:
        """Return the largest number up to which no change after `after` is still missing.

        `seen` are numbers after `after` that documents have.
        """
        self.unsure(now)
        stop = min([self.top, *(first - 1 for first in self._own)])
        for first, last, _ in self._foreign:
            missing = (n for n in range(max(first, after + 1), min(last, stop) + 1) if n not in seen)
            stop = next(missing, stop + 1) - 1
        return stop


@dataclass
class Block:
    """Numbers that belong to one flush."""

    changes: int
    """The first of the change numbers."""
    numbers: int
    """The first of the others."""
    time: float = field(default_factory=time.monotonic)

    @property
    def fresh(self) -> bool:
        """True while a change may be written under these numbers."""
        return time.monotonic() - self.time < FRESH_SECONDS


class ChangeNumbers:
    """The counter document of one partition, as one process uses it. Thread-safe.

    The counter is incremented with write concern 1. That is safe: server and replica set keep writes in order, so when
    a document with a number is durable, the increments before it are durable, too.
    """

    def __init__(self, counters: MongoCollection[Document], counter_id: str) -> None:
        self._counters = counters.with_options(write_concern=WriteConcern(1))
        self._id = counter_id
        self._lock = threading.Lock()
        self._horizon = Horizon()

    @contextmanager
    def for_flush(self) -> Generator[FlushNumbers]:
        """Yield the allocator of the numbers of one flush; they are in use until the context ends."""
        flush_numbers, sure = FlushNumbers(self), True
        try:
            yield flush_numbers
        except ConnectionFailure:  # the last request may still be carried out
            sure = False
            raise
        finally:  # however the flush ended, readers must not wait for its numbers
            now = time.monotonic()
            with self._lock:
                for block in flush_numbers.blocks:
                    self._horizon.finished(block.changes, now, sure=sure)

    def allocate(self, changes: int, numbers: int) -> Block:
        """Allocate so many numbers of each sort."""
        with self._lock:  # one at a time, so that a gap between the numbers of this process belongs to others
            counted: Document | None = self._counters.find_one_and_update(
                {"_id": self._id},
                {"$inc": {"change": changes, "number": numbers}},
                upsert=True,
                return_document=ReturnDocument.AFTER,
            )
            if counted is None:
                raise StoreWriteError(
                    "The MongoDB server gave no number for a change; nothing was stored, try it again"
                )
            check_not_newer(f"in the MongoDB database {self._counters.database.name!r}", counted.get("schema", 0))
            block = Block(counted["change"] - changes + 1, counted["number"] - numbers + 1)
            self._horizon.allocated(block.changes, counted["change"], block.time)
            return block

    def look(self) -> int:
        """Read the counter and return the largest change number that anybody has allocated."""
        with self._lock:
            counted = self._counters.find_one({"_id": self._id}, {"change": 1})
            self._horizon.observe(counted["change"] if counted else 0, time.monotonic())
            return self._horizon.top

    def unsure(self) -> bool:
        """Return True while others may still be writing changes that the counter has counted."""
        with self._lock:
            return self._horizon.unsure(time.monotonic())

    def visible(self, after: int, seen: Collection[int]) -> int:
        """Return the largest number up to which no change after `after` is still missing (see `Horizon`)."""
        with self._lock:
            return self._horizon.visible(time.monotonic(), after, seen)

    def others_wrote(self) -> bool:
        """Return True if others may have changed data since the last call, visible now or soon."""
        with self._lock:
            before = self._horizon.unsure(time.monotonic())
        self.look()
        return before or self.unsure()


class FlushNumbers:
    """Allocates the numbers of one flush."""

    def __init__(self, numbers: ChangeNumbers) -> None:
        self._numbers = numbers
        self.blocks: list[Block] = []

    def allocate(self, changes: int, numbers: int = 0) -> Block:
        """Allocate so many numbers of each sort."""
        block = self._numbers.allocate(changes, numbers)
        if changes:
            self.blocks.append(block)
        return block
