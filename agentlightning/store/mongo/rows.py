"""The rows of a partition as one script sees and changes them, and the writing of the changes to the server.

A row is replaced on its version, the number of its last change. Rows that belong together are written one after the
other: the first is the commit and names the rows that follow, and a reader of it writes them if they are missing. A
worker's row, which only repeats its attempts, never makes a script run twice: its changes are merged.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pymongo import DeleteOne
from pymongo.errors import BulkWriteError, DuplicateKeyError

from agentlightning.errors import DamagedRecordError
from agentlightning.store.mongo.documents import (
    RECENT,
    Document,
    LostRace,
    Partition,
    StoredRow,
    fitting,
    only_duplicates,
    stored_row,
)
from agentlightning.store.mongo.queries import count
from agentlightning.store.rules.durable import read_row, read_row_or_none
from agentlightning.store.rules.tx import Kind, Row, WorkerRow, row_type
from agentlightning.types import Worker

_MERGES = 5
"""Tries to merge a worker's row; if others keep replacing it, their version stays."""


@dataclass
class Put:
    """One row to be written."""

    kind: Kind
    key: str
    body: str
    stored: StoredRow | None
    """The row as the script read it."""
    read: bool
    """The script looked for it."""
    version: int = 0
    change: int = 0
    """Number of this change, for a run."""

    @property
    def change_fields(self) -> Document:
        """Fields that hold the row's position among the changes."""
        before = self.stored.recent if self.stored is not None else ()
        return {"change": self.change, "recent": [*before, self.change][-RECENT:]} if self.change else {}


