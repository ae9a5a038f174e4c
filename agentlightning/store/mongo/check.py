"""The check of a partition in MongoDB: every record can be read, and its summary agrees with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pydantic import ValidationError
from pymongo.collection import Collection
from pymongo.errors import PyMongoError

from agentlightning.errors import ConflictError, DamagedRecordError
from agentlightning.store.mongo.documents import Document, Partition
from agentlightning.store.mongo.link import Place
from agentlightning.store.mongo.queries import count
from agentlightning.store.mongo.schema import check_version
from agentlightning.store.mongo.store import DATABASE
from agentlightning.store.mongo.summaries import fields_of
from agentlightning.store.rules.durable import FileReport, read_record, read_row
from agentlightning.store.rules.tx import KINDS
from agentlightning.types import RunRecord, Span

_WITH_SUMMARIES = 5


def check_partition(uri: str, name: str) -> FileReport:
    """Decode every record of the partition.

    Raises:
        ConflictError: there is no store, or one of a newer program.
        StoreUnreachableError: the server does not answer.
    """
    place = Place(uri)
    with place.client() as client:
        database = client[place.database or DATABASE]
        partition = Partition(database, name)
        try:
            if partition.counters.find_one({"_id": "schema"}) is None:
                raise ConflictError(f"There is no store in the database {database.name!r} of {place!r}")
            document = check_version(partition.counters)
            partition.spans = database[partition.recorded_spans()]
            version = document.get("from", document["version"])
            here: dict[str, object] = {"partition": name}
            rollouts, spans = count(partition.rollouts, here), count(partition.spans, here)
            return FileReport.of(version, rollouts, spans, _problems(partition, with_short=version >= _WITH_SUMMARIES))
        except PyMongoError as error:
            raise place.failed(error) from None


def _problems(partition: Partition, *, with_short: bool) -> Iterator[str]:
    for each in partition.rollouts.find({"partition": partition.name}):
        rollout_id = each["rollout_id"]
        try:
            record = read_record(each.get("body", ""), rollout_id)
            if with_short and any(each.get(field) != value for field, value in fields_of(record).items()):
                yield f"rollout {rollout_id}: what is kept of it in short is not what its record says"
        except DamagedRecordError as error:
            removal = f"store.delete_rollouts(rollout_ids=[{rollout_id!r}], force=True)"
            yield f"rollout {rollout_id}: its record cannot be read: {_reason(error)}. Remove it: {removal}"
    for each, reason in _unreadable(partition, partition.spans, lambda each: Span.model_validate_json(each["body"])):
        yield f"span {each['span_id']} of rollout {each['rollout_id']} cannot be read: {reason}"
    for each, reason in _unreadable(partition, partition.rows, _read_row):
        yield f"the row {each['key']!r} of kind {each['kind']!r} cannot be read: {reason}"
    for each, reason in _unreadable(
        partition, partition.run_records, lambda each: RunRecord.model_validate_json(each["body"])
    ):
        of_run = f"{each['name']!r} of step {each['step']} of run {each['run_id']!r}"
        yield f"the {each['kind']} record {of_run} cannot be read: {reason}"


def _unreadable(
    partition: Partition, collection: Collection[Document], read: Callable[[Document], Any]
) -> Iterator[tuple[Document, str]]:
    """Yield the documents that cannot be read, with the reason and the way to remove them."""
    for each in collection.find({"partition": partition.name}):
        try:
            read({"body": "", **each})
        except (ValidationError, DamagedRecordError) as error:
            yield each, f"{_reason(error)}. Remove it: db.{collection.name}.deleteOne({{_id: {each['_id']!r}}})"


def _read_row(each: Document) -> None:
    if each["kind"] in KINDS:
        read_row(each["kind"], each["key"], each["body"])


def _reason(error: ValidationError | DamagedRecordError) -> str:
    if isinstance(error, ValidationError):
        return error.errors()[0]["msg"]
    return str(error).partition(". This is damage")[0].partition("cannot be read: ")[2] or str(error)
