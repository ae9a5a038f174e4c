"""Writes of a script to the server without a transaction, in an order that is safe against a crash at any point.

One document changes as a whole, several do not. So every flush has a commit: the replacement of rollouts on the number
of their last change. The steps before it have no effect without it, and any process may do the steps after it.

1.  *Rows of tokens* (claims with their results; answers of other calls) are inserted first: of two requests with the
    same token, the second finds the row and is run again. After a crash here, a claim's row names attempts that do not
    exist; a request that repeats the token waits for them for a while, then claims again. The claimed rollouts are free
    again when their leases expire. A row of resources names a version without its token, so the resources are published
    again; a row of a deletion names rollouts that still exist, which are removed then. Rows that record the results of
    earlier calls (of a deleted rollout, or the oldest of a record) are valid whatever happens to the flush.
2.  *Fences*: a rollout with an abandoned earlier flush gets a new number, so that this flush can no longer commit.
3.  *Spans* are inserted under the number of the change that will count them. After a crash here, they exist but are not
    counted; a repeated call finds a number that the rollout does not name, removes them and stores them again.
4.  *New rollouts* are inserted in order, each complete and in the queue at once. After a crash here, some of a batch
    exist; a request that repeats the token finds them and adds the others.
5.  *Changed rollouts*: the commit. One rollout is replaced if its number is still the one that the script read. Several
    are locked in the same way, all or none, then replaced; a lock blocks writers for at most ten seconds. After a crash
    in between, some are changed. Claims: the row of the token has the claimed ones, the others are free again. Spans:
    uncounted ones are stored again by a repeated call. Deletions: the next one removes the rest.
    A deleted rollout becomes a mark without its partition, which nobody finds, and which step 7 removes.
6.  *Other rows*. Resources: the row of the id is replaced on its version and carries the rows that follow it (the
    version, the pointer to the latest). After a crash, a reader of the row writes them, so a repeated token and every
    reader of the version find it complete. The row of a run is replaced on its version, too; its records were written
    before (`run_records.py`), and it records the calls that changed it.
7.  *Spans of deleted rollouts*, then their marks. After a crash, the next process that opens the partition does it.
8.  *Worker rows*, which only repeat the attempts. A lost race must not repeat the steps above, so the script's changes
    are merged into the present row. After a crash, the worker's next call writes them again.

A race lost up to step 6 removes the data of steps 1 and 3, and the script is run again. When the connection breaks,
nothing is removed, since nobody knows which steps were carried out.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from pymongo import ReplaceOne, UpdateOne
from pymongo.errors import BulkWriteError, PyMongoError

from agentlightning.errors import BusyError
from agentlightning.store.mongo import rows as mongo_rows
from agentlightning.store.mongo.change_numbers import Block, FlushNumbers
from agentlightning.store.mongo.documents import (
    RECENT,
    Document,
    LostRace,
    Partition,
    Stored,
    only_duplicates,
    record_document,
)
from agentlightning.store.mongo.queue import LEASE_SECONDS
from agentlightning.store.mongo.tx import MongoTx

_CHUNK = 500
"""New rollouts sent at a time, so that they are stored soon after their numbers were allocated."""


def flush(tx: MongoTx) -> None:
    """Write the changes of a script.

    Raises:
        LostRace: another writer changed data that the script read; none of its changes counts.
        TooLargeError: a value does not fit into a document; nothing was written.
    """
    if tx.records or tx.new_spans or tx.rows.changed:
        with tx.numbers.for_flush() as flush_numbers:
            _Flush(tx, flush_numbers).run()


@dataclass
class _Change:
    """The change of one rollout's document."""

    rollout_id: str
    document: Document
    stored: Stored | None
    expected: int
    """The number that the document must have to be replaced."""
    numbers: list[int] = field(default_factory=list[int])
    """Numbers of the change: the last one counts, and all are written, so that no reader waits for one."""
    tag: int = 0
    """The number under which its new spans are written."""

    def give(self, number: int) -> None:
        """Give the change a number."""
        self.numbers.append(number)
        before = self.stored.recent if self.stored is not None else ()
        self.document["change"] = number
        self.document["recent"] = [*before, *self.numbers][-RECENT:]

    @property
    def standing(self) -> Document:
        """Query for the document that it replaces."""
        return {"_id": self.document["_id"], "change": self.expected}


