"""The primitives of a script over one partition in MongoDB: reads go to the server, writes are buffered for the flush.

Nothing here waits for another flush: a rollout that another flush has locked, or spans that it may still be counting,
raise `LostRace`, and the script is run again a little later.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from typing_extensions import override

from agentlightning.errors import DamagedRecordError
from agentlightning.store.mongo import run_records, summaries
from agentlightning.store.mongo.change_numbers import ChangeNumbers
from agentlightning.store.mongo.documents import (
    Document,
    LostRace,
    Partition,
    Stored,
    fitting,
    stored_record,
)
from agentlightning.store.mongo.queries import Queries
from agentlightning.store.mongo.queue import CLOCKS_DIFFER_SECONDS, Leases, in_force
from agentlightning.store.mongo.rows import Rows
from agentlightning.store.mongo.run_records import Direct
from agentlightning.store.rules.durable import DAMAGED
from agentlightning.store.rules.query import FoundRecords, Plan, RecordPlan
from agentlightning.store.rules.tx import Choice, ClaimRow, Found, Kind, NewRunRecord, Record, Row
from agentlightning.store.summaries.aggregate import AggregatePlan
from agentlightning.store.summaries.plan import SummaryPlan
from agentlightning.types import RecordKind, RolloutAggregate, Span, SummaryPage

SETTLE_SECONDS = 2.0
"""Seconds after which a half-done flush counts as abandoned; until then it is waited for."""
_TURN_SECONDS = 1.0
_encode = Span.__pydantic_serializer__.to_json
SpanKey = tuple[str, str, str]
"""(rollout id, attempt id, span id)."""


class Turns:
    """Turns for the writers of one rollout or run in this process, which would otherwise lose races to each other.
    They serve speed only, so nobody waits long, and a script has one turn at most."""

    def __init__(self) -> None:
        self._locks = [threading.Lock() for _ in range(256)]

    def take(self, rollout_id: str) -> threading.Lock | None:
        """Return the turn, which the caller releases; None if it was not free in time."""
        turn = self._locks[hash(rollout_id) % len(self._locks)]
        return turn if turn.acquire(timeout=_TURN_SECONDS) else None


class MongoTx(Queries):
    """One run of a script, which only reads if it has no `turns`. `careful` looks up spans before they are added.

    The public fields are the reads and the writes of the script, for the flush.
    """

    def __init__(
        self,
        partition: Partition,
        numbers: ChangeNumbers,
        turns: Turns | None,
        *,
        careful: bool = False,
        direct: Direct | None = None,
    ) -> None:
        super().__init__(partition, numbers)
        self.rows = Rows(partition)
        self.stored: dict[str, Stored | None] = {}
        """Rollouts as they were read."""
        self.records: dict[str, Record | None] = {}
        """Rollouts to write; None: to remove."""
        self.new_spans: dict[SpanKey, str] = {}
        self.abandoned: dict[str, set[int]] = {}
        """Numbers of a rollout's spans that a dead flush left; they are removed before new ones are written."""
        self.fenced: set[str] = set()
        """Rollouts that get a new number, so that an abandoned flush fails if it is still running."""
        self.flushing = False
        """Something may have been written."""
        self._turns = turns
        self._turn: threading.Lock | None = None
        self._careful = careful
        self._direct = direct or Direct()
        self._leases = Leases(partition)

    def end(self, *, flushed: bool, reachable: bool = True) -> None:
        """Release the turn, and the claims that were not written."""
        if self._turn is not None:
            self._turn.release()
        if reachable:
            self._leases.give_back({self.partition.id(rollout_id) for rollout_id in self.records} if flushed else set())

    # --- one rollout -----------------------------------------------------------------------------------------------

    def load(self, rollout_id: str) -> Record | None:
        if rollout_id in self.records:
            record = self.records[rollout_id]
        else:
            stored = self.fetch(rollout_id)
            record = None if stored is None else stored.record
        return None if record is None else record.copy()

    def fetch(self, rollout_id: str) -> Stored | None:
        """Return a rollout as the script first read it; read it now if it did not."""
        if rollout_id not in self.stored:
            if self._turns is not None and self._turn is None:
                self._turn = self._turns.take(rollout_id)
            document = self.partition.rollouts.find_one({"_id": self.partition.id(rollout_id)})
            self.stored[rollout_id] = None if document is None else self._live(document)
        return self.stored[rollout_id]

    def _live(self, document: Document) -> Stored | None:
        if "deleted" in document:
            if self._turns is not None:
                self.partition.finish_deletions([document])
            return None
        if self._turns is not None and in_force(document["lock"]):
            raise LostRace
        return stored_record(document)

    def save(self, record: Record) -> None:
        self.records[record.rollout.rollout_id] = record.copy()

    def delete(self, rollout_id: str) -> bool:
        try:
            if self.load(rollout_id) is None:
                return False
        except DamagedRecordError:  # nothing to be exact about
            self.partition.spans.delete_many({"partition": self.partition.name, "rollout_id": rollout_id})
            return self.partition.rollouts.delete_one({"_id": self.partition.id(rollout_id)}).deleted_count == 1
        self.records[rollout_id] = None
        for key in [key for key in self.new_spans if key[0] == rollout_id]:
            del self.new_spans[key]
        return True

    def claim(self, run_id: str | None, now: float) -> Record | None:
        while (document := self._leases.take(run_id, now)) is not None:
            rollout_id = document["rollout_id"]
            if rollout_id not in self.stored:
                try:
                    self.stored[rollout_id] = stored_record(document)
                except DamagedRecordError:
                    self.set_aside(rollout_id)
                    continue
            record = self.load(rollout_id)
            if record is not None and record.available_at is not None:
                return record
        return None

    def set_aside(self, rollout_id: str) -> None:
        fields = {"status": DAMAGED, "available_at": None, "deadline": None, "worker_id": None}
        self.partition.rollouts.update_one({"_id": self.partition.id(rollout_id)}, {"$set": fields})

    # --- many rollouts ---------------------------------------------------------------------------------------------

    @override
    def find(self, plan: Plan) -> Found:
        assert not self.records, "find is for reading scripts"
        return super().find(plan)

    def find_summaries(self, plan: SummaryPlan) -> SummaryPage:
        return summaries.find(self.partition.rollouts, self.partition.name, plan)

    def aggregate(self, plan: AggregatePlan) -> RolloutAggregate:
        return summaries.aggregate(self.partition.rollouts, self.partition.name, plan)

    def held(self, worker_id: str, limit: int) -> list[tuple[str, str]]:
        claims: list[tuple[float, tuple[str, str]]] = []
        for rollout_id, record in self.records.items():
            if record is not None and record.holder == worker_id:
                stored = self.stored.get(rollout_id)
                claims.append(
                    (math.inf if stored is None else stored.number, (rollout_id, record.attempts[-1].attempt_id))
                )
        query = {"partition": self.partition.name, "worker_id": worker_id}
        fields, most = {"number": 1, "rollout_id": 1, "attempt_id": 1}, limit + len(self.records)
        for document in self.partition.rollouts.find(query, fields, sort=[("number", -1)], limit=most):
            if document["rollout_id"] not in self.records:
                claims.append((document["number"], (document["rollout_id"], document["attempt_id"])))
        return [pair for _, pair in sorted(claims, reverse=True)[:limit]]

    # --- spans -----------------------------------------------------------------------------------------------------

    def add_spans(self, spans: Sequence[Span]) -> list[int]:
        duplicates = self._known(spans) if self._careful else set[SpanKey]()
        sizes: list[int] = []
        for span in spans:
            key = (span.rollout_id, span.attempt_id, span.span_id)
            if key in duplicates or key in self.new_spans:
                sizes.append(0)
            else:
                body = _encode(span)
                self.new_spans[key] = fitting(body, f"Span {span.span_id} of rollout {span.rollout_id}")
                sizes.append(len(body))
        return sizes

    def _known(self, spans: Sequence[Span]) -> set[SpanKey]:
        """Return the spans that are stored for good, and note those that a dead flush left."""
        requests: dict[str, list[str]] = {}
        for span in spans:
            requests.setdefault(span.rollout_id, []).append(span.span_id)
        keys: set[SpanKey] = set()
        fields = {"attempt_id": 1, "span_id": 1, "change": 1, "written": 1}
        for rollout_id, span_ids in requests.items():
            query = {"partition": self.partition.name, "rollout_id": rollout_id, "span_id": {"$in": span_ids}}
            for document in self.partition.spans.find(query, fields):
                stored = self.fetch(rollout_id)
                if stored is None or stored.counts(document["change"]):
                    keys.add((rollout_id, document["attempt_id"], document["span_id"]))
                elif _settling(document["written"]):
                    raise LostRace(careful=True)
                else:
                    self.abandoned.setdefault(rollout_id, set()).add(document["change"])
                    self.fenced.add(rollout_id)
        return keys

    def span_bodies(
        self, rollout_id: str, attempt_id: str | None, span_id: str | None = None, choose: Choice | None = None
    ) -> Sequence[str]:
        query: Document = {"partition": self.partition.name, "rollout_id": rollout_id}
        if span_id is not None:
            query["span_id"] = span_id
        if attempt_id is not None:
            query["attempt_id"] = attempt_id
        bodies: list[str] = []
        if self.records.get(rollout_id, ...) is not None:
            rows = self.partition.spans.find(query, {"body": 1}, sort=[("change", 1), ("place", 1)])
            bodies.extend(document["body"] for document in rows)
        for (rollout, attempt, span), body in self.new_spans.items():
            if rollout == rollout_id and attempt_id in (None, attempt) and span_id in (None, span):
                bodies.append(body)
        return bodies if choose is None else [bodies[place] for place in choose(bodies)]

    # --- rows ------------------------------------------------------------------------------------------------------

    def add_run_records(self, run_id: str, records: Sequence[NewRunRecord]) -> list[bool]:
        return run_records.add(self.partition, run_id, records, self._direct)

    def find_run_records(self, plan: RecordPlan) -> FoundRecords:
        return run_records.find(self.partition, plan)

    def drop_run_records(self, run_id: str, after_step: int) -> int:
        return run_records.drop(self.partition, run_id, after_step, self._direct)

    def count_run_records(self, run_id: str) -> dict[RecordKind, tuple[int, int]]:
        return run_records.counts(self.partition, run_id)

    def get(self, kind: Kind, key: str) -> Row | None:
        if kind == "run" and self._turns is not None and self._turn is None:
            self._turn = self._turns.take(f"run {key}")
        row, stored = self.rows.get(kind, key)
        if stored is not None and isinstance(row, ClaimRow) and self._turns is not None:
            return self._given(row, stored.written)
        return row

    def _given(self, row: ClaimRow, written: float) -> ClaimRow | None:
        """Return the rollouts that a claim really got: its flush may have ended half-way, or be in progress. None if it
        got none and may be made again."""
        missing = [
            (rollout_id, attempt_id)
            for rollout_id, attempt_id in row.claims
            if (record := self.load(rollout_id)) is None or record.find_attempt(attempt_id) is None
        ]
        unwritten = [pair for pair in missing if self.fetch(pair[0]) is not None]  # the others were deleted since
        if unwritten and _settling(written):
            raise LostRace
        self.fenced.update(rollout_id for rollout_id, _ in unwritten)
        if row.claims and len(unwritten) == len(row.claims):
            return None
        return replace(row, claims=[pair for pair in row.claims if pair not in missing])

    def put(self, kind: Kind, key: str, row: Row) -> None:
        self.rows.put(kind, key, row)

    def drop(self, kind: Kind, key: str) -> None:
        self.rows.put(kind, key, None)

    def scan(self, kind: Kind, limit: int | None = None) -> list[tuple[str, Row]]:
        return self.rows.scan(kind, limit)

    def count_rows(self, kind: Kind) -> int:
        return self.rows.count(kind)


def _settling(written: float) -> bool:
    """Return True while the flush that wrote this may still be in progress."""
    return -CLOCKS_DIFFER_SECONDS < time.time() - written < SETTLE_SECONDS
