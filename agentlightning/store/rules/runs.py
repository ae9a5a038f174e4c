"""Runs, their records, and vocabularies: start, change, rewind to a step, delete."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

from agentlightning.errors import BadRequestError, ConflictError, GoneError, NotFoundError
from agentlightning.store.rules.idempotency import Call, recall, recall_row, remember, remember_row
from agentlightning.store.rules.query import FoundRecords, RecordPlan
from agentlightning.store.rules.tx import NewRunRecord, RunRow, TokenRow, Tx, VocabularyRow
from agentlightning.store.rules.values import LONGEST_NAME, evolve, to_json, valid
from agentlightning.types import BestFigure, RetentionPolicy, Run, RunRecord

MOST_BYTES = 8 << 20
"""Largest JSON of one record, run or vocabulary in bytes. All backends can store it."""
MOST_RECORDS = 10_000
_LARGEST_STEP = 2**53
_LATER = 1e-6
"""Seconds between two stop requests at the same time. Two such times differ as floats."""
_FORGOTTEN_AT_ONCE = 8


def check_size(what: str, body: bytes) -> bytes:
    """Return a body if it is small enough to be stored.

    Raises:
        BadRequestError: it has more than `MOST_BYTES` bytes.
    """
    if len(body) > MOST_BYTES:
        raise BadRequestError(
            f"{what} takes {len(body)} bytes of JSON; at most {MOST_BYTES} (8 MiB) are allowed. "
            "Split it into several with different names, or store the location of the data instead."
        )
    return body


def new_records(records: Sequence[RunRecord], now: float) -> list[NewRunRecord]:
    """Return records in their stored form.

    Raises:
        BadRequestError: a record is invalid or too large, or there are too many.
        TypeError: `data` contains a value that is not JSON; the message gives its position.
    """
    if len(records) > MOST_RECORDS:
        raise BadRequestError(
            f"add_run_records got {len(records)} records; at most {MOST_RECORDS} are allowed in one call"
        )
    made: list[NewRunRecord] = []
    for value in records:
        with valid("records"):
            record = RunRecord.model_validate(value)
        what = f"The {record.kind} record {record.name[:80]!r} of step {record.step}"
        if record.step > _LARGEST_STEP or "\0" in record.name or len(record.name) > LONGEST_NAME:
            raise BadRequestError(
                f"{what} cannot be stored: a step is at most {_LARGEST_STEP}, a name has at most {LONGEST_NAME} "
                "characters and no null byte"
            )
        data = to_json(record.data, f"data of {record.kind} {record.name!r}, step {record.step}")
        stamped = RunRecord.model_construct(kind=record.kind, step=record.step, name=record.name, time=now, data=data)
        body = check_size(what, stamped.__pydantic_serializer__.to_json(stamped))
        made.append(NewRunRecord(record.kind, record.step, record.name, body))
    return made


# --- one run -------------------------------------------------------------------------------------------------------


def start_run(tx: Tx, now: float, run_id: str, given: dict[str, Any], call: Call | None) -> Run:
    """Start a run, or continue one."""
    row = load_run(tx, run_id)
    if row is None:
        row = _new_run(tx, now, run_id, call, "start_run")
    elif recall(tx, row, call, "start_run", now) is not None:
        return row.run
    begun = row.run.starts > 0
    row.run = evolve(
        row.run, **given, state="running", starts=row.run.starts + 1, last_heartbeat_time=now,
        start_time=row.run.start_time if begun else now, end_time=None, error=None, stop_reason=None, stop_time=None,
    )  # fmt: skip
    return _put(tx, row, now, call)


def update_run(tx: Tx, now: float, run_id: str, changes: dict[str, Any], heartbeat: bool, call: Call | None) -> Run:
    """Change a run. A stop request creates the run if it is unknown."""
    row = load_run(tx, run_id) if changes.get("stop_reason") is not None else _existing(tx, run_id)
    if row is None:
        row = _new_run(tx, now, run_id, call, "update_run")
    elif recall(tx, row, call, "update_run", now) is not None:
        return row.run
    before, fields = row.run, dict(changes)
    best: BestFigure | None = fields.get("best")
    best_before = before.best
    if (
        best is not None
        and best_before is not None
        and best_before.name == best.name
        and best_before.value >= best.value
    ):
        del fields["best"]
    if "stop_reason" in fields:
        stamp = now if before.stop_time is None else max(now, before.stop_time + _LATER)
        fields["stop_time"] = None if fields["stop_reason"] is None else stamp
    if "state" in fields:
        fields["end_time"] = None if fields["state"] == "running" else now
    if heartbeat:
        fields["last_heartbeat_time"] = now
    row.run = evolve(before, **fields)
    return _put(tx, row, now, call)


def add_run_records(tx: Tx, now: float, run_id: str, records: Sequence[NewRunRecord], call: Call | None) -> int:
    """Store the new records of a run; return their number."""
    row = _existing(tx, run_id)
    before = recall(tx, row, call, "add_run_records", now)
    if before is not None:
        return int(before.answer)
    new = [record for record, is_new in zip(records, tx.add_run_records(run_id, records), strict=True) if is_new]
    counts, last = dict(row.records), row.run.last_step
    for record in new:
        counts[record.kind] = counts.get(record.kind, 0) + 1
    for record in records:  # a known one may come from a process that died before counting it
        if record.kind == "step":
            last = record.step if last is None else max(last, record.step)
    row.records, row.run = counts, evolve(row.run, last_step=last, last_heartbeat_time=now)
    _put(tx, row, now, call, str(len(new)))
    return len(new)


def rewind_run(tx: Tx, now: float, run_id: str, step: int, call: Call | None) -> int:
    """Remove the records of a run after a step; return the number removed."""
    row = _existing(tx, run_id)
    before = recall(tx, row, call, "rewind_run", now)
    if before is not None:
        return int(before.answer)
    removed = tx.drop_run_records(run_id, step)
    counted = tx.count_run_records(run_id)
    row.records = {kind: count for kind, (count, _) in counted.items()}
    row.run = evolve(row.run, last_step=counted["step"][1] if "step" in counted else None)
    _put(tx, row, now, call, str(removed))
    return removed


def find_run_records(tx: Tx, plan: RecordPlan) -> FoundRecords:
    """Return one page of the records of a run."""
    if plan.total is None and plan.name is None and plan.step_from is None and plan.step_to is None:
        row = load_run(tx, plan.run_id)
        counts: dict[str, int] = {} if row is None else {**row.records}
        kinds = counts if plan.kind_in is None else set(plan.kind_in)
        plan = dataclasses.replace(plan, total=sum(counts.get(kind, 0) for kind in kinds))
    return tx.find_run_records(plan)


def load_run(tx: Tx, run_id: str) -> RunRow | None:
    """Return a copy of a run's row, which can be changed."""
    row = cast("RunRow | None", tx.get("run", run_id))
    return None if row is None else dataclasses.replace(row)


