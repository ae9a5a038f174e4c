"""The numbers of changes, rows and queue places in a partition, allocated from one counter document.

A number is allocated before its document is written, so a reader may not find the document yet. `Horizon` computes up
to which number all changes are visible. For changes of this process, this is exact. Changes of other processes are
known only from the counter: a reader waits for such a number until a document has it, or for `FOREIGN_SECONDS` after
this process first saw the counter above it. A flush therefore writes a change within `FRESH_SECONDS` of allocating its
number, or allocates a new number.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pymongo.errors import ConnectionFailure

from agentlightning.store.mongo.schema import Partition
from agentlightning.store.rules.durable import check_not_newer

FOREIGN_SECONDS = 1.0
FRESH_SECONDS = 0.5


class Horizon:
    """The visible changes. Pure: times (monotonic seconds) are passed as arguments. Not thread-safe."""

    def __init__(self) -> None:
        self.top = 0
        """The largest number known to be allocated."""
        self._missing: dict[int, tuple[int, float]] = {}
        """Ranges of numbers that documents may not have yet: first number, last number, and the time until which
        readers wait for them. Ranges of a flush of this process have no such time."""

    def observe(self, top: int, now: float) -> None:
        """Record that the counter is at `top`. Numbers above the last value were allocated by other processes."""
        if top > self.top:
            self._missing[self.top + 1] = top, now + FOREIGN_SECONDS
            self.top = top

    def allocated(self, first: int, last: int, now: float) -> None:
        """Record that a flush of this process allocated the numbers from `first` to `last`."""
        self.observe(first - 1, now)
        if last >= first:
            self._missing[first] = last, math.inf
            self.top = max(self.top, last)

    def finished(self, first: int, now: float, *, sure: bool) -> None:
        """Record that a flush has ended. `sure` means that nothing of it can still reach the server."""
        if first in self._missing:
            last, _ = self._missing.pop(first)
            if not sure:
                self._missing[first] = last, now + FOREIGN_SECONDS

    def unsure(self, now: float) -> bool:
        """Return True while other processes may still be writing changes with allocated numbers."""
        self._missing = {first: (last, end) for first, (last, end) in self._missing.items() if now < end}
        return any(end < math.inf for _, end in self._missing.values())

    def visible(self, now: float, after: int, seen: Collection[int]) -> int:
        """Return the largest number up to which no change after `after` is missing.

        `seen` are numbers after `after` that documents have.
        """
        self.unsure(now)
        stop = self.top
        for first, (last, _) in self._missing.items():
            missing = (n for n in range(max(first, after + 1), min(last, stop) + 1) if n not in seen)
            stop = next(missing, stop + 1) - 1
        return stop


@dataclass
class Block:
    """Numbers that belong to one flush."""

    changes: int
    """First change number."""
    numbers: int
    """First of the other numbers."""
    time: float = field(default_factory=time.monotonic)

    @property
    def fresh(self) -> bool:
        """True while a change can be written with these numbers."""
        return time.monotonic() - self.time < FRESH_SECONDS


Allocate = Callable[[int, int], Block]
"""Allocates a number of change numbers, and a number of other numbers, for one flush."""


class ChangeNumbers:
    """The counter document of one partition, as one process uses it. Thread-safe."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._lock = threading.Lock()
        self._horizon = Horizon()
        self._unsure = False
        """True if the last call of `others_wrote` saw changes that were not visible yet."""

    @contextmanager
    def for_flush(self) -> Generator[Allocate]:
        """Yield the allocator for the numbers of one flush. They are in use until the context ends."""
        blocks: list[Block] = []
        sure = True

        def allocate(changes: int, others: int) -> Block:
            block = self._allocate(changes, others)
            if changes:
                blocks.append(block)
            return block

        try:
            yield allocate
        except ConnectionFailure:  # the last request may still be carried out
            sure = False
            raise
        finally:  # however the flush ended, readers must not wait for its numbers
            now = time.monotonic()
            with self._lock:
                for block in blocks:
                    self._horizon.finished(block.changes, now, sure=sure)

    def _allocate(self, changes: int, others: int) -> Block:
        with self._lock:  # one at a time, so that a gap between the numbers of this process belongs to others
            counter = self._partition.add_to_counter("counters", change=changes, number=others)
            database = self._partition.counters.database.name
            check_not_newer(f"in the MongoDB database {database!r}", counter.get("schema", 0))
            block = Block(counter["change"] - changes + 1, counter["number"] - others + 1)
            self._horizon.allocated(block.changes, counter["change"], block.time)
            return block

    def look(self) -> tuple[int, bool]:
        """Read the counter. Return the largest allocated change number, and whether other processes may still be
        writing changes up to it."""
        with self._lock:
            counter = self._partition.counters.find_one({"_id": self._partition.id("counters")}, {"change": 1})
            now = time.monotonic()
            self._horizon.observe(counter["change"] if counter else 0, now)
            return self._horizon.top, self._horizon.unsure(now)

    def visible(self, after: int, seen: Collection[int]) -> int:
        """Return the largest number up to which no change after `after` is missing (see `Horizon`)."""
        with self._lock:
            return self._horizon.visible(time.monotonic(), after, seen)

    def others_wrote(self) -> bool:
        """Return True if other processes may have changed data since the last call, visible now or soon."""
        before, (_, self._unsure) = self._unsure, self.look()
        return before or self._unsure
