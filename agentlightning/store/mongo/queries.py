"""The primitives of a script that read many documents of a partition. Each one uses an index that begins with the
partition."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import cast

from pymongo import ASCENDING, DESCENDING
from pymongo.collection import Collection

from agentlightning.store.mongo.change_numbers import ChangeNumbers
from agentlightning.store.mongo.documents import Document, in_force
from agentlightning.store.mongo.schema import Partition
from agentlightning.store.rules.durable import DAMAGED, page_of_records, readable_records, readable_rows
from agentlightning.store.rules.query import FoundRecords, Plan, RecordPlan, read_cursor
from agentlightning.store.rules.tx import Counts, Found, Notes, Record, RunRow
from agentlightning.store.summaries.aggregate import AggregatePlan, aggregate_entries
from agentlightning.store.summaries.facts import Facts
from agentlightning.store.summaries.plan import Entry, Input, SummaryPlan, page_of_entries
from agentlightning.types import RecordKind, RolloutAggregate, RolloutFilter, SummaryPage

_BODY = {"body": 1, "rollout_id": 1, "number": 1}
_LOOK_BACK = 1000
"""Number of latest changes that are read to find the current cursor."""
_LARGEST = 2**62
_LOOK_AT = 100
"""Number of rollouts that are read to find when the next one can be claimed."""
_READABLE = {"status": {"$ne": DAMAGED}}
_Part = tuple[Document, list[tuple[str, int]]]
"""A filter and an order."""


class Queries:
    """The queries of one script."""

    def __init__(self, partition: Partition, numbers: ChangeNumbers) -> None:
        self.notes = Notes()
        self.partition = partition
        self.numbers = numbers

    # --- rollouts --------------------------------------------------------------------------------------------------

    def find(self, plan: Plan) -> Found:
        rollouts, plan_query, parts = self.partition.rollouts, self._filter(plan), _parts(plan)
        if plan.limit == -1 and plan.sort_by is not None and plan.after is None:
            # in an order that never changes, so that a rollout that changes meanwhile appears exactly once
            documents = list(rollouts.find(plan_query, _BODY, sort=[("number", ASCENDING)]))
            numbers = {document["rollout_id"]: document["number"] for document in documents}
            return page_of_records(self._records(documents), numbers, plan)
        results: list[Document] = []
        fields, skip = {**_BODY, plan.sort_by or "number": 1}, plan.offset
        for further, order in parts if plan.limit else ():
            remaining = plan.one_more - len(results)
            if plan.limit >= 0 and not remaining:
                break
            query = {"$and": [plan_query, further]}
            results += rollouts.find(query, fields, sort=order, skip=skip, limit=max(remaining, 0))
            if skip and len(parts) > 1:
                skip = 0 if results else max(0, skip - sums(rollouts, query)[0])
        page = results if plan.limit == -1 else results[: plan.limit]
        records, after, total = self._records(page), None, plan.total
        if len(page) < len(results):
            after = (page[-1][plan.sort_by] if plan.sort_by else None, page[-1]["number"])
        if total is None and after is None and plan.limit and (page or not plan.offset):
            total = plan.offset + len(records)  # the end is on this page
        return Found(records, sums(rollouts, plan_query)[0] if total is None else total, after)

    def _filter(self, plan: Plan) -> Document:
        tests: list[Document] = []
        if plan.status_in is not None:
            tests.append({"status": {"$in": list(plan.status_in)}})
        if plan.ids is not None:
            tests.append({"_id": {"$in": [self.partition.id(rollout_id) for rollout_id in dict.fromkeys(plan.ids)]}})
        if plan.id_contains is not None:
            pattern: Document = {"$in": []} if "\0" in plan.id_contains else {"$regex": re.escape(plan.id_contains)}
            tests.append({"rollout_id": pattern})  # no id holds a null byte, and a pattern cannot
        query: Document = {**self.partition.here, **_READABLE}
        if plan.run_id is not None:
            query["run_id"] = {"$eq": plan.run_id[0]}
        if plan.ended_before is not None:
            query["end_time"] = {"$lt": plan.ended_before}
        if tests and plan.any_of:
            return {**query, "$or": tests}
        for test in tests:
            query.update(test)
        return query

    def _records(self, documents: Iterable[Document]) -> list[Record]:
        """Return the readable records, and record the others."""
        rows = ((document.get("body", ""), document["rollout_id"]) for document in documents)
        return readable_records(rows, self.notes.damaged.append)

    def runs(self) -> list[str | None]:
        groups = [{"$match": self.partition.here}, {"$group": {"_id": "$run_id"}}]
        return [group["_id"] for group in self.partition.rollouts.aggregate(groups)]

    def counts(self, run_id: tuple[str | None] | None = None) -> Counts:
        query = self.partition.here if run_id is None else {**self.partition.here, "run_id": run_id[0]}
        return Counts(*sums(self.partition.rollouts, query, "attempts", "span_count", "span_bytes"))

    def due(self, now: float, limit: int) -> list[Record]:
        query = {**self.partition.here, "deadline": {"$gte": 0, "$lt": now}}
        return self._records(self.partition.rollouts.find(query, _BODY, sort=[("deadline", ASCENDING)], limit=limit))

    def next_available(self, run_id: str | None) -> float | None:
        """Return the earliest time at which a rollout can be claimed. For a leased rollout, this is the lease's end."""
        queued = {**self.partition.here, "run_id": run_id, "available_at": {"$gte": 0}}
        fields, order = {"available_at": 1, "claimed_until": 1}, [("available_at", ASCENDING)]
        moments: list[float] = []
        for document in self.partition.rollouts.find(queued, fields, sort=order, limit=_LOOK_AT):
            lease = document["claimed_until"]
            moments.append(max(document["available_at"], lease if in_force(lease) else 0.0))
        return min(moments, default=None)

    def any_held(self) -> bool:
        query = {**self.partition.here, "worker_id": {"$gt": ""}}
        return self.partition.rollouts.find_one(query, {"_id": 1}) is not None

    # --- summaries -------------------------------------------------------------------------------------------------

    def find_summaries(self, plan: SummaryPlan) -> SummaryPage:
        return page_of_entries(self._entries(plan.chosen), plan)

    def aggregate(self, plan: AggregatePlan) -> RolloutAggregate:
        return aggregate_entries(self._entries(plan.chosen), plan)

    def _entries(self, chosen: RolloutFilter) -> Iterator[Entry]:
        query: Document = {**self.partition.here, **_READABLE, "facts": {"$exists": True}}
        if chosen.run_id:
            query["run_id"] = chosen.run_id
        fields = ["facts", "number", "span_count", "preview", *(["searched"] if chosen.input_contains else [])]
        for document in self.partition.rollouts.find(query, fields):
            text = Input(document["preview"], document.get("searched", ""))
            yield Entry(Facts(*document["facts"]), document["number"], document["span_count"], text)

    # --- changes ---------------------------------------------------------------------------------------------------

    def changes(self, after: str, limit: int) -> tuple[list[Record | RunRow], str]:
        """Return rollouts and runs changed after a cursor, up to the first change that may be missing."""
        cursor, (top, _) = read_cursor(after, _LARGEST), self.numbers.look()
        documents = self._changed(cursor, top, limit, _BODY)
        last = documents[-1]["change"] if len(documents) == limit else top
        visible = max(cursor, min(last, self.numbers.visible(cursor, _change_numbers(documents))))
        changed: list[Record | RunRow] = []
        for document in documents:
            if document["change"] > visible:
                break
            if "key" in document:
                rows = readable_rows("run", [(document["key"], document["body"])])
                changed += [cast("RunRow", row) for _, row in rows]
            else:
                changed += self._records([document])
        return changed, str(visible)

    def last_change(self) -> str:
        """Return the cursor after all changes so far, or a slightly earlier one while others write."""
        top, unsure = self.numbers.look()
        start = max(0, top - _LOOK_BACK) if unsure else top
        return str(self.numbers.visible(start, _change_numbers(self._changed(start, top, _LOOK_BACK, {}))))

    def _changed(self, after: int, last: int, limit: int, fields: Document) -> list[Document]:
        if after >= last:
            return []
        query = {**self.partition.here, "change": {"$gt": after, "$lte": last}}
        fields, order = {"change": 1, "recent": 1, **fields}, [("change", ASCENDING)]
        documents = list(self.partition.rollouts.find({**query, **_READABLE}, fields, sort=order, limit=limit))
        documents += self.partition.rows.find(query, {**fields, "key": 1}, sort=order, limit=limit)
        return sorted(documents, key=itemgetter("change"))[:limit]

    # --- records of runs -------------------------------------------------------------------------------------------

    def find_run_records(self, plan: RecordPlan) -> FoundRecords:
        found, query = self.partition.run_records, self._of_run(plan.run_id)
        if plan.kind_in is not None:
            query["kind"] = {"$in": list(plan.kind_in)}
        bounds = {"$gte": plan.step_from, "$lte": plan.step_to}
        if steps := {test: step for test, step in bounds.items() if step is not None}:
            query["step"] = steps
        if plan.name is not None:
            query["name"] = plan.name
        total = plan.total if plan.after is not None else None
        if total is None:  # the row may not count records that a dead process has stored
            total = sums(found, query)[0]
        skip, most = plan.offset, max(0, total - plan.offset) if plan.limit == -1 else plan.limit
        if plan.after is not None:
            way, (step, number) = "$lt" if plan.descending else "$gt", plan.after
            query = {"$and": [query, {"$or": [{"step": {way: step}}, {"step": step, "number": {way: number}}]}]}
            skip, most, _ = plan.window(total)
        if not most or skip > total:
            return FoundRecords([], total, None)
        way = DESCENDING if plan.descending else ASCENDING  # never from the other end: the total may be another by now
        order, fields = [("step", way), ("number", way)], ["step", "number", "size"]
        rows = list(found.find(query, fields, sort=order, skip=skip, limit=most))
        places = [(document["step"], document["number"]) for document in rows]
        length = plan.cut(document["size"] for document in rows)
        ids = [document["_id"] for document in rows[:length]]
        bodies = {document["_id"]: document["body"] for document in found.find({"_id": {"$in": ids}}, ["body"])}
        there = [bodies[place] for place in ids if place in bodies]  # some may have been removed just now
        return FoundRecords(there, total, plan.ends_at(places, length, total))

    def count_run_records(self, run_id: str) -> dict[RecordKind, tuple[int, int]]:
        group = {"_id": "$kind", "n": {"$sum": 1}, "last": {"$max": "$step"}}
        groups = self.partition.run_records.aggregate([{"$match": self._of_run(run_id)}, {"$group": group}])
        return {group["_id"]: (group["n"], group["last"]) for group in groups}

    def _of_run(self, run_id: str) -> Document:
        return {**self.partition.here, "run_id": run_id}


