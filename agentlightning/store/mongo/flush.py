"""Write the changes of a script to the server without a transaction, in an order that is safe against crashes.

Only a single document changes atomically. So every flush has a commit: the replacement of rollouts that still have the
number of their last change. The steps before it have no effect without it, and any process can do the steps after it.

1.  *Rows of tokens* (claims with their results; results of other calls) are inserted first. If two requests have the
    same token, the second finds the row and is run again. After a crash here, a claim's row names attempts that do not
    exist: a request with the same token waits for them for a while, then claims again. The claimed rollouts are free
    again when their leases expire. A row of resources names a version without its token, so the resources are published
    again. A row of a deletion names rollouts that still exist, which are removed then. Rows with the results of earlier
    calls (of a deleted rollout, or the oldest of a record) are valid whatever happens to the flush.
2.  *Spans* are inserted with the number of the change that will count them. After a crash here, they exist but are not
    counted: a repeated call finds a number that the rollout does not name, removes the spans and stores them again. It
    locks the rollout before (step 4), so that the flush that left the spans cannot commit.
3.  *New rollouts* are inserted in order. Each one is complete and immediately in the queue. After a crash here, some of
    a batch exist: a request with the same token finds them and adds the others.
4.  *Changed rollouts*: the commit. One rollout is replaced if it still has the number that the script read. Several
    are locked in the same way, all or none, then replaced. A lock blocks writers for at most ten seconds. After a crash
    in between, some are changed. Claims: the row of the token has the claimed ones, and the others are free again.
    Spans: uncounted spans are stored again by a repeated call. Deletions: the next one removes the rest. A deleted
    rollout becomes a mark without a partition, which no query finds and which step 6 removes.
5.  *Other rows*. Resources: the row of the id is replaced if it has the version that was read, and contains the rows
    that follow it (the version, the pointer to the latest). After a crash, a reader of the row writes them, so a
    repeated token and every reader of the version find it complete. The row of a run is replaced in the same way, after
    the run's records were inserted, and records the calls that changed it. After a crash in between, the records exist,
    and a repeated call reports them as existing.
6.  *Spans of deleted rollouts*, then their marks. After a crash, the next process that opens the partition does this.
7.  *Worker rows*, which only repeat the attempts. A lost race must not repeat the steps above, so the script's changes
    are merged into the current row. After a crash, the worker's next call writes them again.

If a race is lost up to step 5, the added rows of tokens, spans and records are removed, and the script is run again. If
the connection breaks, nothing is removed, because it is unknown which steps were carried out.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from pymongo import DeleteOne, ReplaceOne, UpdateOne
from pymongo.collection import Collection
from pymongo.errors import BulkWriteError, DuplicateKeyError, PyMongoError

from agentlightning.errors import BusyError
from agentlightning.store.mongo.change_numbers import Allocate
from agentlightning.store.mongo.documents import (
    LEASE_SECONDS,
    RECENT,
    Document,
    LostRace,
    fitting,
    only_duplicates,
    record_fields,
)
from agentlightning.store.mongo.tx import MongoTx, RowKey
from agentlightning.store.rules.tx import Row, WorkerRow, row_type
from agentlightning.types import Worker

_CHUNK = 500
"""Number of new rollouts sent in one step, so that they are stored soon after their numbers were allocated."""
_MERGES = 5
"""Number of tries to merge a worker's row. If others keep replacing it, their version is kept."""


def flush(tx: MongoTx) -> None:
    """Write the changes of a script.

    Raises:
        LostRace: another writer changed data that the script read. None of its changes is stored.
        TooLargeError: a value is too large for a document. Nothing was written.
    """
    if tx.records or tx.puts:
        with tx.numbers.for_flush() as allocate:
            _Flush(tx, allocate).run()


