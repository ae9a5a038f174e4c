"""What a script of a writing transaction wrote: kept aside until it has succeeded, then sent in one go.

A write that rests on something read without a lock says so in its condition: it then changes no row if another
transaction was faster, and the number of rows tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from agentlightning.store.postgres import summaries
from agentlightning.store.postgres.link import Cursor, Link
from agentlightning.store.rules.durable import INDEXED, indexed, record_type
from agentlightning.store.rules.tx import Kind, Record, Row, row_type

RowKey = tuple[Kind, str]
SpanKey = tuple[str, str, str]
"""(rollout id, attempt id, span id)."""
_COLUMNS = (*INDEXED, "attempt_id", "body")
"""What changes of a record's row, beside its change."""
_RECORD_AT = "partition = %s AND rollout_id = %s"
_UPDATE = (
    f"UPDATE agl_rollouts SET {', '.join(f'{name} = %s' for name in _COLUMNS)}, change = pg_current_xact_id()"
    f" WHERE {_RECORD_AT}"
)
_INSERT = (
    f"INSERT INTO agl_rollouts ({', '.join(_COLUMNS)}, partition, rollout_id, run_id, change)"
    f" VALUES ({', '.join(['%s'] * (len(_COLUMNS) + 3))}, pg_current_xact_id()) ON CONFLICT (partition, rollout_id) DO "
)
_INSERT_NEW = f"{_INSERT} NOTHING"
_REPLACE = f"{_INSERT} UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in (*_COLUMNS, 'change'))}"

_ROW_AT = "partition = %s AND kind = %s AND key = %s"


class _Put(NamedTuple):
    """The statements that write one row; of those of a run the change is noted, too."""

    new: str
    any: str
    version: str

    @classmethod
    def with_change(cls, change: str) -> Self:
        also = ", change" if change else ""
        put = (
            f"INSERT INTO agl_rows (partition, kind, key, version, body{also}) VALUES (%s, %s, %s, 1, %s"
            f"{change and f', {change}'}) ON CONFLICT (partition, kind, key) DO "
        )
        changed = change and f", change = {change}"
        return cls(
            f"{put} NOTHING",
            f"{put} UPDATE SET version = agl_rows.version + 1, body = excluded.body{changed}",
            f"UPDATE agl_rows SET version = version + 1, body = %s{changed} WHERE {_ROW_AT} AND version = %s",
        )


_PUT_ROW, _PUT_RUN = _Put.with_change(""), _Put.with_change("pg_current_xact_id()")
_DROP = f"DELETE FROM agl_rows WHERE {_ROW_AT}"
_DROP_VERSION = f"{_DROP} AND version = %s"

_ADD_SPANS = (
    "INSERT INTO agl_spans (partition, rollout_id, attempt_id, span_id, body) SELECT %s, * FROM"
    " unnest(%s::text[], %s::text[], %s::text[], %b::bytea[]) ON CONFLICT DO NOTHING"
)


@dataclass(slots=True)
class Seen:
    """What the scripts of one writing transaction have read and written so far, None being "not there".

    What is there is locked, or checked when it is written. It is no older than any script of the transaction: all of
    them were handed in before any of it was read.
    """

    records: dict[str, Record | None] = field(default_factory=dict[str, "Record | None"])
    rows: dict[RowKey, tuple[int, Row] | None] = field(default_factory=dict[RowKey, "tuple[int, Row] | None"])
    """With their versions."""
    locked: bool = False
    """The transaction holds locks."""

    def forget(self) -> None:
        """Forget what was read and locked: locks were given up, writes undone."""
        self.records.clear()
        self.rows.clear()


class Writes:
    """The writes of one script, None being a removal."""

    def __init__(self, link: Link, partition: str, seen: Seen) -> None:
        self.records: dict[str, Record | None] = {}
        self.spans: dict[SpanKey, bytes] = {}
        self.rows: dict[RowKey, Row | None] = {}
        self._link = link
        self._partition = partition
        self._seen = seen
        self._sent: list[tuple[Cursor, int]] = []

    def __bool__(self) -> bool:
        return bool(self.records or self.spans or self.rows)

    @property
    def lost_a_race(self) -> bool:
        """True if another transaction changed what these rest on: the transaction must not be committed. Known after
        the link's next `sync`."""
        return any(cursor.rowcount != expected for cursor, expected in self._sent)

    def send(self) -> None:
        """Send everything without waiting; nothing is left."""
        self._seen.locked = self._seen.locked or bool(self)
        for rollout_id, record in self.records.items():
            if record is None:
                for table in ("agl_spans", *summaries.TABLES, "agl_rollouts"):
                    self._link.send(f"DELETE FROM {table} WHERE {_RECORD_AT}", (self._partition, rollout_id))
            else:
                run_id = record.rollout.run_id
                values = (
                    *indexed(record),
                    record.attempts[-1].attempt_id if record.attempts else None,
                    record_type().dump_json(record),
                    self._partition,
                    rollout_id,
                )
                if rollout_id not in self._seen.records:
                    self._send(_REPLACE, (*values, run_id))
                elif self._seen.records[rollout_id] is None:
                    self._send(_INSERT_NEW, (*values, run_id))
                else:
                    self._send(_UPDATE, values)
                self._send_summary(record, self._seen.records.get(rollout_id))
            self._seen.records[rollout_id] = record
        if self.spans:
            columns = [list(column) for column in zip(*self.spans, strict=True)]
            self._send(_ADD_SPANS, (self._partition, *columns, list(self.spans.values())), expected=len(self.spans))
        for (kind, key), row in self.rows.items():
            self._send_row(kind, key, row)
        self.records, self.spans, self.rows = {}, {}, {}

    def _send_summary(self, record: Record, before: Record | None) -> None:
        if before is None or summaries.row_of(before) != summaries.row_of(record):
            self._link.send(summaries.PUT, summaries.put_values(self._partition, record))
        if before is None or before.rollout.input is not record.rollout.input:
            self._link.send(summaries.PUT_INPUT, summaries.input_values(self._partition, record))

    def _send_row(self, kind: Kind, key: str, row: Row | None) -> None:
        at = (self._partition, kind, key)
        known = (kind, key) in self._seen.rows
        seen = self._seen.rows.get((kind, key))
        version, put = 0, _PUT_RUN if kind == "run" else _PUT_ROW
        if row is None:
            if seen is not None:
                self._send(_DROP_VERSION, (*at, seen[0]))
            elif not known:
                self._link.send(_DROP, at)
        elif seen is not None:
            version = seen[0] + 1
            self._send(put.version, (row_type(kind).dump_json(row), *at, seen[0]))
        elif known:
            version = 1
            self._send(put.new, (*at, row_type(kind).dump_json(row)))
        else:
            self._send(put.any, (*at, row_type(kind).dump_json(row)))
            return  # of a version that is not known
        self._seen.rows[kind, key] = None if row is None else (version, row)

    def _send(self, statement: str, values: Sequence[object], expected: int = 1) -> None:
        self._sent.append((self._link.send(statement, values), expected))
