"""Shared parts of the durable backends: the version of the stored data, and the handling of unreadable records.

A program upgrades data of an older version when it opens a store. It rejects data of a newer version, because it would
lose its new fields. It checks the version again with every write, so that a program that was running before an upgrade
writes nothing after it (programs of version 2 and earlier check only when they open a store).

To change the stored data, increase `SCHEMA_VERSION` and give each backend its step to that number (`sqlite/schema.py`,
`postgres/schema.py`, `mongo/schema.py`); the step may be empty. Then save databases of the previous version as fixtures
for the tests, with the program before the change (`tests/fixtures/stores/make.py`).

1  first version
2  priorities, ends, sizes and changes of rollouts in separate columns (SQLite; the others began with them)
3  the version is checked with every write
4  runs and their records, vocabularies; changes of runs and rollouts have a common sequence of numbers
5  rewards on attempts, read from the existing spans; summaries and input texts next to the records

A record that cannot be read (invalid JSON, a missing field, an unknown status) is an error of the store, not of the
caller. `DamagedRecordError` names the row, and the log reports it once. A rollout is set aside: its row gets the status
`damaged` and leaves the queue, so that claims and lists skip it. A worker's row can be restored from its attempts, and
the worker's next call creates it again. Other rows and spans are not changed, and only a request for the damaged one
fails. `agl store check` lists all of them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any, Final, Self, cast

from pydantic import TypeAdapter, ValidationError

from agentlightning.errors import ConflictError, DamagedRecordError
from agentlightning.store.cursors import Place
from agentlightning.store.rules.query import Plan, page_of, rank
from agentlightning.store.rules.tx import Found, Kind, Record, Row, row_type
from agentlightning.utils.version import VERSION

logger = logging.getLogger(__name__)
SCHEMA_VERSION = 5
DAMAGED: Final = "damaged"
"""Status in the row of a rollout that was set aside. No rollout has this status."""
_MOST_LOGGED = 10_000
_logged: set[tuple[str, str]] = set()
INDEXED = (
    *("status", "start_time", "end_time", "priority", "available_at", "deadline", "worker_id"),
    *("attempts", "span_count", "span_bytes"),
)
"""Columns of the rollouts table that repeat fields of the record, for searching."""
LISTED = 50
"""Largest number of problems in a report. Further problems are only counted."""


@dataclass(frozen=True)
class FileReport:
    """The result of a check of a store."""

    schema_version: int
    rollouts: int = 0
    spans: int = 0
    found: int = 0
    """Number of problems."""
    problems: list[str] = field(default_factory=list[str])
    """The first `LISTED` problems."""

    @classmethod
    def of(cls, schema_version: int, rollouts: int, spans: int, problems: Iterator[str]) -> Self:
        """Return the report of these problems. This call consumes the iterator."""
        listed = list(islice(problems, LISTED))
        return cls(schema_version, rollouts, spans, len(listed) + sum(1 for _ in problems), listed)

    @property
    def complete(self) -> bool:
        """False if the store has an older version, so that only the structure of a SQLite file was checked."""
        return self.schema_version == SCHEMA_VERSION


def check_not_newer(place: str, version: int) -> None:
    """Check that this program knows the version of the data in `place` (a name for messages).

    Raises:
        ConflictError: a newer version wrote the data.
    """
    if version > SCHEMA_VERSION:
        raise ConflictError(
            f"The store {place} has schema version {version}, but this program (agentlightning {VERSION}) supports "
            f"versions up to {SCHEMA_VERSION}. Nothing was changed. Use a newer version of agentlightning, restore a "
            "backup from before the upgrade, or create a new store."
        )


@cache  # made at its first use, since a store in memory needs none
def record_type() -> TypeAdapter[Record]:
    """Return the type adapter that writes and reads a record."""
    return TypeAdapter(Record)


def read_record(body: bytes | str, rollout_id: str) -> Record:
    """Return the record in the row of a rollout.

    Raises:
        DamagedRecordError: the record cannot be read.
    """
    try:
        return record_type().validate_json(body)
    except ValidationError as error:
        raise damaged("rollout", rollout_id, error) from None


def indexed(record: Record) -> tuple[str | float | None, ...]:
    """Return the values of `INDEXED`. A rollout that has not ended has the end infinity, which is last in an index."""
    rollout = record.rollout
    return (
        *(rollout.status, rollout.start_time, math.inf if rollout.end_time is None else rollout.end_time),
        *(rollout.priority, record.available_at, record.deadline, record.holder),
        *(len(record.attempts), record.span_count, record.span_bytes),
    )


def readable_records(rows: Iterable[Sequence[Any]], set_aside: Callable[[str], None]) -> list[Record]:
    """Return the readable records of rows (body, rollout id, ...). Pass the ids of the others to `set_aside`."""
    records: list[Record] = []
    for body, rollout_id, *_ in rows:
        try:
            records.append(read_record(body, rollout_id))
        except DamagedRecordError:
            set_aside(rollout_id)
    return records


def page_of_records(records: Iterable[Record], numbers: Mapping[str, int], plan: Plan) -> Found:
    """Return the page of a plan from all matching records, in the order of their numbers."""
    by_id = {record.rollout.rollout_id: record for record in records}
    rollouts, total = page_of([record.rollout for record in by_id.values()], plan.sort_by, plan.descending, -1, 0)
    if plan.after is not None:
        (value, last), name = plan.after, plan.sort_by or ""
        at, is_behind = rank(name, value), operator.lt if plan.descending else operator.gt
        ranks = [rank(name, getattr(rollout, name, None)) for rollout in rollouts]
        rollouts = [
            rollout
            for rollout, own in zip(rollouts, ranks, strict=True)
            if is_behind(own, at) or (own == at and numbers[rollout.rollout_id] > last)
        ]
    page = rollouts[plan.offset :] if plan.limit == -1 else rollouts[plan.offset : plan.offset + plan.limit]
    after = None
    if page and len(rollouts) > plan.offset + len(page):
        value = None if plan.sort_by is None else getattr(page[-1], plan.sort_by)
        after = (value, numbers[page[-1].rollout_id])
    return Found([by_id[rollout.rollout_id] for rollout in page], total if plan.total is None else plan.total, after)


def behind_place(plan: Plan, mark: str) -> tuple[str, list[object]]:
    """Return the SQL condition for rows after the position where the page begins, and its values."""
    if plan.after is None:
        return "", []
    value, number = plan.after
    if plan.sort_by is None:
        return f" AND number > {mark}", [number]
    value, than = math.inf if value is None else value, "<" if plan.descending else ">"
    test = f" AND {plan.sort_by} {than}= {mark} AND ({plan.sort_by} {than} {mark} OR number > {mark})"
    return test, [value, value, number]


def last_place(rows: Sequence[Sequence[Any]]) -> Place:
    """Return the position of the last of these rows. Their last columns are the sort value and the number."""
    *_, value, number = rows[-1]
    return None if value == math.inf else value, number


def read_row(kind: Kind, key: str, body: bytes | str) -> Row:
    """Return another row, decoded.

    Raises:
        DamagedRecordError: it cannot be read.
    """
    try:
        return row_type(kind).validate_json(body)
    except ValidationError as error:
        raise damaged(kind, key, error) from None


def read_row_or_none(kind: Kind, key: str, body: bytes | str) -> Row | None:
    """Return another row, decoded; None for a worker's row that cannot be read.

    Raises:
        DamagedRecordError: a row of another kind cannot be read.
    """
    try:
        return read_row(kind, key, body)
    except DamagedRecordError:
        if kind == "worker":
            return None
        raise


def readable_rows(kind: Kind, rows: Iterable[tuple[str, bytes | str]]) -> list[tuple[str, Row]]:
    """Return the keys and rows of a kind that can be read."""
    readable: list[tuple[str, Row]] = []
    for key, body in rows:
        with contextlib.suppress(DamagedRecordError):
            readable.append((key, read_row(kind, key, body)))
    return readable


def damaged(what: str, key: str, error: ValidationError | KeyError) -> DamagedRecordError:
    """Return the error for a row of the store that cannot be read, and log it the first time."""
    if isinstance(error, KeyError):
        reason = f"no field {error}"
    else:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in cast("tuple[object, ...]", first["loc"]))
        reason = f"{f'{place}: ' if place else ''}{first['msg'][:200]}"
    damage = DamagedRecordError(
        f"The store's record of {what.replace('_', ' ')} {key!r} cannot be read: {reason}. The store is damaged; the "
        "request is valid. The store continues without this record. Run 'agl store check' to list damaged records and "
        "how to remove them."
    )
    if (what, key) not in _logged and len(_logged) < _MOST_LOGGED:
        _logged.add((what, key))
        logger.error("%s", damage)
    return damage
