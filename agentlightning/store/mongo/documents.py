"""The layout of a partition in MongoDB: collections, indexes, and the documents of records, spans and rows.

A rollout is one document: its JSON in `body`, the fields for searching and sorting, and two fields that make a change
exact: `change` (the number of its last change, which a writer must name to replace it) and `recent` (the numbers of its
last changes; spans carry the number of the change that counts them). `claimed_until` is the lease of a claim, `lock` is
the lease of a flush that changes several documents. A span is one document, a row is one document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from pymongo import ASCENDING, DESCENDING, IndexModel
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import BulkWriteError

from agentlightning.errors import BadRequestError, ConflictError, TooLargeError
from agentlightning.store.mongo.schema import Document, prepare
from agentlightning.store.mongo.summaries import fields_of
from agentlightning.store.rules.durable import damaged, read_record, record_type
from agentlightning.store.rules.tx import Record

Key = list[tuple[str, int]]
RECENT = 32
"""Number of its last changes that a document names."""
MAX_BODY = 16 * 1024 * 1024 - 64 * 1024
"""Largest body, in bytes; a document holds 16 MiB, including its other fields."""
_DUPLICATE = 11000


SPANS = "agl_spans"
"""The collection of the spans, unless another one is named."""
_OTHERS = ("agl_rollouts", "agl_rows", "agl_run_records", "agl_counters")


def check_spans(name: str) -> str:
    """Return the name of a collection for spans.

    Raises:
        BadRequestError: MongoDB does not accept the name, or the collection holds other data of a store.
    """
    if not name or name in _OTHERS or name.startswith("system.") or "$" in name or "\0" in name:
        raise BadRequestError(
            f"collection={name!r} cannot hold the spans of a store; expected a name without '$', for example 'spans', "
            f"and none of {', '.join(_OTHERS)}"
        )
    return name


class LostRace(Exception):
    """Raised when another writer changed data that the script read; run it again. `careful`: look up spans first."""

    def __init__(self, *, careful: bool = False) -> None:
        super().__init__()
        self.careful = careful


@dataclass(frozen=True, slots=True)
class Stored:
    """A record as it was read, with the fields that the next writer of its document needs."""

    record: Record
    change: int
    recent: Sequence[int]
    number: int

    def counts(self, tag: int) -> bool:
        """Return True if the record counts the spans with this number, so they are stored for good."""
        floor = self.recent[0] if len(self.recent) == RECENT else 1
        return tag < floor or tag in self.recent


@dataclass(frozen=True, slots=True)
class StoredRow:
    """A row as it was read."""

    body: str
    version: int
    written: float
    """Time of writing by the writer's clock; 0: long ago."""
    recent: Sequence[int] = ()
    """Numbers of the last changes of a run, as for a rollout."""


class Partition:
    """The collections of a database and the place of one partition in them."""

    def __init__(self, database: Database[Document], name: str, spans: str = SPANS) -> None:
        self.name = name
        self.rollouts: Collection[Document] = database["agl_rollouts"]
        self.spans: Collection[Document] = database[spans]
        self.rows: Collection[Document] = database["agl_rows"]
        self.run_records: Collection[Document] = database["agl_run_records"]
        self.counters: Collection[Document] = database["agl_counters"]
        self._prefix = quote(name, safe="")

    def id(self, *parts: str) -> str:
        """Return a document's `_id`; no two partitions have one in common."""
        return "/".join((self._prefix, *parts))

    def prepare(self) -> None:
        """Upgrade an older database, create missing indexes, and finish the work that a crashed process left. Any
        number of processes may do so at the same time.

        Raises:
            ConflictError: a newer version wrote the database, or the spans of the partition are in another collection.
        """
        counter = {"_id": self.id("counters"), "change": 0, "number": 0, "spans": self.spans.name}
        prepare(self.counters.database, self.counters, counter)
        recorded = self.recorded_spans()
        if recorded != self.spans.name:
            raise ConflictError(
                f"The spans of the partition {self.name!r} are in the collection {recorded!r}, not in "
                f"{self.spans.name!r}; open it with collection={recorded!r}"
            )
        for collection, indexes in (
            *((self.rollouts, _ROLLOUTS), (self.spans, _SPANS)),
            *((self.rows, _ROWS), (self.run_records, _RUN_RECORDS)),
        ):
            collection.create_indexes(indexes)
        self.finish_deletions(list(self.rollouts.find({"deleted": self.name})))

    def recorded_spans(self) -> str:
        """Return the name of the collection that holds the spans of the partition."""
        return (self.counters.find_one({"_id": self.id("counters")}) or {}).get("spans", SPANS)

    def finish_deletions(self, marks: Sequence[Document]) -> None:
        """Remove the spans of deleted rollouts, then the marks in their places; may be done twice."""
        if marks:
            spans = {
                "partition": self.name,
                "rollout_id": {"$in": [mark["rollout_id"] for mark in marks]},
                "change": {"$lte": max(mark["change"] for mark in marks)},
            }
            self.spans.delete_many(spans)
            self.rollouts.delete_many({"_id": {"$in": [mark["_id"] for mark in marks]}, "deleted": self.name})


