"""Reads all that a partition in MongoDB holds; see `database_check.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from pymongo.errors import PyMongoError

from agentlightning.errors import ConflictError
from agentlightning.store.mongo.documents import Document, Partition
from agentlightning.store.mongo.link import Place
from agentlightning.store.mongo.queries import count
from agentlightning.store.mongo.schema import check_version
from agentlightning.store.mongo.store import DATABASE
from agentlightning.store.mongo.summaries import fields_of
from agentlightning.store.rules.durable import Stored
from agentlightning.store.rules.tx import Record

_WITH_SUMMARIES = 5


@contextlib.contextmanager
def read_all(uri: str, name: str) -> Generator[Stored]:
    """Give what the partition holds.

    Raises:
        ConflictError: there is no store, or one of a newer program.
        StoreUnreachableError: the server does not answer.
    """
    place = Place(uri)
    with place.client() as client:
        database = client[place.database or DATABASE]
        partition = Partition(database, name)
        here: dict[str, object] = {"partition": name}
        try:
            if partition.counters.find_one({"_id": "schema"}) is None:
                raise ConflictError(f"There is no store in the database {database.name!r} of {place!r}")
            known = check_version(partition.counters)
            partition.spans = database[partition.recorded_spans()]
            version = known.get("from", known["version"])
            yield Stored(
                version,
                count(partition.rollouts, here),
                count(partition.spans, here),
                ((each["rollout_id"], each.get("body", ""), _in_short(each)) for each in partition.rollouts.find(here)),
                (
                    (
                        f"{each['span_id']} of rollout {each['rollout_id']}",
                        f"db.{partition.spans.name}.deleteOne({{_id: {each['_id']!r}}})",
                        each.get("body", ""),
                    )
                    for each in partition.spans.find(here)
                ),
                (
                    (
                        f"{each['kind']} {each['key']}",
                        f"db.agl_rows.deleteOne({{_id: {each['_id']!r}}})",
                        each.get("body", ""),
                    )
                    for each in partition.rows.find(here)
                ),
                (
                    (
                        f"the {each['kind']} record {each['name']!r} of step {each['step']} of run {each['run_id']!r}",
                        f"db.agl_run_records.deleteOne({{_id: {each['_id']!r}}})",
                        each.get("body", ""),
                    )
                    for each in partition.run_records.find(here)
                ),
                _expected if version >= _WITH_SUMMARIES else None,
            )
        except PyMongoError as error:
            raise place.failed(error) from None


def _in_short(fields: Document) -> tuple[object, ...]:
    return fields.get("facts"), fields.get("preview"), fields.get("searched")


def _expected(record: Record) -> tuple[object, ...]:
    return _in_short(fields_of(record))