def _new_run(tx: Tx, now: float, run_id: str, call: Call | None, operation: str) -> RunRow:
    """Return the row of a run that does not exist yet.

    Raises:
        GoneError: this call created the run before, and it was deleted.
    """
    if recall_row(tx, call, operation) is not None:
        raise GoneError(f"This call already created run {run_id!r}, which was deleted since")
    tx.drop_run_records(run_id, -1)  # left by an interrupted deletion
    return RunRow(Run(run_id=run_id, start_time=now))


def _existing(tx: Tx, run_id: str) -> RunRow:
    row = load_run(tx, run_id)
    if row is None:
        raise NotFoundError(f"Run {run_id!r} not found; create it with start_run")
    return row


def _put(tx: Tx, row: RunRow, now: float, call: Call | None, answer: str = "") -> Run:
    """Write a changed row, and record the result of the call."""
    remember(tx, row, call, now, answer)
    tx.put("run", row.run.run_id, row)
    tx.notes.changed = True
    return row.run


# --- many runs -----------------------------------------------------------------------------------------------------


def delete_runs(tx: Tx, now: float, run_ids: Sequence[str], force: bool, call: Call | None) -> int | ConflictError:
    """Remove runs with their records; unknown ids are ignored. A refusal is returned, so that it is recorded."""
    before = recall_row(tx, call, "delete_runs")
    if before is not None:
        return int(before.answer)
    rows = [row for run_id in dict.fromkeys(run_ids) if (row := load_run(tx, run_id)) is not None]
    running = [row.run for row in rows if row.run.state == "running"]
    if running and not force:
        error = ConflictError(
            f"Nothing was deleted: run {running[0].run_id!r} is running. End it with "
            "update_run(state='stopped') first, or pass force=True."
        )
        remember_row(tx, call, now, error)
        return error
    for row in rows:
        _delete(tx, row)
    remember_row(tx, call, now, str(len(rows)))
    return len(rows)


def forget_runs(tx: Tx, now: float, policy: RetentionPolicy) -> bool:
    """Delete some runs that ended longer ago than the policy keeps them; return True if there may be more. If no run
    remains, delete the vocabularies."""
    if policy.max_run_age is None:
        return False
    runs = [cast("RunRow", row) for _, row in tx.scan("run")]
    old = [row for row in runs if row.run.end_time is not None and now - row.run.end_time > policy.max_run_age]
    for row in old[:_FORGOTTEN_AT_ONCE]:
        _delete(tx, row)
    if len(old) == len(runs) <= _FORGOTTEN_AT_ONCE:
        for vocabulary_id, _ in tx.scan("vocabulary"):
            tx.drop("vocabulary", vocabulary_id)
    return len(old) > _FORGOTTEN_AT_ONCE


def _delete(tx: Tx, row: RunRow) -> None:
    for done in row.calls:  # a copy of one of these, however late, must not make the run again
        tx.put("token", done.key, TokenRow(done.time, done.asked, done.answer))
    tx.drop_run_records(row.run.run_id, -1)
    tx.drop("run", row.run.run_id)
    tx.notes.changed = True


def add_vocabulary(tx: Tx, vocabulary_id: str, tokens: list[str]) -> bool:
    """Store a vocabulary, unless it exists."""
    if tx.get("vocabulary", vocabulary_id) is not None:
        return False
    tx.put("vocabulary", vocabulary_id, VocabularyRow(tokens))
    return True