def _index(name: str, *fields: str, **options: object) -> IndexModel:
    keys = [(field.lstrip("-"), DESCENDING if field.startswith("-") else ASCENDING) for field in ("partition", *fields)]
    return IndexModel(keys, name=name, **options)


_ROLLOUTS = [
    _index(
        "queue", "run_id", "-priority", "available_at", "number",
        partialFilterExpression={"available_at": {"$gte": 0}},
    ),
    _index("due_queue", "run_id", "available_at", partialFilterExpression={"available_at": {"$gte": 0}}),
    _index("number", "number"),
    _index("status", "status", "start_time"),
    _index("run_status", "run_id", "status", "start_time"),
    _index("run_end", "run_id", "end_time"),
    _index("start", "start_time"),
    _index("end", "end_time"),
    _index("change", "change"),
    _index("deadline", "deadline", partialFilterExpression={"deadline": {"$gte": 0}}),
    _index("worker", "worker_id", "number"),
    IndexModel([("deleted", ASCENDING)], name="deleted", sparse=True),
]  # fmt: skip
_SPANS = [
    _index("key", "rollout_id", "span_id", "attempt_id", unique=True),
    _index("order", "rollout_id", "change", "place"),
]
_ROWS = [
    _index("kind", "kind", "number"),
    _index("change", "change", partialFilterExpression={"change": {"$gte": 0}}),
]
_RUN_RECORDS = [
    _index("key", "run_id", "kind", "step", "name", unique=True),
    _index("step", "run_id", "step", "number"),
    _index("kind", "run_id", "kind", "step", "number"),
    _index("name", "run_id", "name", "step", "number"),
]


def record_document(partition: Partition, record: Record) -> Document:
    """Return the document of a record, without its numbers.

    Raises:
        TooLargeError: the record is larger than a document may be.
    """
    rollout = record.rollout
    return {
        "_id": partition.id(rollout.rollout_id),
        "partition": partition.name,
        "rollout_id": rollout.rollout_id,
        "run_id": rollout.run_id,
        "status": rollout.status,
        "mode": rollout.mode,
        "resources_id": rollout.resources_id,
        "resources_version": rollout.resources_version,
        "start_time": rollout.start_time,
        "end_time": rollout.end_time,
        "not_before": rollout.not_before,
        "priority": rollout.priority,
        "available_at": record.available_at,
        "deadline": record.deadline,
        "worker_id": record.holder,
        "attempt_id": record.latest.attempt_id if record.latest else None,
        "attempts": len(record.attempts),
        "span_count": record.span_count,
        "span_bytes": record.span_bytes,
        "claimed_until": 0.0,
        "claimant": "",
        "lock": 0.0,
        **fields_of(record),
        "body": fitting(
            record_type().dump_json(record), f"Rollout {rollout.rollout_id} (input, metadata and attempts)"
        ),
    }


def fitting(body: bytes, what: str) -> str:
    """Return a body as text.

    Raises:
        TooLargeError: the body is larger than a document may be.
    """
    if len(body) > MAX_BODY:
        raise TooLargeError(
            f"{what} takes {len(body)} bytes; a MongoDB document holds at most {MAX_BODY}. "
            "Make it smaller, or keep the large part elsewhere and store where it is."
        )
    return body.decode()


def stored_record(document: Document) -> Stored:
    """Return the contents of a rollout's document.

    Raises:
        DamagedRecordError: it cannot be read.
    """
    rollout_id = document["rollout_id"]
    try:
        record = read_record(document["body"], rollout_id)
        return Stored(record, document["change"], document["recent"], document["number"])
    except KeyError as error:
        raise damaged("rollout", rollout_id, error) from None


def stored_row(document: Document) -> StoredRow:
    """Return the contents of a row's document."""
    return StoredRow(document["body"], document["version"], document["written"], document.get("recent", ()))


def only_duplicates(error: BulkWriteError) -> bool:
    """Return True if the only failures are insertions of existing documents."""
    failures = [*error.details["writeErrors"], *error.details["writeConcernErrors"]]
    return all(failure["code"] == _DUPLICATE for failure in failures)