class Rows:
    """The rows that a script has read and changed. Reads see the changes."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._stored: dict[tuple[Kind, str], StoredRow | None] = {}
        self._changed: dict[tuple[Kind, str], Row | None] = {}

    @property
    def changed(self) -> bool:
        """True if there is something to write."""
        return bool(self._changed)

    def get(self, kind: Kind, key: str) -> tuple[Row | None, StoredRow | None]:
        """Return a row, and its stored form unless the script has changed it."""
        if (kind, key) in self._changed:
            return self._changed[kind, key], None
        stored = self._fetch(kind, key)
        return (None if stored is None else read_row_or_none(kind, key, stored.body)), stored

    def _fetch(self, kind: Kind, key: str) -> StoredRow | None:
        if (kind, key) not in self._stored:
            document = self._partition.rows.find_one({"_id": self._partition.id(kind, key)})
            if document is not None:
                finish(self._partition, document)
            self._stored[kind, key] = None if document is None else stored_row(document)
        return self._stored[kind, key]

    def put(self, kind: Kind, key: str, row: Row | None) -> None:
        """Insert, replace or (None) remove a row."""
        self._changed[kind, key] = row

    def scan(self, kind: Kind, limit: int | None) -> list[tuple[str, Row]]:
        """Return the rows of a kind in the order of first insertion, the first `limit` of them."""
        rows: dict[str, Row] = {}
        query = {"partition": self._partition.name, "kind": kind}
        most = 0 if limit is None else limit + len(self._changed)
        for document in self._partition.rows.find(query, sort=[("number", 1)], limit=most):
            key = document["key"]
            stored = self._stored.get((kind, key)) or stored_row(document)
            self._stored[kind, key] = stored
            with contextlib.suppress(DamagedRecordError):
                rows[key] = read_row(kind, key, stored.body)
        for (of_kind, key), row in self._changed.items():
            if of_kind == kind and row is not None:
                rows[key] = row
            elif of_kind == kind:
                rows.pop(key, None)
        return list(rows.items())[:limit]

    def count(self, kind: Kind) -> int:
        """Return the number of rows of a kind."""
        if any(of_kind == kind for of_kind, _ in self._changed):
            return len(self.scan(kind, None))
        return count(self._partition.rows, {"partition": self._partition.name, "kind": kind})

    def puts(self) -> list[Put]:
        """Return the rows to write.

        Raises:
            TooLargeError: a row does not fit into a document.
        """
        puts: list[Put] = []
        for (kind, key), row in self._changed.items():
            if row is not None:
                if kind in ("claim", "worker"):  # rows of tokens are fetched by the scripts that have to know
                    self._fetch(kind, key)
                body = fitting(row_type(kind).dump_json(row), f"The {kind} row {key!r}")
                puts.append(Put(kind, key, body, self._stored.get((kind, key)), (kind, key) in self._stored))
        return puts

    def drop(self) -> None:
        """Remove the rows that the script removed, unless another writer has changed them since.

        Raises:
            LostRace: another writer has changed the row of a run.
        """
        removed: list[DeleteOne] = []
        for (kind, key), row in self._changed.items():
            if row is None:
                stored = self._stored.get((kind, key))
                version = {} if stored is None else {"version": stored.version}
                standing = {"_id": self._partition.id(kind, key), **version}
                if kind != "run":
                    removed.append(DeleteOne(standing))
                elif stored is not None and not self._partition.rows.delete_one(standing).deleted_count:
                    raise LostRace
        if removed:
            self._partition.rows.bulk_write(removed, ordered=False)


def write_all(partition: Partition, puts: Sequence[Put]) -> None:
    """Write rows that belong together: first those that the script read, on their versions; then the others.

    Raises:
        LostRace: the first of them has changed since the script read it.
    """
    following = [put for put in puts if not put.read]
    for put in puts:
        if put.read:
            write(partition, put, following)
            following = []
    for put in following:
        _put_newer(partition, put.kind, put.key, put.body, put.version)


def write(partition: Partition, put: Put, following: Sequence[Put] = ()) -> None:
    """Write a row on the version that the script read, then the rows that follow it.

    Raises:
        LostRace: it has changed since the script read it.
    """
    then = [[row.kind, row.key, None if row.body == put.body else row.body] for row in following]
    document = _document(partition, put, then)
    if put.stored is None:
        try:
            partition.rows.insert_one(document)
        except DuplicateKeyError:
            raise LostRace from None
    elif not _replace(partition, put, put.stored.version, then):
        raise LostRace
    finish(partition, document)


def write_notes(partition: Partition, puts: Sequence[Put]) -> None:
    """Insert rows that nobody reads before and nobody changes; existing ones stay."""
    documents = [_document(partition, put, []) for put in puts]
    if documents:
        try:
            partition.rows.insert_many(documents, ordered=False)
        except BulkWriteError as error:
            if not only_duplicates(error):
                raise


def finish(partition: Partition, document: Document) -> None:
    """Write the rows that a row names as following it, and remove the names from it; may be done twice."""
    if document["then"]:
        for kind, key, body in document["then"]:
            _put_newer(partition, kind, key, document["body"] if body is None else body, document["version"])
        committed = {"_id": document["_id"], "version": document["version"]}
        partition.rows.update_one(committed, {"$set": {"then": []}})


def merge(partition: Partition, put: Put) -> None:
    """Write a worker's row: the whole row, or only the script's changes if another writer has changed it since."""
    body, stored = put.body, put.stored
    base = row_type("worker").dump_json(WorkerRow(Worker(worker_id=put.key))) if stored is None else stored.body
    for _ in range(_MERGES):
        if stored is None:
            with contextlib.suppress(DuplicateKeyError):
                partition.rows.insert_one(_document(partition, put, []))
                return
        elif _replace(partition, put, stored.version, []):
            return
        document = partition.rows.find_one({"_id": partition.id(put.kind, put.key)})
        stored = None if document is None else stored_row(document)
        if stored is not None:
            put.body = merged(base, body, stored.body)


def merged(base: str | bytes, changed: str, there: str) -> str:
    """Return the present row of a worker with the fields that differ between `base` and `changed` (all JSON)."""
    try:
        before, after, result = (json.loads(body) for body in (base, changed, there))
        worker, was = dict(result["worker"]), dict(before["worker"])
    except (ValueError, TypeError, KeyError):  # damaged: it is written again
        return changed
    worker.update({name: value for name, value in after["worker"].items() if was.get(name) != value})
    beside = {name: value for name, value in after.items() if name != "worker" and before.get(name) != value}
    return json.dumps({**result, **beside, "worker": worker}, ensure_ascii=False)


def _document(partition: Partition, put: Put, then: Sequence[object]) -> Document:
    return {
        "_id": partition.id(put.kind, put.key),
        "partition": partition.name,
        "kind": put.kind,
        "key": put.key,
        "number": put.version,
        "version": put.version,
        "written": time.time(),
        "then": then,
        "body": put.body,
        **put.change_fields,
    }


def _replace(partition: Partition, put: Put, version: int, then: Sequence[object]) -> bool:
    changed = {"body": put.body, "version": put.version, "written": time.time(), "then": then, **put.change_fields}
    standing = {"_id": partition.id(put.kind, put.key), "version": version}
    return partition.rows.update_one(standing, {"$set": changed}).matched_count == 1


def _put_newer(partition: Partition, kind: str, key: str, body: str, version: int) -> None:
    """Insert or replace a row, unless a newer version of it exists."""
    fields = {"partition": partition.name, "kind": kind, "key": key, "body": body, "version": version}
    with contextlib.suppress(DuplicateKeyError):  # it is there, and no older
        partition.rows.update_one(
            {"_id": partition.id(kind, key), "version": {"$lt": version}},
            {"$set": {**fields, "written": 0.0, "then": []}, "$setOnInsert": {"number": version}},
            upsert=True,
        )
