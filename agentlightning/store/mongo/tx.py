"""The primitives of a script over one partition in MongoDB: reads go to the server, writes are buffered for the flush.

Nothing here waits for another flush. If another flush has locked a rollout or may still be counting spans, `LostRace`
is raised, and the script is run again later.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Self

from pymongo import ReturnDocument
from pymongo.errors import AutoReconnect, PyMongoError
from pymongo.write_concern import WriteConcern
from typing_extensions import override

from agentlightning.errors import DamagedRecordError
from agentlightning.store.mongo.change_numbers import ChangeNumbers
from agentlightning.store.mongo.documents import (
    CLOCKS_DIFFER_SECONDS,
    LEASE_SECONDS,
    Document,
    LostRace,
    counts,
    fitting,
    in_force,
)
from agentlightning.store.mongo.queries import Queries, sums
from agentlightning.store.mongo.schema import Partition
from agentlightning.store.rules.durable import DAMAGED, read_record, read_row_or_none, readable_rows
from agentlightning.store.rules.query import Plan
from agentlightning.store.rules.tx import Choice, ClaimRow, Found, Kind, NewRunRecord, Record, Row
from agentlightning.types import RecordKind, Span

SETTLE_SECONDS = 2.0
"""Seconds after which an incomplete flush counts as abandoned. Until then, others wait for it."""
_TURN_SECONDS = 1.0
_QUEUE = [("priority", -1), ("available_at", 1), ("number", 1)]
_encode = Span.__pydantic_serializer__.to_json
RowKey = tuple[Kind, str]
SpanKey = tuple[str, str, str]
"""(rollout id, attempt id, span id)."""
RecordKey = tuple[str, RecordKind, int, str]
"""(run id, kind, step, name)."""


class Turns:
    """Turns for the writers of one rollout or run in this process, so that they do not lose races against each other.
    Turns only improve speed, so the wait for a turn is short, and a script has at most one turn."""

    def __init__(self) -> None:
        self._locks = [threading.Lock() for _ in range(256)]

    def take(self, key: str) -> threading.Lock | None:
        """Return the turn, which the caller must release; None if it was not free in time."""
        turn = self._locks[hash(key) % len(self._locks)]
        return turn if turn.acquire(timeout=_TURN_SECONDS) else None


@dataclass
class Tries:
    """The common state of the tries of one writing script."""

    careful: bool = False
    """True to look up spans and records of runs before they are added."""
    flushing: bool = False
    """True if something may have been written."""
    dropped: int = 0
    """Number of removed records of runs."""


class MongoTx(Queries):
    """One run of a script. Without `tries`, the script is read-only. At the end of the context, claims are released
    unless they were written. The public fields are the reads and the writes of the script, for the flush."""

    def __init__(self, partition: Partition, numbers: ChangeNumbers, turns: Turns, tries: Tries | None) -> None:
        super().__init__(partition, numbers)
        self.rollouts: dict[str, Document | None] = {}
        """Rollouts as they were read."""
        self.rows: dict[RowKey, Document | None] = {}
        """Rows as they were read."""
        self.records: dict[str, Record | None] = {}
        """Rollouts to write; None to remove one."""
        self.puts: dict[RowKey, Row | None] = {}
        """Rows to write; None to remove one."""
        self.new_spans: dict[SpanKey, str] = {}
        self.new_run_records: dict[RecordKey, bytes] = {}
        self.abandoned: dict[str, set[int]] = {}
        """Numbers of a rollout's spans of a dead flush. These spans are removed before new ones are written."""
        self.fenced = False
        """True if an abandoned flush must fail if it is still running. The saved rollouts get new numbers first."""
        self.tries = tries or Tries()
        self._writing = tries is not None
        self._turns = turns
        self._turn: threading.Lock | None = None
        self._claimant = ""
        self._leased: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if self._turn is not None:
            self._turn.release()
        if self._leased and error is not None and not isinstance(error, AutoReconnect):
            mine = {"_id": {"$in": self._leased}, "claimant": self._claimant}
            with contextlib.suppress(PyMongoError):  # they expire
                self.partition.rollouts.update_many(mine, {"$set": {"claimed_until": 0.0, "claimant": ""}})

    def _take_turn(self, key: str) -> None:
        if self._writing and self._turn is None:
            self._turn = self._turns.take(key)

    # --- one rollout -----------------------------------------------------------------------------------------------

    def load(self, rollout_id: str) -> Record | None:
        if rollout_id in self.records:
            record = self.records[rollout_id]
            return None if record is None else record.copy()
        document = self.fetch(rollout_id)
        return None if document is None else read_record(document.get("body", ""), rollout_id)

    def fetch(self, rollout_id: str) -> Document | None:
        """Return a rollout's document as the script first read it, or read it now."""
        if rollout_id not in self.rollouts:
            self._take_turn(rollout_id)
            document = self.partition.rollouts.find_one({"_id": self.partition.id(rollout_id)})
            if document is not None and "deleted" in document:
                if self._writing:
                    self.partition.finish_deletions([document])
                document = None
            if document is not None and self._writing and in_force(document["lock"]):
                raise LostRace
            self.rollouts[rollout_id] = document
        return self.rollouts[rollout_id]

    def save(self, record: Record) -> None:
        self.records[record.rollout.rollout_id] = record.copy()

    def delete(self, rollout_id: str) -> bool:
        try:
            if self.load(rollout_id) is None:
                return False
        except DamagedRecordError:  # nothing to be exact about
            self.partition.spans.delete_many({**self.partition.here, "rollout_id": rollout_id})
            return self.partition.rollouts.delete_one({"_id": self.partition.id(rollout_id)}).deleted_count == 1
        self.records[rollout_id] = None
        self.new_spans = {key: body for key, body in self.new_spans.items() if key[0] != rollout_id}
        return True

    def claim(self, run_id: str | None, now: float) -> Record | None:
        """Return the next record to claim, with a lease, so that other scripts do not get it for a while. The lease
        only improves speed: a claim is exact because its rollout is replaced only if it still has its last number.

        Leases one rollout at a time, because leased rollouts that are not needed look like an empty queue to others.
        """
        self._claimant = self._claimant or uuid.uuid4().hex
        rollouts = self.partition.rollouts.with_options(write_concern=WriteConcern(1))  # a lease may be lost
        while True:
            clock = time.time()
            free = [{"claimed_until": {"$lte": clock}}, {"claimed_until": {"$gt": clock + CLOCKS_DIFFER_SECONDS}}]
            queued = {"run_id": run_id, "available_at": {"$gte": 0, "$lte": now}}
            document: Document | None = rollouts.find_one_and_update(
                {**self.partition.here, **queued, "lock": {"$lte": clock}, "$or": free},
                {"$set": {"claimed_until": clock + LEASE_SECONDS, "claimant": self._claimant}},
                sort=_QUEUE,
                return_document=ReturnDocument.AFTER,
            )
            if document is None:
                return None
            rollout_id = document["rollout_id"]
            self._leased.append(document["_id"])
            self.rollouts.setdefault(rollout_id, document)
            try:
                record = self.load(rollout_id)
            except DamagedRecordError:
                self.set_aside(rollout_id)
            else:
                if record is not None and record.available_at is not None:
                    return record

    def set_aside(self, rollout_id: str) -> None:
        fields = {"status": DAMAGED, "available_at": None, "deadline": None, "worker_id": None}
        self.partition.rollouts.update_one({"_id": self.partition.id(rollout_id)}, {"$set": fields})

    @override
    def find(self, plan: Plan) -> Found:
        assert not self.records, "find is for reading scripts"
        return super().find(plan)

    def held(self, worker_id: str, limit: int) -> list[tuple[str, str]]:
        query = {**self.partition.here, "worker_id": worker_id}
        fields, most = ["number", "rollout_id", "attempt_id"], limit + len(self.records)
        stored = self.partition.rollouts.find(query, fields, sort=[("number", -1)], limit=most)
        claims: dict[str, tuple[float, str]] = {d["rollout_id"]: (d["number"], d["attempt_id"]) for d in stored}
        for rollout_id, record in self.records.items():
            claims.pop(rollout_id, None)
            if record is not None and record.holder == worker_id:
                before = self.rollouts.get(rollout_id)
                number = math.inf if before is None else before["number"]
                claims[rollout_id] = (number, record.attempts[-1].attempt_id)
        newest = sorted(claims.items(), key=itemgetter(1), reverse=True)[:limit]
        return [(rollout_id, attempt_id) for rollout_id, (_, attempt_id) in newest]

    # --- spans -----------------------------------------------------------------------------------------------------

    def add_spans(self, spans: Sequence[Span]) -> list[int]:
        duplicates = self._known(spans) if self.tries.careful else set[SpanKey]()
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
        """Return the committed spans, and record the spans of dead flushes."""
        requests: dict[str, list[str]] = {}
        for span in spans:
            requests.setdefault(span.rollout_id, []).append(span.span_id)
        keys: set[SpanKey] = set()
        fields = ["attempt_id", "span_id", "change", "written"]
        for rollout_id, span_ids in requests.items():
            query = {**self.partition.here, "rollout_id": rollout_id, "span_id": {"$in": span_ids}}
            for document in self.partition.spans.find(query, fields):
                if counts(self.fetch(rollout_id), document["change"]):
                    keys.add((rollout_id, document["attempt_id"], document["span_id"]))
                else:
                    self._fence(rollout_id, document["written"])
                    self.abandoned.setdefault(rollout_id, set()).add(document["change"])
        return keys

    def _fence(self, rollout_id: str, written: float) -> None:
        """Make a flush fail that wrote at this time and did not commit, if it is still running.

        Raises:
            LostRace: the flush may still be in progress.
        """
        if -CLOCKS_DIFFER_SECONDS < time.time() - written < SETTLE_SECONDS:
            raise LostRace
        record = self.load(rollout_id)
        assert record is not None, rollout_id
        self.records.setdefault(rollout_id, record)
        self.fenced = True

    def span_bodies(
        self, rollout_id: str, attempt_id: str | None, span_id: str | None = None, choose: Choice | None = None
    ) -> Sequence[str]:
        places = {"rollout_id": rollout_id, "attempt_id": attempt_id, "span_id": span_id}
        query = {name: value for name, value in places.items() if value is not None}
        bodies: list[str] = []
        if self.records.get(rollout_id, ...) is not None:
            query = {**self.partition.here, **query}
            rows = self.partition.spans.find(query, ["body"], sort=[("change", 1), ("place", 1)])
            bodies.extend(document["body"] for document in rows)
        for (rollout, attempt, span), body in self.new_spans.items():
            if rollout == rollout_id and attempt_id in (None, attempt) and span_id in (None, span):
                bodies.append(body)
        return bodies if choose is None else [bodies[place] for place in choose(bodies)]

    # --- records of runs -------------------------------------------------------------------------------------------

    def add_run_records(self, run_id: str, records: Sequence[NewRunRecord]) -> list[bool]:
        known: set[RecordKey] = set()
        if self.tries.careful:
            query = {**self._of_run(run_id), "step": {"$in": list({record.step for record in records})}}
            for each in self.partition.run_records.find(query, ["kind", "step", "name"]):
                known.add((run_id, each["kind"], each["step"], each["name"]))
        fresh: list[bool] = []
        for record in records:
            key = (run_id, record.kind, record.step, record.name)
            fresh.append(key not in known and key not in self.new_run_records)
            if fresh[-1]:
                self.new_run_records[key] = record.body
        return fresh

    def drop_run_records(self, run_id: str, after_step: int) -> int:
        after = {**self._of_run(run_id), "step": {"$gt": after_step}}
        self.tries.dropped += self.partition.run_records.delete_many(after).deleted_count
        return self.tries.dropped

    # --- rows ------------------------------------------------------------------------------------------------------

    def get(self, kind: Kind, key: str) -> Row | None:
        if (kind, key) in self.puts:
            return self.puts[kind, key]
        if kind == "run":
            self._take_turn(f"run {key}")
        document = self.fetch_row(kind, key)
        row = None if document is None else read_row_or_none(kind, key, document["body"])
        if document is not None and isinstance(row, ClaimRow) and self._writing:
            return self._given(row, document["written"])
        return row

    def fetch_row(self, kind: Kind, key: str) -> Document | None:
        """Return a row's document as the script first read it, or read it now."""
        if (kind, key) not in self.rows:
            document = self.partition.rows.find_one({"_id": self.partition.id(kind, key)})
            if document is not None:
                self.partition.finish_row(document)
            self.rows[kind, key] = document
        return self.rows[kind, key]

    def _given(self, row: ClaimRow, written: float) -> ClaimRow | None:
        """Return the rollouts that a claim actually got, because its flush may be incomplete or in progress. None if it
        got none and can be repeated."""
        missing = [
            (rollout_id, attempt_id)
            for rollout_id, attempt_id in row.claims
            if (record := self.load(rollout_id)) is None or record.find_attempt(attempt_id) is None
        ]
        unwritten = [rollout_id for rollout_id, _ in missing if self.fetch(rollout_id) is not None]
        for rollout_id in unwritten:  # the others were deleted since
            self._fence(rollout_id, written)
        if row.claims and len(unwritten) == len(row.claims):
            return None
        return replace(row, claims=[pair for pair in row.claims if pair not in missing])

    def put(self, kind: Kind, key: str, row: Row) -> None:
        self.puts[kind, key] = row

    def drop(self, kind: Kind, key: str) -> None:
        self.puts[kind, key] = None

    def scan(self, kind: Kind, limit: int | None = None) -> list[tuple[str, Row]]:
        query, most = {**self.partition.here, "kind": kind}, 0 if limit is None else limit + len(self.puts)
        documents = list(self.partition.rows.find(query, sort=[("number", 1)], limit=most))
        for document in documents:
            self.rows.setdefault((kind, document["key"]), document)
        rows: dict[str, Row | None] = dict(readable_rows(kind, ((each["key"], each["body"]) for each in documents)))
        rows.update((key, row) for (of_kind, key), row in self.puts.items() if of_kind == kind)
        return [(key, row) for key, row in rows.items() if row is not None][:limit]

    def count_rows(self, kind: Kind) -> int:
        assert not self.puts, "rows are counted by reading scripts"
        return sums(self.partition.rows, {**self.partition.here, "kind": kind})[0]
