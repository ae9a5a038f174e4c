"""Queries over many rollouts of a partition, each with an index that begins with the partition."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any, cast

from pymongo import ASCENDING, DESCENDING
from pymongo.collection import Collection

from agentlightning.errors import BadRequestError
from agentlightning.store.mongo.change_numbers import ChangeNumbers
from agentlightning.store.mongo.documents import Document, Key, Partition
from agentlightning.store.mongo.queue import in_force
from agentlightning.store.rules.durable import DAMAGED, page_of_records, readable_records, readable_rows
from agentlightning.store.rules.query import Plan
from agentlightning.store.rules.tx import Counts, Found, Notes, Record, RunRow

_BODY = {"body": 1, "rollout_id": 1}
_LOOK_BACK = 1000
"""Number of latest changes that are read to find the present cursor."""
_LARGEST = 2**62
_LOOK_AT = 100
"""Number of rollouts that are read to find when the next one may be claimed."""


class Queries:
    """The queries of one script, each with an index that begins with the partition."""

    def __init__(self, partition: Partition, numbers: ChangeNumbers) -> None:
        self.notes = Notes()
        self.partition = partition
        self.numbers = numbers

    def find(self, plan: Plan) -> Found:
        plan_query, parts = filter_of(plan, self.partition), parts_of(plan)
        if plan.limit == -1 and plan.sort_by is not None and plan.after is None:
            # in an order that never changes, so that a rollout that changes meanwhile appears exactly once
            documents = list(
                self.partition.rollouts.find(plan_query, {**_BODY, "number": 1}, sort=[("number", ASCENDING)])
            )
            numbers = {document["rollout_id"]: document["number"] for document in documents}
            return page_of_records(self._records(documents), numbers, plan)
        results: list[Document] = []
        fields, skip = {**_BODY, "number": 1, plan.sort_by or "number": 1}, plan.offset
        for further, order in parts if plan.limit else ():
            remaining = plan.one_more - len(results)
            if plan.limit >= 0 and not remaining:
                break
            query = {"$and": [plan_query, further]}
            results += self.partition.rollouts.find(query, fields, sort=order, skip=skip, limit=max(remaining, 0))
            if skip and len(parts) > 1:
                skip = 0 if results else max(0, skip - count(self.partition.rollouts, query))
        page = results if plan.limit == -1 else results[: plan.limit]
        records, after, total = self._records(page), None, plan.total
        if len(page) < len(results):
            after = (page[-1][plan.sort_by] if plan.sort_by else None, page[-1]["number"])
        if total is None and after is None and plan.limit and (page or not plan.offset):
            total = plan.offset + len(records)  # the end is on this page
        return Found(records, count(self.partition.rollouts, plan_query) if total is None else total, after)

    def runs(self) -> list[str | None]:
        groups = [{"$match": {"partition": self.partition.name}}, {"$group": {"_id": "$run_id"}}]
        return [group["_id"] for group in self.partition.rollouts.aggregate(groups)]

    def counts(self, run_id: tuple[str | None] | None = None) -> Counts:
        query: Document = {"partition": self.partition.name}
        if run_id is not None:
            query["run_id"] = run_id[0]
        sums = {"rollouts": 1, "attempts": "$attempts", "spans": "$span_count", "span_bytes": "$span_bytes"}
        totals = _sums(self.partition.rollouts, query, sums)
        return Counts(*(totals.get(name, 0) for name in sums))

    def due(self, now: float, limit: int) -> list[Record]:
        query = {"partition": self.partition.name, "deadline": {"$gte": 0, "$lt": now}}
        documents = self.partition.rollouts.find(query, _BODY, sort=[("deadline", ASCENDING)], limit=limit)
        return self._records(documents)

    def next_available(self, run_id: str | None) -> float | None:
        """Return the earliest time at which a rollout may be claimed: a leased one when its lease has expired."""
        queued = {"partition": self.partition.name, "run_id": run_id, "available_at": {"$gte": 0}}
        fields, order = {"available_at": 1, "claimed_until": 1}, [("available_at", ASCENDING)]
        moments: list[float] = []
        for document in self.partition.rollouts.find(queued, fields, sort=order, limit=_LOOK_AT):
            lease = document["claimed_until"]
            moments.append(max(document["available_at"], lease if in_force(lease) else 0.0))
        return min(moments, default=None)

    def any_held(self) -> bool:
        query = {"partition": self.partition.name, "worker_id": {"$gt": ""}}
        return self.partition.rollouts.find_one(query, {"_id": 1}) is not None

    def changes(self, after: str, limit: int) -> tuple[list[Record | RunRow], str]:
        """Return rollouts and runs changed after a cursor, up to the first change that may still be missing.

        Raises:
            BadRequestError: not a cursor of this store.
        """
        try:
            cursor = min(int(after), _LARGEST)
            if cursor < 0:
                raise ValueError
        except ValueError:
            text = f"{after!r} is no cursor of this store; take it from an earlier page, or '0'"
            raise BadRequestError(text) from None
        top = self.numbers.look()
        documents = self._changed(cursor, top, limit, body=True)
        last = documents[-1]["change"] if len(documents) == limit else top
        visible = max(cursor, min(last, self.numbers.visible(cursor, _change_numbers(documents))))
        changed: list[Record | RunRow] = []
        for document in documents:
            if document["change"] > visible:
                break
            if "key" in document:
                row = readable_rows("run", [(document["key"], document["body"])])
                changed += [cast("RunRow", each) for _, each in row]
            else:
                changed += self._records([document])
        return changed, str(visible)

    def last_change(self) -> str:
        """Return the cursor after all present changes, or a slightly earlier one while others write."""
        top = self.numbers.look()
        if not self.numbers.unsure():
            return str(self.numbers.visible(top, ()))
        start = max(0, top - _LOOK_BACK)
        return str(self.numbers.visible(start, _change_numbers(self._changed(start, top, _LOOK_BACK, body=False))))

    def _changed(self, after: int, last: int, limit: int, *, body: bool) -> list[Document]:
        query = {"partition": self.partition.name, "status": {"$ne": DAMAGED}, "change": {"$gt": after, "$lte": last}}
        fields, order = {"change": 1, "recent": 1, **(_BODY if body else {})}, [("change", ASCENDING)]
        documents = list(self.partition.rollouts.find(query, fields, sort=order, limit=limit))
        runs = {name: test for name, test in query.items() if name != "status"}
        documents += self.partition.rows.find(runs, {**fields, "key": 1}, sort=order, limit=limit)
        return sorted(documents, key=itemgetter("change"))[:limit]

    def _records(self, documents: Iterable[Document]) -> list[Record]:
        """Return the readable records, and note the others."""
        rows = ((document.get("body", ""), document["rollout_id"]) for document in documents)
        return readable_records(rows, self.notes.damaged.append)


def filter_of(plan: Plan, partition: Partition) -> Document:
    """Return the query of a plan."""
    tests: list[Document] = []
    if plan.status_in is not None:
        tests.append({"status": {"$in": list(plan.status_in)}})
    if plan.ids is not None:
        tests.append({"_id": {"$in": [partition.id(rollout_id) for rollout_id in dict.fromkeys(plan.ids)]}})
    if plan.id_contains is not None:
        pattern: Document = {"$in": []} if "\0" in plan.id_contains else {"$regex": re.escape(plan.id_contains)}
        tests.append({"rollout_id": pattern})  # no id holds a null byte, and a pattern cannot
    query: Document = {"partition": partition.name, "status": {"$ne": DAMAGED}}
    if plan.run_id is not None:
        query["run_id"] = {"$eq": plan.run_id[0]}
    if plan.ended_before is not None:
        query["end_time"] = {"$lt": plan.ended_before}
    if tests and plan.any_of:
        query["$or"] = tests
    else:
        for test in tests:
            query.update(test)
    return query


def parts_of(plan: Plan) -> list[tuple[Document, Key]]:
    """Return the additional filter and the order of each part of a plan's answer, one part after the other.

    A null time comes last, another null first (both reversed if descending). Only the latter is the database's own
    order. Items equal to the place after which the page begins are also a separate part.
    """
    name, in_order = plan.sort_by, list[tuple[str, int]]([("number", ASCENDING)])
    if name is None:
        return [({} if plan.after is None else {"number": {"$gt": plan.after[1]}}, in_order)]
    order = [(name, DESCENDING if plan.descending else ASCENDING), *in_order]
    nulls: tuple[Document, Key] = ({name: {"$eq": None}}, in_order)
    nulls_last = name.endswith("_time") != plan.descending
    if plan.after is None and (name != "end_time" or plan.ended_before is not None):
        return [({}, order)]
    values: tuple[Document, Key] = ({name: {"$ne": None}}, order)
    if plan.after is None:
        return [values, nulls] if nulls_last else [nulls, values]
    value, number = plan.after
    parts: list[tuple[Document, Key]] = [({name: {"$eq": value}, "number": {"$gt": number}}, in_order)]
    if value is not None:
        parts.append(({name: {"$lt" if plan.descending else "$gt": value}}, order))
        return [*parts, nulls] if nulls_last else parts
    return parts if nulls_last else [*parts, values]


def count(collection: Collection[Document], query: Document) -> int:
    """Return the number of matching documents."""
    return _sums(collection, query, {"n": 1}).get("n", 0)


def _sums(collection: Collection[Document], query: Document, sums: dict[str, Any]) -> Document:
    """Return sums over the matching documents; an empty document if none matches."""
    group = {"_id": None, **{name: {"$sum": what} for name, what in sums.items()}}
    for document in collection.aggregate([{"$match": query}, {"$group": group}]):
        return document
    return {}


def _change_numbers(documents: Sequence[Document]) -> set[int]:
    """Return the numbers of the last changes of documents."""
    return {number for document in documents for number in (document["change"], *document["recent"])}
