"""The primitives of a script over one PostgreSQL connection, inside a transaction that the caller opened.

A writing script locks what it loads and claims; of the rows it reads it locks those of workers and runs, and writes
the others only if their version is the one it read. Its writes are sent together when it has succeeded, so that a
script that raises has nothing to undo. Only one that asks for a list after it has written has its writes sent early,
behind a savepoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from agentlightning.errors import DamagedRecordError
from agentlightning.store.postgres import queries, run_records, summaries
from agentlightning.store.postgres.link import Columns, Link
from agentlightning.store.postgres.writes import Seen, SpanKey, Writes
from agentlightning.store.rules.durable import (
    behind_place,
    last_place,
    page_of_records,
    read_record,
    read_row_or_none,
    readable_records,
    readable_rows,
)
from agentlightning.store.rules.query import FoundRecords, Plan, RecordPlan
from agentlightning.store.rules.tx import HEAD, Choice, Counts, Found, Kind, NewRunRecord, Notes, Record, Row, RunRow
from agentlightning.store.summaries.aggregate import AggregatePlan
from agentlightning.store.summaries.plan import SummaryPlan
from agentlightning.types import RecordKind, RolloutAggregate, Span, SummaryPage

_encode = Span.__pydantic_serializer__.to_json
_MOST = 2**62
_PASSED_OVER = 32
"""Records that a script has claimed and not sent yet, which its next claim passes over by their ids."""


class LockedError(Exception):
    """Another transaction has in hand what the script wants; run the script again."""


class PostgresTx:
    """One script's view of a partition.

    `seen`: the writing transaction of which the script is a part; None for one that reads, on a snapshot. A script
    waits for a lock only while its transaction holds none, so that no two ever wait for each other, and takes its spans
    for new ones. A `careful` one waits for every lock, and looks.
    """

    def __init__(self, link: Link, partition: str, seen: Seen | None = None, *, careful: bool = False) -> None:
        self.notes = Notes()
        self.held_back = False
        """There are changes that may not be told yet: a transaction that began earlier is still under way."""
        self._link = link
        self._partition = partition
        self._writing = seen is not None
        self._seen = seen or Seen()
        self._writes = Writes(link, partition, self._seen)
        self._careful = careful
        self._savepoint = False

    # --- records ----------------------------------------------------------------------------------------------------

    def load(self, rollout_id: str) -> Record | None:
        for records in (self._writes.records, self._seen.records):
            if rollout_id in records:
                record = records[rollout_id]
                return None if record is None else record.copy()
        rows = self._fetch_one(queries.LOAD, (self._partition, rollout_id), lock=True)
        record = read_record(rows[0][0], rollout_id) if rows else None
        self._seen.records[rollout_id] = record
        return None if record is None else record.copy()

    def save(self, record: Record) -> None:
        assert self._writing, "a reading script saves nothing"
        rollout_id = record.rollout.rollout_id
        if self._writes.records.get(rollout_id, record) is None:
            self._send_early()  # it was deleted, and its spans with it
        self._writes.records.pop(rollout_id, None)  # the one saved last comes last among the changes
        self._writes.records[rollout_id] = record.copy()

    def delete(self, rollout_id: str) -> bool:
        try:
            there = self.load(rollout_id) is not None
        except DamagedRecordError:
            there = True
        if there:
            self._writes.records[rollout_id] = None
            self._writes.spans = {key: body for key, body in self._writes.spans.items() if key[0] != rollout_id}
        return there

    def claim(self, run_id: str | None, now: float) -> Record | None:
        written = self._writes.records
        if len(written) > _PASSED_OVER or any(
            record and record.available_at is not None for record in written.values()
        ):
            self._send_early()
        query, values = queries.claim(run_id)
        while True:
            arguments = (self._partition, *values, now, list(self._writes.records))
            rows = self._link.fetch(query, arguments)
            if not rows:
                return None
            if records := self._locked_records(rows):
                return records[0]

    def set_aside(self, rollout_id: str) -> None:
        self._link.send(queries.SET_ASIDE, (self._partition, rollout_id))
        for table in summaries.TABLES:
            self._link.send(
                f"DELETE FROM {table} WHERE partition = %s AND rollout_id = %s", (self._partition, rollout_id)
            )

    def next_available(self, run_id: str | None) -> float | None:
        self._send_early()
        run, values = queries.of_run(run_id)
        query = f"SELECT min(available_at) FROM agl_rollouts WHERE partition = %s AND {run}"
        return self._link.fetch(f"{query} AND available_at IS NOT NULL", (self._partition, *values))[0][0]

    def due(self, now: float, limit: int) -> list[Record]:
        self._send_early()
        query = f"{queries.DUE} FOR UPDATE SKIP LOCKED" if self._writing else queries.DUE
        return self._locked_records(self._link.fetch(query, (self._partition, now, limit)))

    def holds(self, worker_id: str) -> bool:
        return bool(self.held(worker_id, 1))

    def held(self, worker_id: str, limit: int) -> list[tuple[str, str]]:
        written = self._writes.records
        if any(record is not None and record.holder == worker_id for record in written.values()):
            self._send_early()  # so that the table tells which of them are the newest
        rows = self._link.fetch(queries.HELD, (self._partition, worker_id, list(written), limit))
        return [(rollout_id, attempt_id) for rollout_id, attempt_id in rows]

    def any_held(self) -> bool:
        query = "SELECT EXISTS (SELECT 1 FROM agl_rollouts WHERE partition = %s AND worker_id IS NOT NULL)"
        return self._link.fetch(query, (self._partition,))[0][0]

    def find(self, plan: Plan) -> Found:
        assert not self._writing, "find is for reading scripts"
        where, values = queries.where(self._partition, plan)
        order = queries.order(plan)
        if order is None:
            query = f"SELECT body, rollout_id, number FROM agl_rollouts{where} ORDER BY number"
            rows = self._link.fetch(query, values, once=True)
            return page_of_records(self._readable(rows), {rollout_id: number for _, rollout_id, number in rows}, plan)
        total = plan.total
        if total is None:
            total = int(self._link.fetch(f"SELECT count(*) FROM agl_rollouts{where}", values, once=True)[0][0])
        if plan.limit == 0:
            return Found([], total)
        behind, of_place = behind_place(plan, "%s")
        most = None if plan.limit == -1 else min(plan.one_more, _MOST)
        # the bodies are fetched for the page only, not passed over or sorted with the rest
        numbers = f"SELECT number FROM agl_rollouts{where}{behind}{order} LIMIT %s OFFSET %s"
        columns = f"body, rollout_id, {plan.sort_by or 'NULL'}, number"
        query = f"SELECT {columns} FROM agl_rollouts WHERE partition = %s AND number IN ({numbers}){order}"
        page_values = (self._partition, *values, *of_place, most, min(plan.offset, _MOST))
        rows = self._link.fetch(query, page_values, once=True)
        page = rows if plan.limit == -1 else rows[: plan.limit]
        return Found(self._readable(page), total, last_place(page) if len(page) < len(rows) else None)

    def find_summaries(self, plan: SummaryPlan) -> SummaryPage:
        return summaries.find(self._link, self._partition, plan)

    def aggregate(self, plan: AggregatePlan) -> RolloutAggregate:
        return summaries.aggregate(self._link, self._partition, plan)

    def runs(self) -> list[str | None]:
        self._send_early()
        query = "SELECT DISTINCT run_id FROM agl_rollouts WHERE partition = %s"
        return [row[0] for row in self._link.fetch(query, (self._partition,))]

    def counts(self, run_id: tuple[str | None] | None = None) -> Counts:
        self._send_early()
        run, values = ("true", ()) if run_id is None else queries.of_run(run_id[0])
        query = (
            "SELECT count(*), sum(attempts)::bigint, sum(span_count)::bigint, sum(span_bytes)::bigint"
            f" FROM agl_rollouts WHERE partition = %s AND {run}"
        )
        return Counts(*(number or 0 for number in self._link.fetch(query, (self._partition, *values))[0]))

    def _readable(self, rows: Iterable[Columns]) -> list[Record]:
        """Return the records that can be read out of (body, rollout id); others are set aside, by the next writing
        script if this one reads."""
        return readable_records(rows, self.set_aside if self._writing else self.notes.damaged.append)

    def _locked_records(self, rows: Sequence[Columns]) -> list[Record]:
        records = self._readable(rows)
        if self._writing and records:
            self._seen.locked = True
            self._seen.records.update((record.rollout.rollout_id, record.copy()) for record in records)
        return records

    # --- changes ----------------------------------------------------------------------------------------------------

    def changes(self, after: str, limit: int) -> tuple[list[Record | RunRow], str]:
        change, number = queries.read_cursor(after)
        found = self._link.fetch(queries.CHANGES, (self._partition, change, number, limit))
        told = number >= queries.RUN_NUMBER
        found += self._link.fetch(queries.RUN_CHANGES, (self._partition, change, change, not told, limit))
        rows = queries.first_of(found, limit)
        settled = [row for row in rows if row[0]]
        self.held_back = len(settled) < len(rows)
        if settled:
            change, number = settled[-1][1:3]
        elif not rows:  # a cursor that lies in the future, as one of another database may, would never see anything
            query = "SELECT %s::xid8 > pg_snapshot_xmax(pg_current_snapshot())"
            if self._link.fetch(query, (change,))[0][0]:
                raise queries.no_cursor(after)
        changed: list[Record | RunRow] = []
        for _, _, place, body, key in settled:
            if place == queries.RUN_NUMBER:
                changed += [cast("RunRow", row) for _, row in readable_rows("run", [(key, body)])]
            else:
                changed += self._readable([(body, key)])
        return changed, f"{change}.{number}"

    def last_change(self) -> str:
        return self._link.fetch("SELECT pg_snapshot_xmin(pg_current_snapshot())::text")[0][0] + ".0"

    # --- spans ------------------------------------------------------------------------------------------------------

    def add_spans(self, spans: Sequence[Span]) -> list[int]:
        known: set[SpanKey] = set(self._writes.spans)
        if self._careful:
            wanted: dict[str, tuple[set[str], set[str]]] = {}
            for span in spans:
                attempt_ids, span_ids = wanted.setdefault(span.rollout_id, (set(), set()))
                attempt_ids.add(span.attempt_id)
                span_ids.add(span.span_id)
            for rollout_id, (attempt_ids, span_ids) in wanted.items():  # finds those that are stored, perhaps others
                values = (self._partition, rollout_id, list(attempt_ids), list(span_ids))
                rows = self._link.fetch(queries.KNOWN_SPANS, values)
                known.update((rollout_id, attempt_id, span_id) for attempt_id, span_id in rows)
        sizes: list[int] = []
        for span in spans:
            key = (span.rollout_id, span.attempt_id, span.span_id)
            if key in known:
                sizes.append(0)
                continue
            known.add(key)
            body = self._writes.spans[key] = _encode(span)
            sizes.append(len(body))
        return sizes

    def span_bodies(
        self, rollout_id: str, attempt_id: str | None, span_id: str | None = None, choose: Choice | None = None
    ) -> Sequence[bytes]:
        self._send_early()
        where, values = "partition = %s AND rollout_id = %s", [self._partition, rollout_id]
        for column, wanted in (("attempt_id", attempt_id), ("span_id", span_id)):
            if wanted is not None:
                where += f" AND {column} = %s"
                values.append(wanted)
        if choose is None:
            rows = self._link.fetch(f"SELECT body FROM agl_spans WHERE {where} ORDER BY number", values)
            return [row[0] for row in rows]
        heads = f"SELECT number, substring(body FROM 1 FOR {HEAD}) FROM agl_spans WHERE {where} ORDER BY number"
        found = self._link.fetch(heads, values)
        numbers = [found[place][0] for place in choose([head for _, head in found])]
        query = f"SELECT number, body FROM agl_spans WHERE {where} AND number = ANY(%s::bigint[])"
        bodies = dict(self._link.fetch(query, (*values, numbers)))
        return [bodies[number] for number in numbers if number in bodies]  # some may have been removed just now

    # --- rows -------------------------------------------------------------------------------------------------------

    def add_run_records(self, run_id: str, records: Sequence[NewRunRecord]) -> list[bool]:
        self._mark()
        return run_records.add(self._link, self._partition, run_id, records)

    def find_run_records(self, plan: RecordPlan) -> FoundRecords:
        return run_records.find(self._link, self._partition, plan)

    def drop_run_records(self, run_id: str, after_step: int) -> int:
        self._mark()
        return run_records.drop(self._link, self._partition, run_id, after_step)

    def count_run_records(self, run_id: str) -> dict[RecordKind, tuple[int, int]]:
        return run_records.counts(self._link, self._partition, run_id)

    def get(self, kind: Kind, key: str) -> Row | None:
        if (kind, key) in self._writes.rows:
            return self._writes.rows[kind, key]
        if (kind, key) not in self._seen.rows:
            rows = self._fetch_one(queries.GET, (self._partition, kind, key), lock=kind in ("worker", "run"))
            row = read_row_or_none(kind, key, rows[0][1]) if rows else None
            if rows and row is None:
                return None  # and written whatever its version
            self._seen.rows[kind, key] = None if row is None else (rows[0][0], row)
        seen = self._seen.rows[kind, key]
        return None if seen is None else seen[1]

    def put(self, kind: Kind, key: str, row: Row) -> None:
        assert self._writing, "a reading script puts nothing"
        self._writes.rows[kind, key] = row

    def drop(self, kind: Kind, key: str) -> None:
        assert self._writing, "a reading script drops nothing"
        self._writes.rows[kind, key] = None

    def scan(self, kind: Kind, limit: int | None = None) -> list[tuple[str, Row]]:
        self._send_early()
        rows = self._link.fetch(queries.SCAN, (self._partition, kind, limit))
        found = readable_rows(kind, ((key, body) for key, _, body in rows))
        versions = {key: version for key, version, _ in rows}
        self._seen.rows.update(((kind, key), (versions[key], row)) for key, row in found)
        return found

    def count_rows(self, kind: Kind) -> int:
        self._send_early()
        query = "SELECT count(*) FROM agl_rows WHERE partition = %s AND kind = %s"
        return self._link.fetch(query, (self._partition, kind))[0][0]

    def _fetch_one(self, query: str, values: tuple[str, ...], *, lock: bool) -> list[Columns]:
        """Fetch at most one row, locked in a writing script.

        Raises:
            LockedError: another transaction has it, and this one is not to wait.
        """
        if not (self._writing and lock):
            return self._link.fetch(query, values)
        if self._careful or not self._seen.locked:
            rows = self._link.fetch(f"{query} FOR UPDATE", values)
        else:
            rows = self._link.fetch(queries.locking_if_free(query), values + values)
            if rows and rows[0][-1] is None:
                raise LockedError
        self._seen.locked = self._seen.locked or bool(rows)
        return rows

    # --- the end of the script --------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Send what the script wrote."""
        if self._savepoint:
            self._link.send("RELEASE SAVEPOINT script")
        self._writes.send()

    def undo(self) -> None:
        """Leave no trace of a script that raised."""
        if self._savepoint:
            self._link.send_rollback("ROLLBACK TO SAVEPOINT script")
            self._link.send("RELEASE SAVEPOINT script")
            self._seen.forget()

    @property
    def lost_a_race(self) -> bool:
        """True if another transaction changed what the script read; known after the link's next `sync`."""
        return self._writes.lost_a_race

    def _send_early(self) -> None:
        """Send the writes so far, so that the next statement sees them; they can be undone."""
        if self._writes:
            self._mark()
            self._writes.send()

    def _mark(self) -> None:
        """Set the point to which the script can be undone."""
        if not self._savepoint:
            self._link.send("SAVEPOINT script")
            self._savepoint = True