@dataclass(eq=False)
class _Write:
    """A document that replaces the one that the script read."""

    document: Document
    before: Document | None
    read: bool = True
    """True if the script has read it."""
    numbers: list[int] = field(default_factory=list[int])
    """Numbers of the change. The last one counts; all are written, so that no reader waits for one."""

    def give(self, number: int) -> None:
        """Add a number to the change."""
        self.numbers.append(number)
        recent: list[int] = [] if self.before is None else self.before.get("recent", [])
        self.document.update(change=number, recent=[*recent, *self.numbers][-RECENT:])

    def standing(self, name: str) -> Document:
        """Return the query for the document that it replaces, by its number in the field `name`."""
        return {"_id": self.document["_id"], name: None if self.before is None else self.before[name]}


class _Flush:
    """One flush. All changes are encoded before the first one is written."""

    def __init__(self, tx: MongoTx, allocate: Allocate) -> None:
        self._tx = tx
        self._partition = tx.partition
        self._allocate = allocate
        self._changes = {rollout_id: write for rollout_id in tx.records if (write := self._change(rollout_id))}
        self._new = [write for write in self._changes.values() if write.before is None]
        self._old = [write for write in self._changes.values() if write.before is not None]
        puts = [self._put(row_key, row) for row_key, row in tx.puts.items() if row is not None]
        self._tokens = [put for put in puts if put.document["kind"] in ("claim", "token")]
        self._workers = [put for put in puts if put.document["kind"] == "worker"]
        self._rows = [put for put in puts if put.document["kind"] not in ("claim", "token", "worker")]
        self._runs = [put for put in self._rows if put.document["kind"] == "run"]
        assert not (self._rows and self._changes), "two commits: no script changes resources and rollouts at once"
        self._locks = tx.fenced or len(self._old) > 1
        self._added: list[tuple[Collection[Document], list[Document]]] = []
        self._inserted: set[str] = set()
        """New rollouts that are stored with their spans."""
        changes, others = len(self._changes) + len(self._runs), len(self._new) + len(puts)
        self._block = allocate(changes + (len(self._old) if self._locks else 0), others)
        numbers = itertools.count(self._block.changes)
        for write in (*(self._old if self._locks else ()), *self._changes.values(), *self._runs):
            write.give(next(numbers))
        numbers = itertools.count(self._block.numbers)
        for write in self._new:
            write.document["number"] = next(numbers)
        for put in puts:
            put.document["version"] = version = next(numbers)
            put.document["number"] = version if put.before is None else put.before["number"]

    def _change(self, rollout_id: str) -> _Write | None:
        before, record = self._tx.fetch(rollout_id), self._tx.records[rollout_id]
        place = {"_id": self._partition.id(rollout_id)}
        if record is not None:
            number = {} if before is None else {"number": before["number"]}
            return _Write({**place, **self._partition.here, **record_fields(record), **number}, before)
        mark = {**place, "deleted": self._partition.name, "rollout_id": rollout_id}
        return None if before is None else _Write(mark, before)

    def _put(self, row_key: RowKey, row: Row) -> _Write:
        kind, key = row_key
        if kind in ("claim", "worker"):  # rows of tokens are fetched by the scripts that have to know
            self._tx.fetch_row(kind, key)
        body = fitting(row_type(kind).dump_json(row), f"The {kind} row {key!r}")
        place = {"_id": self._partition.id(kind, key), **self._partition.here, "kind": kind, "key": key}
        document: Document = {**place, "written": time.time(), "then": [], "body": body}
        return _Write(document, self._tx.rows.get(row_key), row_key in self._tx.rows)

    def run(self) -> None:
        self._tx.tries.flushing = True
        try:
            self._write_rows(self._tokens)
            if self._tx.fenced:
                self._lock()
            self._add_spans()
            self._insert_new()
            if self._locks and not self._tx.fenced:
                self._lock()
            self._replace_old()
            self._add_run_records()
            self._renew(self._runs)
            self._write_rows(self._rows, together=True)
            self._drop_rows()
        except LostRace:
            self._take_back()
            raise
        self._partition.finish_deletions([write.document for write in self._old if "deleted" in write.document])
        for put in self._workers:
            self._merge(put)

    # --- rollouts and their spans ----------------------------------------------------------------------------------

    def _add_spans(self) -> None:
        for rollout_id, tags in self._tx.abandoned.items():
            spans = {**self._partition.here, "rollout_id": rollout_id, "change": {"$in": sorted(tags)}}
            self._partition.spans.delete_many(spans)
        documents: list[Document] = [
            {
                **self._partition.here,
                "rollout_id": rollout_id,
                "attempt_id": attempt_id,
                "span_id": span_id,
                "change": self._changes[rollout_id].document["change"],
                "place": place,
                "written": time.time(),
                "body": body,
            }
            for place, ((rollout_id, attempt_id, span_id), body) in enumerate(self._tx.new_spans.items())
        ]
        self._add(self._partition.spans, documents)

    def _add_run_records(self) -> None:
        records = self._tx.new_run_records
        if records:
            last = self._partition.add_to_counter("run_records", number=len(records))["number"]
            documents: list[Document] = [
                {
                    **self._partition.here,
                    **{"run_id": run_id, "kind": kind, "step": step, "name": name},
                    **{"number": number, "size": len(body), "body": body.decode()},
                }
                for number, ((run_id, kind, step, name), body) in enumerate(records.items(), last - len(records) + 1)
            ]
            self._add(self._partition.run_records, documents)

    def _add(self, collection: Collection[Document], documents: list[Document]) -> None:
        """Insert documents without an `_id`. None of them should exist."""
        if documents:
            self._added.append((collection, documents))
            try:
                collection.insert_many(documents, ordered=False)
            except BulkWriteError as error:
                if only_duplicates(error):
                    self._tx.tries.careful = True
                    raise LostRace from None
                self._take_back()
                raise

    def _insert_new(self) -> None:
        for start in range(0, len(self._new), _CHUNK):
            chunk = self._new[start : start + _CHUNK]
            self._renew(chunk)
            documents = [write.document for write in chunk]
            try:
                self._partition.rollouts.insert_many(documents)
            except BulkWriteError as error:
                self._inserted.update(each["rollout_id"] for each in documents[: error.details["nInserted"]])
                if only_duplicates(error):
                    raise LostRace from None
                raise
            self._inserted.update(each["rollout_id"] for each in documents)

    def _lock(self) -> None:
        """Set the number of the lock in each rollout. If one fails, the race is lost."""
        begun, until = time.monotonic(), time.time() + LEASE_SECONDS
        lock: list[UpdateOne] = []
        for write in self._old:
            number = write.numbers[0]
            lock.append(UpdateOne(write.standing("change"), {"$set": {"change": number, "lock": until}}))
            write.before = {**(write.before or {}), "change": number}
        locked = self._partition.rollouts.bulk_write(lock, ordered=False).matched_count
        if locked < len(self._old) or time.monotonic() - begun > LEASE_SECONDS / 2:
            raise LostRace

    def _replace_old(self) -> None:
        self._renew(self._old)
        if self._old and not self._locks:
            [write] = self._old
            if not self._partition.rollouts.replace_one(write.standing("change"), write.document).matched_count:
                raise LostRace
        elif self._old:
            replace = [ReplaceOne(write.standing("change"), write.document) for write in self._old]
            replaced = self._partition.rollouts.bulk_write(replace, ordered=False).matched_count
            if replaced < len(self._old):
                raise BusyError(
                    f"Only {replaced} of {len(self._old)} rollouts were changed: this process was paused for more "
                    f"than {LEASE_SECONDS:.0f} s during the call. Repeat the call with the same idempotency token."
                )

    def _renew(self, writes: Sequence[_Write]) -> None:
        """Allocate new numbers if the old ones are so old that readers do not wait for them any more."""
        if writes and not self._block.fresh:
            for number, write in enumerate(writes, self._allocate(len(writes), 0).changes):
                write.give(number)

    def _take_back(self) -> None:
        """Remove the writes that have no effect. Writes that cannot be removed are recognised as abandoned later."""
        with contextlib.suppress(PyMongoError):
            for collection, documents in self._added:
                ids = [each["_id"] for each in documents if each.get("rollout_id") not in self._inserted]
                collection.delete_many({"_id": {"$in": ids}})
            for put in self._tokens:
                if put.read and (self._changes or put.before is None):
                    row = {"_id": put.document["_id"], "version": put.document["version"]}
                    self._partition.rows.delete_one(row)
            if self._locks and self._old:
                unlock = [UpdateOne(write.standing("change"), {"$set": {"lock": 0.0}}) for write in self._old]
                self._partition.rollouts.bulk_write(unlock, ordered=False)

    # --- rows ------------------------------------------------------------------------------------------------------

    def _write_rows(self, puts: Sequence[_Write], *, together: bool = False) -> None:
        """Write the rows that the script read, if they still have their versions, then the others. If the rows belong
        together, the first one is the commit and names the others.

        Raises:
            LostRace: a row has changed since the script read it.
        """
        others = [put for put in puts if not put.read]
        for put in puts:
            if put.read:
                if together:
                    body = put.document["body"]
                    then = [(kind, key, None if text == body else text) for kind, key, text, _ in map(_row_of, others)]
                    put.document["then"], others = then, []
                if not self._replace(put):
                    raise LostRace
                self._partition.finish_row(put.document)
        self._partition.put_newer(map(_row_of, others))

    def _replace(self, put: _Write) -> bool:
        """Write a row if it has the version that the script read; return False if it has changed since."""
        if put.before is not None:
            return self._partition.rows.replace_one(put.standing("version"), put.document).matched_count == 1
        try:
            self._partition.rows.insert_one(put.document)
        except DuplicateKeyError:
            return False
        return True

    def _drop_rows(self) -> None:
        """Remove the rows that the script removed, unless another writer has changed them since.

        Raises:
            LostRace: another writer has changed the row of a run.
        """
        removed: list[DeleteOne] = []
        for (kind, key), row in self._tx.puts.items():
            if row is None:
                before = self._tx.rows.get((kind, key))
                version = {} if before is None else {"version": before["version"]}
                standing = {"_id": self._partition.id(kind, key), **version}
                if kind != "run":
                    removed.append(DeleteOne(standing))
                elif before is not None and not self._partition.rows.delete_one(standing).deleted_count:
                    raise LostRace
        if removed:
            self._partition.rows.bulk_write(removed, ordered=False)

    def _merge(self, put: _Write) -> None:
        """Write a worker's row. If another writer has changed it since, write only the script's changes."""
        body = put.document["body"]
        if put.before is not None:
            base = put.before["body"]
        else:
            base = row_type("worker").dump_json(WorkerRow(Worker(worker_id=put.document["key"])))
        for _ in range(_MERGES):
            if self._replace(put):
                return
            put.before = self._partition.rows.find_one({"_id": put.document["_id"]})
            if put.before is not None:
                put.document.update(number=put.before["number"], body=merged(base, body, put.before["body"]))


def _row_of(put: _Write) -> tuple[str, str, str, int]:
    row = put.document
    return row["kind"], row["key"], row["body"], row["version"]


def merged(base: str | bytes, changed: str, there: str) -> str:
    """Return the current row of a worker with the fields that differ between `base` and `changed` (all JSON)."""
    try:
        before, after, result = (json.loads(body) for body in (base, changed, there))
        worker, was = dict(result["worker"]), dict(before["worker"])
    except (ValueError, TypeError, KeyError):  # damaged: it is written again
        return changed
    worker.update({name: value for name, value in after["worker"].items() if was.get(name) != value})
    beside = {name: value for name, value in after.items() if name != "worker" and before.get(name) != value}
    return json.dumps({**result, **beside, "worker": worker}, ensure_ascii=False)