class _Flush:
    """One flush. Everything is encoded before anything is written."""

    def __init__(self, tx: MongoTx, flush_numbers: FlushNumbers) -> None:
        self._tx = tx
        self._partition = tx.partition
        self._flush_numbers = flush_numbers
        self._changes: dict[str, _Change] = {}
        for rollout_id, record in tx.records.items():
            stored = tx.fetch(rollout_id)
            if record is not None:
                document = record_document(tx.partition, record)
                if stored is not None:
                    document["number"] = stored.number
            elif stored is not None:
                document = {"_id": tx.partition.id(rollout_id), "deleted": tx.partition.name, "rollout_id": rollout_id}
            else:
                continue
            self._changes[rollout_id] = _Change(rollout_id, document, stored, stored.change if stored else 0)
        self._new = [change for change in self._changes.values() if change.stored is None]
        self._old = [change for change in self._changes.values() if change.stored is not None]
        puts = tx.rows.puts()
        tokens = [put for put in puts if put.kind in ("claim", "token")]
        self._claims = [put for put in tokens if put.read]
        self._notes = [put for put in tokens if not put.read]
        self._workers = [put for put in puts if put.kind == "worker"]
        self._rows = [put for put in puts if put.kind not in ("claim", "token", "worker")]
        assert not (self._rows and self._changes), "two commits: no script changes resources and rollouts at once"
        self._fences: dict[str, int] = {}
        self._locks: list[int] = []
        self._locked: list[_Change] = []
        self._inserted: set[str] = set()

    def run(self) -> None:
        block = self._number()
        self._tx.flushing = True
        try:
            for put in self._claims:
                mongo_rows.write(self._partition, put)
            mongo_rows.write_notes(self._partition, self._notes)
            for rollout_id, number in self._fences.items():
                stored = self._tx.stored[rollout_id]
                assert stored is not None, rollout_id
                standing = {"_id": self._partition.id(rollout_id), "change": stored.change}
                if not self._partition.rollouts.update_one(standing, {"$set": {"change": number}}).matched_count:
                    raise LostRace
                if rollout_id in self._changes:
                    self._changes[rollout_id].expected = number
            self._add_spans()
            self._insert_new(block)
            self._replace_old(block)
        except LostRace:
            self._take_back()
            raise
        try:
            self._write_rows(block)
        except LostRace:
            self._take_back()
            raise
        self._partition.finish_deletions([change.document for change in self._old if "deleted" in change.document])
        for put in self._workers:
            mongo_rows.merge(self._partition, put)

    def _write_rows(self, block: Block) -> None:
        runs = [put for put in self._rows if put.kind == "run"]
        if runs and not block.fresh:
            again = self._flush_numbers.allocate(len(runs))
            for place, put in enumerate(runs):
                put.change = again.changes + place
        mongo_rows.write_all(self._partition, self._rows)
        self._tx.rows.drop()

    def _number(self) -> Block:
        """Allocate the numbers of the flush: one for each fence, lock, change, new rollout and row."""
        fences, locks = sorted(self._tx.fenced), len(self._old) if len(self._old) > 1 else 0
        puts = [*self._claims, *self._notes, *self._rows, *self._workers]
        runs = [put for put in self._rows if put.kind == "run"]
        changes = len(fences) + locks + len(self._changes) + len(runs)
        block = self._flush_numbers.allocate(changes, len(self._new) + len(puts))
        numbers = itertools.count(block.changes)
        self._fences = {rollout_id: next(numbers) for rollout_id in fences}
        self._locks = [next(numbers) for _ in range(locks)]
        for rollout_id in self._fences.keys() & self._changes.keys():
            self._changes[rollout_id].give(self._fences[rollout_id])
        for change, lock in zip(self._old, self._locks, strict=False):
            change.give(lock)
        for change in self._changes.values():
            change.tag = next(numbers)
            change.give(change.tag)
        for put in runs:
            put.change = next(numbers)
        numbers = itertools.count(block.numbers)
        for change in self._new:
            change.document["number"] = next(numbers)
        for put in puts:
            put.version = next(numbers)
        return block

    # --- before the commit -----------------------------------------------------------------------------------------

    def _add_spans(self) -> None:
        for rollout_id, tags in self._tx.abandoned.items():
            self._partition.spans.delete_many(_spans_of(self._partition, rollout_id, sorted(tags)))
        if not self._tx.new_spans:
            return
        documents = [
            {
                "partition": self._partition.name,
                "rollout_id": rollout_id,
                "attempt_id": attempt_id,
                "span_id": span_id,
                "change": self._changes[rollout_id].tag if rollout_id in self._changes else 0,
                "place": place,
                "written": time.time(),
                "body": body,
            }
            for place, ((rollout_id, attempt_id, span_id), body) in enumerate(self._tx.new_spans.items())
        ]
        try:
            self._partition.spans.insert_many(documents, ordered=False)
        except BulkWriteError as error:
            if only_duplicates(error):
                raise LostRace(careful=True) from None
            self._take_back()
            raise

    def _take_back(self) -> None:
        """Remove the writes that have no effect now. Those that cannot be removed are recognised as abandoned later."""
        with contextlib.suppress(PyMongoError):
            for rollout_id in {key[0] for key in self._tx.new_spans} - self._inserted:
                if rollout_id in self._changes:
                    tags = [self._changes[rollout_id].tag]
                    self._partition.spans.delete_many(_spans_of(self._partition, rollout_id, tags))
            for put in self._claims:  # the rows written with these versions
                row = {"_id": self._partition.id(put.kind, put.key), "version": put.version}
                self._partition.rows.delete_one(row)
            if self._locked:
                unlock = [UpdateOne(change.standing, {"$set": {"lock": 0.0}}) for change in self._locked]
                self._partition.rollouts.bulk_write(unlock, ordered=False)

    # --- the commit ------------------------------------------------------------------------------------------------

    def _insert_new(self, block: Block) -> None:
        for start in range(0, len(self._new), _CHUNK):
            chunk = self._new[start : start + _CHUNK]
            self._renew(block, chunk)
            try:
                self._partition.rollouts.insert_many([change.document for change in chunk])
            except BulkWriteError as error:
                self._inserted.update(change.rollout_id for change in chunk[: error.details["nInserted"]])
                if only_duplicates(error):
                    raise LostRace from None
                raise
            self._inserted.update(change.rollout_id for change in chunk)

    def _replace_old(self, block: Block) -> None:
        if len(self._old) > 1:
            self._lock()
        self._renew(block, self._old)
        if len(self._old) == 1:
            change = self._old[0]
            if not self._partition.rollouts.replace_one(change.standing, change.document).matched_count:
                raise LostRace
        elif self._old:
            replace = [ReplaceOne(change.standing, change.document) for change in self._old]
            replaced = self._partition.rollouts.bulk_write(replace, ordered=False).matched_count
            if replaced < len(self._old):
                raise BusyError(
                    f"Only {replaced} of {len(self._old)} rollouts could be changed: this process stood still for more "
                    f"than {LEASE_SECONDS:.0f} s in the middle of it. Repeat the call with its token."
                )

    def _lock(self) -> None:
        """Give each rollout the number of its lock; if one fails, the race is lost."""
        begun, until = time.monotonic(), time.time() + LEASE_SECONDS
        lock: list[UpdateOne] = []
        for change, number in zip(self._old, self._locks, strict=True):
            lock.append(UpdateOne(change.standing, {"$set": {"change": number, "lock": until}}))
            change.expected = number
        self._locked = self._old
        locked = self._partition.rollouts.bulk_write(lock, ordered=False).matched_count
        if locked < len(self._old) or time.monotonic() - begun > LEASE_SECONDS / 2:
            raise LostRace
        self._locked = []

    def _renew(self, block: Block, changes: Sequence[_Change]) -> None:
        """Allocate new numbers if the old ones were allocated so long ago that readers no longer wait for them."""
        if changes and not block.fresh:
            again = self._flush_numbers.allocate(len(changes))
            for place, change in enumerate(changes):
                change.give(again.changes + place)
            block.time = again.time


def _spans_of(partition: Partition, rollout_id: str, tags: list[int]) -> Document:
    return {"partition": partition.name, "rollout_id": rollout_id, "change": {"$in": tags}}
