"""The check of a partition in MongoDB: all records can be read, and their summaries agree with them."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError
from pymongo.errors import PyMongoError

from agentlightning.errors import ConflictError
from agentlightning.store.mongo.documents import Document, summary_fields
from agentlightning.store.mongo.link import DATABASE, Place
from agentlightning.store.mongo.schema import Partition, check_version
from agentlightning.store.rules.durable import FileReport, record_type
from agentlightning.store.rules.tx import KINDS, row_type
from agentlightning.types import RunRecord, Span

_WITH_SUMMARIES = 5


def check_partition(uri: str, name: str) -> FileReport:
    """Check all records of the partition.

    Raises:
        ConflictError: the store does not exist, or a newer version wrote it.
        StoreUnreachableError: the server does not respond.
    """
    place = Place(uri)
    with place.client() as client:
        database = client[place.database or DATABASE]
        partition = Partition(database, name)
        try:
            if partition.counters.find_one({"_id": "schema"}) is None:
                raise ConflictError(f"The database {database.name!r} of {place!r} contains no store")
            document = check_version(partition.counters)
            partition.spans = database[partition.recorded_spans()]
            version = document.get("from", document["version"])
            rollouts, spans = (each.count_documents(partition.here) for each in (partition.rollouts, partition.spans))
            problems = _problems(partition, with_summaries=version >= _WITH_SUMMARIES)
            return FileReport.of(version, rollouts, spans, problems)
        except PyMongoError as error:
            raise place.failed(error) from None


def _problems(partition: Partition, *, with_summaries: bool) -> Iterator[str]:
    for each in partition.rollouts.find(partition.here):
        rollout_id = each["rollout_id"]
        try:
            record = record_type().validate_json(each.get("body", ""))
        except ValidationError as error:
            removal = f"store.delete_rollouts(rollout_ids=[{rollout_id!r}], force=True)"
            yield f"rollout {rollout_id}: the record cannot be read: {_reason(error)}. Remove it: {removal}"
        else:
            if with_summaries and any(each.get(name) != value for name, value in summary_fields(record).items()):
                yield f"rollout {rollout_id}: the summary differs from the record"
    for collection, name, read in (
        (partition.spans, "span {span_id} of rollout {rollout_id}", _read_span),
        (partition.rows, "the row {key!r} of kind {kind!r}", _read_row),
        (partition.run_records, "the {kind} record {name!r} of step {step} of run {run_id!r}", _read_run_record),
    ):
        for each in collection.find(partition.here):
            try:
                read({"body": "", **each})
            except ValidationError as error:
                removal = f"db.{collection.name}.deleteOne({{_id: {each['_id']!r}}})"
                yield f"{name.format(**each)} cannot be read: {_reason(error)}. Remove it: {removal}"


def _read_span(document: Document) -> None:
    Span.model_validate_json(document["body"])


def _read_row(document: Document) -> None:
    if document["kind"] in KINDS:
        row_type(document["kind"]).validate_json(document["body"])


def _read_run_record(document: Document) -> None:
    RunRecord.model_validate_json(document["body"])


def _reason(error: ValidationError) -> str:
    return error.errors()[0]["msg"]