def sums(collection: Collection[Document], query: Document, *fields: str) -> list[int]:
    """Return the number of matching documents, and the sum of each field."""
    group = {"_id": None, "n": {"$sum": 1}, **{name: {"$sum": f"${name}"} for name in fields}}
    for total in collection.aggregate([{"$match": query}, {"$group": group}]):
        return [total["n"], *(total[name] for name in fields)]
    return [0] * (1 + len(fields))


def _parts(plan: Plan) -> list[_Part]:
    """Return the additional filter and the order of each part of a plan's result. The parts follow one another.

    A null time comes last, another null first (both reversed if descending). The database itself sorts nulls first.
    """
    name, in_order = plan.sort_by, [("number", ASCENDING)]
    if name is None:
        return [({} if plan.after is None else {"number": {"$gt": plan.after[1]}}, in_order)]
    order = [(name, DESCENDING if plan.descending else ASCENDING), *in_order]
    if plan.after is None and (name != "end_time" or plan.ended_before is not None):
        return [({}, order)]
    values, nulls, nulls_last = {name: {"$ne": None}}, {name: {"$eq": None}}, name.endswith("_time") != plan.descending
    before_page = False
    if plan.after is not None:
        (value, number), way = plan.after, "$lt" if plan.descending else "$gt"
        further: Document = {"number": {"$gt": number}}
        if value is None:
            nulls.update(further)
        else:
            values = {name: {f"{way}e": value}, "$or": [{name: {way: value}}, further]}
        before_page = (value is None) == nulls_last
    parts: list[_Part] = [(values, order), (nulls, in_order)] if nulls_last else [(nulls, in_order), (values, order)]
    return parts[1:] if before_page else parts


def _change_numbers(documents: Iterable[Document]) -> set[int]:
    """Return the numbers of the last changes of documents."""
    return {number for document in documents for number in (document["change"], *document["recent"])}
