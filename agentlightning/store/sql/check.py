"""The check of a store in SQLite or PostgreSQL: all records can be read, and the tables agree with the records.

It does not check the internal structure of the database. It changes nothing and upgrades no tables.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from agentlightning.base.terminal import counted
from agentlightning.store.base import FINISHED, QUEUING, RUNNING
from agentlightning.store.rules.durable import record_type
from agentlightning.store.rules.rewards import problems_of_rewards
from agentlightning.store.rules.tx import Record, ResourcesRow, Row, TextRow, row_type
from agentlightning.store.sql import summaries
from agentlightning.store.sql.link import Link
from agentlightning.store.sql.writes import columns_of
from agentlightning.types import RunRecord, Span
from agentlightning.utils.rewards import may_hold_reward

_STRAY_SPANS = (
    "SELECT rollout_id, count(*) FROM @spans WHERE @here AND rollout_id NOT IN"
    " (SELECT rollout_id FROM @rollouts WHERE @here) GROUP BY rollout_id"
)
_STRAY_SUMMARIES = (
    ("summaries", "WHERE @here AND number NOT IN (SELECT number FROM @rollouts WHERE @here)"),
    ("inputs", "WHERE @here AND @input_key NOT IN (SELECT @input_key FROM @rollouts WHERE @here)"),
)
_STRAY_RECORDS = (
    "SELECT run_id, count(*) FROM @run_records WHERE @here AND run_id NOT IN"
    " (SELECT key FROM @rows WHERE @here AND kind = 'run') GROUP BY run_id"
)


def problems(link: Link) -> Iterator[str]:
    """Yield the problems, within one reading transaction."""
    yield from _problems_of_rollouts(link)
    for rollout_id, count in link.each(_STRAY_SPANS):
        yield f"{counted(count, 'span')} of rollout {rollout_id}, which does not exist"
    for table, stray in _STRAY_SUMMARIES:
        if count := link.fetch(f"SELECT count(*) FROM @{table} {stray}")[0][0]:
            yield f"{counted(count, 'row')} of {table} for rollouts that do not exist"
    yield from _problems_of_rows(link)
    yield from _problems_of_runs(link)


def _removal(link: Link, table: str, **where: object) -> str:
    tests = "".join(f" AND {column} = {value!r}" for column, value in where.items())
    return link.shown(f"DELETE FROM @{table} WHERE @here") + tests


def _problems_of_rollouts(link: Link) -> Iterator[str]:
    columns = ("rollout_id", "run_id", *link.dialect.columns)
    query = f"SELECT body, {', '.join(columns)} FROM @rollouts WHERE @here ORDER BY number"
    for body, *values in link.each(query):
        name = f"rollout {values[0]}"
        try:
            record = record_type().validate_json(body)
        except ValidationError as error:
            yield (
                f"{name}: the record cannot be read: {error.errors()[0]['msg']}; it is excluded from queue and lists. "
                f"Remove it: store.delete_rollouts(rollout_ids=[{values[0]!r}], force=True)"
            )
            continue
        fields = (record.rollout.rollout_id, record.rollout.run_id, *columns_of(record))
        for column, value, expected in zip(columns, values, fields, strict=False):
            if value != expected:
                yield f"{name}: column {column} is {value!r}, but the record has {expected!r}"
        for problem in (*_problems_of_record(link, record), *summaries.problems(link, record)):
            yield f"{name}: {problem}"


def _problems_of_record(link: Link, record: Record) -> Iterator[str]:
    """Yield the inconsistencies within a record, and between the record and its spans."""
    rollout, status = record.rollout, record.rollout.status
    if (record.queued_at is not None) != (status in QUEUING):
        yield f"the status is {status}, but it is {'not ' if record.queued_at is None else ''}in the queue"
    if record.deadline is not None and status not in RUNNING:
        yield f"the status is {status}, but it has a deadline"
    if (rollout.end_time is not None) != (status in FINISHED):
        yield f"the status is {status}, but it has {'no' if rollout.end_time is None else 'an'} end_time"
    if [attempt.sequence_id for attempt in record.attempts] != list(range(1, len(record.attempts) + 1)):
        yield "the attempts are not numbered 1, 2, 3, ..."
    if len({attempt.attempt_id for attempt in record.attempts}) != len(record.attempts):
        yield "two attempts have the same id"
    if any(attempt.rollout_id != rollout.rollout_id for attempt in record.attempts):
        yield "it contains an attempt of another rollout"
    count = size = highest = 0
    rewarding: list[Span] = []
    attempts = {attempt.attempt_id for attempt in record.attempts}
    query = "SELECT attempt_id, span_id, body FROM @spans WHERE @here AND rollout_id = ? ORDER BY number"
    for attempt_id, span_id, body in link.each(query, (rollout.rollout_id,)):
        count, size = count + 1, size + len(body)
        try:
            span = Span.model_validate_json(body)
        except ValidationError as error:
            removal = _removal(link, "spans", rollout_id=rollout.rollout_id, attempt_id=attempt_id, span_id=span_id)
            reason = error.errors()[0]["msg"]
            yield f"span {span_id} cannot be read: {reason}. Remove the rollout, or only the span: {removal}"
            continue
        highest = max(highest, span.sequence_id)
        if may_hold_reward(span):
            rewarding.append(span)
        if (span.rollout_id, span.attempt_id, span.span_id) != (rollout.rollout_id, attempt_id, span_id):
            yield f"span {span_id} is stored under different ids"
        if attempt_id not in attempts:
            yield f"span {span_id} belongs to attempt {attempt_id}, which the rollout does not have"
    if (count, size) != (record.span_count, record.span_bytes):
        known = f"{record.span_count} of {record.span_bytes}"
        yield f"it has {counted(count, 'span')} of {size} bytes, but the record has {known}"
    if highest > record.spans_issued:
        yield f"a span has number {highest}, but only {record.spans_issued} numbers were assigned"
    yield from problems_of_rewards(record, rewarding)


def _problems_of_rows(link: Link) -> Iterator[str]:
    rows: dict[tuple[str, str], Row] = {}
    for kind, key, body in link.each("SELECT kind, key, body FROM @rows WHERE @here ORDER BY number"):
        try:
            row = row_type(kind).validate_json(body)
        except (KeyError, ValidationError):
            removal = _removal(link, "rows", kind=kind, key=key)
            yield f"the row {key!r} of kind {kind!r} cannot be read. Remove it: {removal}"
            continue
        if kind in ("resources", "resources_version", "latest_resources"):
            rows[kind, key] = row
    for (kind, key), row in rows.items():
        if isinstance(row, TextRow) and ("resources", row.value) not in rows:
            yield f"the latest resources are {row.value}, which do not exist"
        if kind == "resources" and isinstance(row, ResourcesRow):
            version = rows.get(("resources_version", f"{key}\n{row.update.version}"))
            if not isinstance(version, ResourcesRow) or version.update != row.update:
                yield f"resources {key}: version {row.update.version} is missing or differs from the newest version"


def _problems_of_runs(link: Link) -> Iterator[str]:
    for run_id, count in link.each(_STRAY_RECORDS):
        yield f"{counted(count, 'record')} of run {run_id!r}, which does not exist"
    query = "SELECT number, run_id, kind, step, name, body FROM @run_records WHERE @here ORDER BY number"
    for number, run_id, kind, step, name, body in link.each(query):
        try:
            record = RunRecord.model_validate_json(body)
        except ValidationError:
            problem = "cannot be read"
        else:
            if (record.kind, record.step, record.name) == (kind, step, name):
                continue
            problem = "is stored under a different kind, step or name"
        removal = _removal(link, "run_records", number=number)
        yield f"run {run_id!r}: the {kind} record {name!r} of step {step} {problem}. Remove it: {removal}"
