"""The layout of a partition in MongoDB: its collections and indexes, the schema version, and the upgrade of a database.

There is no transaction. An upgrade consists of steps that several processes can do concurrently and repeatedly. A
process first writes the new version into the document `schema`, next to the old version, so that programs with the old
version cannot open the database. Then it writes the version into the counter of each partition, from which every flush
allocates numbers, so that running programs cannot write. Then it does the steps and removes the old version. Until
then, each process that opens the database does the same.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import cast
from urllib.parse import quote

from pymongo import ASCENDING, DESCENDING, IndexModel, ReturnDocument, UpdateOne
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import BulkWriteError, DuplicateKeyError
from pymongo.write_concern import WriteConcern

from agentlightning.errors import BadRequestError, ConflictError, DamagedRecordError
from agentlightning.store.mongo.documents import Document, only_duplicates, summary_fields
from agentlightning.store.rules.durable import SCHEMA_VERSION, check_not_newer, read_record, record_type
from agentlightning.store.rules.rewards import read_again
from agentlightning.store.rules.spans import readable_spans
from agentlightning.utils.rewards import MARKS

SPANS = "agl_spans"
"""The default collection of spans."""
_OTHERS = ("agl_rollouts", "agl_rows", "agl_run_records", "agl_counters")
_SETTLE_SECONDS = 1.0
"""Seconds after which a flush with numbers from before the counters were marked has written or replaced them."""


class Partition:
    """The collections of a database, and one partition in them."""

    def __init__(self, database: Database[Document], name: str, spans: str = SPANS) -> None:
        self.name = name
        self.here: Document = {"partition": name}
        """The query for the documents of the partition."""
        self.rollouts: Collection[Document] = database["agl_rollouts"]
        self.spans: Collection[Document] = database[spans]
        self.rows: Collection[Document] = database["agl_rows"]
        self.run_records: Collection[Document] = database["agl_run_records"]
        self.counters: Collection[Document] = database["agl_counters"]
        self._prefix = quote(name, safe="")

    def id(self, *parts: str) -> str:
        """Return the `_id` of a document. It is unique across partitions."""
        return "/".join((self._prefix, *parts))

    def add_to_counter(self, name: str, **numbers: int) -> Document:
        """Add to the numbers of a counter, and return it.

        It is incremented with write concern 1. This is safe, because servers and replica sets keep writes in order: if
        a document with a number is durable, the increments before it are durable, too.
        """
        counters = self.counters.with_options(write_concern=WriteConcern(1))
        counter = counters.find_one_and_update(
            {"_id": self.id(name)}, {"$inc": numbers}, upsert=True, return_document=ReturnDocument.AFTER
        )
        return cast("Document", counter)

    def prepare(self) -> None:
        """Upgrade an older database, create missing indexes, and finish the work of crashed processes. Several
        processes can do so concurrently.

        Raises:
            ConflictError: a newer version wrote the database, or the spans of the partition are in another collection.
        """
        prepare(self.counters, {"_id": self.id("counters"), "change": 0, "number": 0, "spans": self.spans.name})
        recorded = self.recorded_spans()
        if recorded != self.spans.name:
            raise ConflictError(
                f"The spans of the partition {self.name!r} are in the collection {recorded!r}, not in "
                f"{self.spans.name!r}; open it with collection={recorded!r}"
            )
        self.rollouts.create_indexes(_ROLLOUTS)
        self.spans.create_indexes(_SPANS)
        self.rows.create_indexes(_ROWS)
        self.run_records.create_indexes(_RUN_RECORDS)
        self.finish_deletions(list(self.rollouts.find({"deleted": self.name})))

    def recorded_spans(self) -> str:
        """Return the name of the collection that holds the spans of the partition."""
        return (self.counters.find_one({"_id": self.id("counters")}) or {}).get("spans", SPANS)

    def finish_deletions(self, marks: Sequence[Document]) -> None:
        """Remove the spans of deleted rollouts, then the marks that replaced the rollouts. Repeatable."""
        if marks:
            of_marks: Document = {"rollout_id": {"$in": [mark["rollout_id"] for mark in marks]}}
            before = {"change": {"$lte": max(mark["change"] for mark in marks)}}
            self.spans.delete_many({**self.here, **of_marks, **before})
            self.rollouts.delete_many({"_id": {"$in": [mark["_id"] for mark in marks]}, "deleted": self.name})

    def finish_row(self, row: Document) -> None:
        """Write the rows that a row names as its followers, and remove their names from it. Repeatable."""
        if row["then"]:
            following = ((kind, key, row["body"] if body is None else body) for kind, key, body in row["then"])
            self.put_newer((*each, row["version"]) for each in following)
            self.rows.update_one({"_id": row["_id"], "version": row["version"]}, {"$set": {"then": []}})

    def put_newer(self, rows: Iterable[tuple[str, str, str, int]]) -> None:
        """Insert or replace rows (kind, key, body, version), except rows with an existing newer version."""
        upserts = [
            UpdateOne(
                {"_id": self.id(kind, key), "version": {"$lt": version}},
                {
                    "$set": {**self.here, "kind": kind, "key": key, "body": body, "version": version, **_NO_FLUSH},
                    "$setOnInsert": {"number": version},
                },
                upsert=True,
            )
            for kind, key, body, version in rows
        ]
        if upserts:
            try:
                self.rows.bulk_write(upserts, ordered=False)
            except BulkWriteError as error:
                if not only_duplicates(error):  # it is there, and no older
                    raise


_NO_FLUSH: Document = {"written": 0.0, "then": []}


def check_spans(name: str) -> str:
    """Return the name of a collection for spans if it is valid.

    Raises:
        BadRequestError: MongoDB does not accept the name, or the collection contains other data of a store.
    """
    if not name or name in _OTHERS or name.startswith("system.") or "$" in name or "\0" in name:
        raise BadRequestError(
            f"collection={name!r} cannot contain the spans of a store; expected a name without '$', such as 'spans', "
            f"and none of {', '.join(_OTHERS)}"
        )
    return name


# --- indexes -------------------------------------------------------------------------------------------------------


def _index(name: str, *fields: str, **options: object) -> IndexModel:
    keys = [(field.lstrip("-"), DESCENDING if field.startswith("-") else ASCENDING) for field in ("partition", *fields)]
    return IndexModel(keys, name=name, **options)


def _only_with(field: str) -> Document:
    return {"partialFilterExpression": {field: {"$gte": 0}}}


_ROLLOUTS = [
    _index("queue", "run_id", "-priority", "available_at", "number", **_only_with("available_at")),
    _index("due_queue", "run_id", "available_at", **_only_with("available_at")),
    _index("number", "number"),
    _index("status", "status", "start_time"),
    _index("run_status", "run_id", "status", "start_time"),
    _index("run_end", "run_id", "end_time"),
    _index("start", "start_time"),
    _index("end", "end_time"),
    _index("change", "change"),
    _index("deadline", "deadline", **_only_with("deadline")),
    _index("worker", "worker_id", "number"),
    IndexModel([("deleted", ASCENDING)], name="deleted", sparse=True),
]
_SPANS = [
    _index("key", "rollout_id", "span_id", "attempt_id", unique=True),
    _index("order", "rollout_id", "change", "place"),
]
_ROWS = [_index("kind", "kind", "number"), _index("change", "change", **_only_with("change"))]
_RUN_RECORDS = [
    _index("key", "run_id", "kind", "step", "name", unique=True),
    _index("step", "run_id", "step", "number"),
    _index("kind", "run_id", "kind", "step", "number"),
    _index("name", "run_id", "name", "step", "number"),
]


# --- versions ------------------------------------------------------------------------------------------------------


def prepare(counters: Collection[Document], counter: Document) -> None:
    """Upgrade a database and record its version in the counter of a partition, which is created if it does not exist.
    Several processes can do so concurrently.

    Raises:
        ConflictError: a newer version wrote the database.
    """
    with contextlib.suppress(DuplicateKeyError):
        counters.insert_one({"_id": "schema", "version": SCHEMA_VERSION})
    state = check_version(counters)
    if state["version"] < SCHEMA_VERSION:
        newer = {"version": SCHEMA_VERSION, "from": state.get("from", state["version"])}
        counters.update_one({"_id": "schema", "version": state["version"]}, {"$set": newer})
        state = check_version(counters)
    with contextlib.suppress(DuplicateKeyError):
        counters.insert_one(counter)
    upgrading = "from" in state
    older = {"$or": [{"schema": {"$exists": False}}, {"schema": {"$lt": SCHEMA_VERSION}}]}
    to_mark = {"_id": {"$ne": "schema"} if upgrading else counter["_id"], **older}
    counters.update_many(to_mark, {"$set": {"schema": SCHEMA_VERSION}})
    if upgrading:
        time.sleep(_SETTLE_SECONDS)
        for number, step in STEPS:
            if number > state["from"]:
                step(counters.database)
        done = {"from": "", "lease": "", "owner": ""}  # a lease of a program that took one for this
        counters.update_one({"_id": "schema", "version": SCHEMA_VERSION}, {"$unset": done})


def check_version(counters: Collection[Document]) -> Document:
    """Return the document with the version.

    Raises:
        ConflictError: the version is newer.
    """
    document = counters.find_one({"_id": "schema"}) or {"version": SCHEMA_VERSION}
    check_not_newer(f"in the MongoDB database {counters.database.name!r}", document["version"])
    return document


def _add_summaries(database: Database[Document]) -> None:
    """Write missing summaries of rollouts, and set the rewards in their records from their spans."""
    spans: Collection[Document] = database["agl_spans"]
    marked = {"$regex": "|".join(re.escape(mark.decode()) for mark in MARKS)}
    groups = [{"$match": {"body": marked}}, {"$group": {"_id": "$rollout_id"}}]
    rewarding = {group["_id"] for group in spans.aggregate(groups)}
    rollouts: Collection[Document] = database["agl_rollouts"]
    for document in rollouts.find({"facts": {"$exists": False}, "partition": {"$exists": True}}):
        here = {"partition": document["partition"], "rollout_id": document["rollout_id"]}
        try:
            record = read_record(document.get("body", ""), here["rollout_id"])
        except DamagedRecordError:  # reported when it is read
            continue
        changes = {}
        if here["rollout_id"] in rewarding:
            rows = spans.find({**here, "body": marked}, {"body": 1}, sort=[("change", 1), ("place", 1)])
            if read_again(record, readable_spans(each["body"] for each in rows)):
                changes["body"] = record_type().dump_json(record).decode()
        standing = {"_id": document["_id"], "change": document["change"]}
        rollouts.update_one(standing, {"$set": {**changes, **summary_fields(record)}})


STEPS: list[tuple[int, Callable[[Database[Document]], None]]] = [(5, _add_summaries)]
"""The upgrade steps by version. They are repeatable."""
