"""Summaries of rollouts in MongoDB: facts and inputs in fields of their documents, read instead of the records."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pymongo.collection import Collection
from pymongo.database import Database

from agentlightning.errors import DamagedRecordError
from agentlightning.store.rules.durable import DAMAGED, read_record, record_type
from agentlightning.store.rules.rewards import read_again
from agentlightning.store.rules.spans import readable_spans
from agentlightning.store.rules.tx import Record
from agentlightning.store.summaries.aggregate import AggregatePlan, aggregate_entries
from agentlightning.store.summaries.facts import Facts, facts_of, input_text, preview_of, searched
from agentlightning.store.summaries.plan import Entry, Input, SummaryPlan, page_of_entries
from agentlightning.types import RolloutAggregate, RolloutFilter, SummaryPage
from agentlightning.utils.rewards import MARKS

Document = dict[str, Any]


# --- writing -------------------------------------------------------------------------------------------------------


def fields_of(record: Record) -> Document:
    """Return the fields of a rollout's document for its summary."""
    text = input_text(record.rollout.input)
    facts = facts_of(record.rollout, record.latest, len(record.attempts))
    return {"facts": list(facts), "preview": preview_of(text), "searched": searched(text)}


def upgrade(database: Database[Document]) -> None:
    """Write these fields of every rollout that lacks them, and write the rewards, read from its spans, into its record.
    May be done twice."""
    spans: Collection[Document] = database["agl_spans"]
    marked = {"$regex": "|".join(re.escape(mark.decode()) for mark in MARKS)}
    groups = [{"$match": {"body": marked}}, {"$group": {"_id": "$rollout_id"}}]
    rewarding = {group["_id"] for group in spans.aggregate(groups)}
    rollouts: Collection[Document] = database["agl_rollouts"]
    for document in rollouts.find({"facts": {"$exists": False}, "partition": {"$exists": True}}):
        place = document["partition"], document["rollout_id"]
        try:
            record = read_record(document["body"], place[1])
        except (KeyError, DamagedRecordError):  # reported when it is read
            continue
        changes = {}
        if place[1] in rewarding:
            query = {"partition": place[0], "rollout_id": place[1], "body": marked}
            rows = spans.find(query, {"body": 1}, sort=[("change", 1), ("place", 1)])
            if read_again(record, readable_spans(each["body"] for each in rows)):
                changes["body"] = record_type().dump_json(record).decode()
        standing = {"_id": document["_id"], "change": document["change"]}
        rollouts.update_one(standing, {"$set": {**changes, **fields_of(record)}})


# --- reading -------------------------------------------------------------------------------------------------------


def find(rollouts: Collection[Document], partition: str, plan: SummaryPlan) -> SummaryPage:
    """Return one page of summaries."""
    return page_of_entries(_entries(rollouts, partition, plan.chosen), plan)


def aggregate(rollouts: Collection[Document], partition: str, plan: AggregatePlan) -> RolloutAggregate:
    """Return figures of rollouts in groups."""
    return aggregate_entries(_entries(rollouts, partition, plan.chosen), plan)


def _entries(rollouts: Collection[Document], partition: str, chosen: RolloutFilter) -> Iterable[Entry]:
    query: Document = {"partition": partition, "status": {"$ne": DAMAGED}}
    if chosen.run_id:
        query["run_id"] = chosen.run_id
    read = {
        "facts": 1,
        "number": 1,
        "span_count": 1,
        "preview": 1,
        **({"searched": 1} if chosen.input_contains else {}),
    }
    for document in rollouts.find(query, read):
        if "facts" in document:
            text = Input(document["preview"], document.get("searched", ""))
            yield Entry(Facts(*document["facts"]), document["number"], document["span_count"], text)
