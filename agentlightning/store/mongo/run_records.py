"""The records of runs in MongoDB: one document each, written while the script runs, before the run's row.

The row is the commit. After a crash between the two the records exist, and a repeated call reports them as existing. A
script that lost the race for the row is run again and counts the records of its earlier try as its own (`Direct`); if
the run was deleted meanwhile, those records are removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pymongo import ReturnDocument
from pymongo.errors import BulkWriteError

from agentlightning.errors import StoreWriteError
from agentlightning.store.mongo.documents import Document, Partition, only_duplicates
from agentlightning.store.mongo.queries import count
from agentlightning.store.rules.query import FoundRecords, RecordPlan
from agentlightning.store.rules.tx import NewRunRecord
from agentlightning.types import RecordKind

_Place = tuple[RecordKind, int, str]


@dataclass
class Direct:
    """The records that the tries of one script have written so far."""

    added: set[tuple[str, _Place]] = field(default_factory=set[tuple[str, _Place]])
    dropped: int = 0

    def take_back(self, partition: Partition) -> None:
        """Remove the added records, because the script was refused."""
        for run_id, (kind, step, name) in self.added:
            here = {**_of_run(partition, run_id), "kind": kind, "step": step, "name": name}
            partition.run_records.delete_one(here)
        self.added.clear()


def add(partition: Partition, run_id: str, records: Sequence[NewRunRecord], direct: Direct) -> list[bool]:
    """Store the records that do not exist yet; return for each whether it was new."""
    first: dict[_Place, NewRunRecord] = {}
    fresh = [first.setdefault(record[:3], record) is record for record in records]
    if not first:
        return fresh
    counted: Document | None = partition.counters.find_one_and_update(
        {"_id": partition.id("run_records")},
        {"$inc": {"number": len(first)}},
        upsert=True,
        return_document=ReturnDocument.AFTER,
    )
    if counted is None:
        raise StoreWriteError("The MongoDB server gave no number for records; nothing was stored, try it again")
    documents: list[Document] = [
        {
            **_of_run(partition, run_id),
            **{"kind": record.kind, "step": record.step, "name": record.name},
            **{"number": number, "size": len(record.body), "body": record.body.decode()},
        }
        for number, record in enumerate(first.values(), counted["number"] - len(first) + 1)
    ]
    duplicates: set[int] = set()
    try:
        partition.run_records.insert_many(documents, ordered=False)
    except BulkWriteError as error:
        if not only_duplicates(error):
            raise
        duplicates = {failure["index"] for failure in error.details["writeErrors"]}
    direct.added.update((run_id, place) for index, place in enumerate(first) if index not in duplicates)
    return [new and (run_id, record[:3]) in direct.added for new, record in zip(fresh, records, strict=True)]


def find(partition: Partition, plan: RecordPlan) -> FoundRecords:
    """Return one page of records."""
    query = _of_run(partition, plan.run_id)
    if plan.kind_in is not None:
        query["kind"] = {"$in": list(plan.kind_in)}
    bounds = {"$gte": plan.step_from, "$lte": plan.step_to}
    if steps := {test: step for test, step in bounds.items() if step is not None}:
        query["step"] = steps
    if plan.name is not None:
        query["name"] = plan.name
    total = plan.total if plan.after is not None else None
    if total is None:  # the row may not count records that a dead process has stored
        total = count(partition.run_records, query)
    skip, most = plan.offset, max(0, total - plan.offset) if plan.limit == -1 else plan.limit
    if plan.after is not None:
        way, (step, number) = "$lt" if plan.descending else "$gt", plan.after
        query = {"$and": [query, {"$or": [{"step": {way: step}}, {"step": step, "number": {way: number}}]}]}
        skip, most, _ = plan.window(total)
    if not most or skip > total:
        return FoundRecords([], total, None)
    sign = -1 if plan.descending else 1  # never from the other end: the total may be another by now
    order, fields = [("step", sign), ("number", sign)], {"step": 1, "number": 1, "size": 1}
    rows = list(partition.run_records.find(query, fields, sort=order, skip=skip, limit=most))
    places = [(document["step"], document["number"]) for document in rows]
    length = plan.cut(document["size"] for document in rows)
    ids = [document["_id"] for document in rows[:length]]
    chosen = partition.run_records.find({"_id": {"$in": ids}}, {"body": 1})
    bodies = {document["_id"]: document["body"] for document in chosen}
    there = [bodies[place] for place in ids if place in bodies]  # some may have been removed just now
    return FoundRecords(there, total, plan.ends_at(places, length, total))


def drop(partition: Partition, run_id: str, after_step: int, direct: Direct) -> int:
    """Remove the records of a run with a greater step; return the number removed."""
    after = {**_of_run(partition, run_id), "step": {"$gt": after_step}}
    direct.dropped += partition.run_records.delete_many(after).deleted_count
    return direct.dropped


def counts(partition: Partition, run_id: str) -> dict[RecordKind, tuple[int, int]]:
    """Return the number of records and the greatest step of each kind of record of a run."""
    query, result = _of_run(partition, run_id), dict[RecordKind, tuple[int, int]]()
    for group in partition.run_records.aggregate([{"$match": query}, {"$group": {"_id": "$kind", "n": {"$sum": 1}}}]):
        last = partition.run_records.find_one({**query, "kind": group["_id"]}, {"step": 1}, sort=[("step", -1)])
        if last is not None:
            result[group["_id"]] = (group["n"], last["step"])
    return result


def _of_run(partition: Partition, run_id: str) -> Document:
    return {"partition": partition.name, "run_id": run_id}
