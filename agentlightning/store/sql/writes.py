"""The reads of a writing transaction, and the writes of a script, which are buffered until it succeeds.

If a write depends on data that was read without a lock, its condition contains that data. So it changes no row if
another transaction was faster, and the number of changed rows shows this. SQLite has no concurrent transactions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from agentlightning.store.rules.durable import indexed, record_type
from agentlightning.store.rules.tx import Kind, Record, Row, row_type
from agentlightning.store.sql import summaries
from agentlightning.store.sql.dialect import Columns
from agentlightning.store.sql.link import Link, Sent

RowKey = tuple[Kind, str]
_AT = "WHERE @here AND rollout_id = ?"
_ROW_AT = "WHERE @here AND kind = ? AND key = ?"
_DROP = f"DELETE FROM @rows {_ROW_AT}"


@dataclass(slots=True)
class Seen:
    """The data that the scripts of one writing transaction have read and written so far. None means "does not exist".

    Existing rows are locked, or checked when they are written. They are newer than all scripts of the transaction,
    because all scripts were submitted before the first read.
    """

    records: dict[str, Record | None] = field(default_factory=dict[str, "Record | None"])
    rows: dict[RowKey, tuple[int, Row] | None] = field(default_factory=dict[RowKey, "tuple[int, Row] | None"])
    """Rows and their versions."""
    locked: bool = False
    """True if the transaction holds locks."""

    def forget(self) -> None:
        """Discard the reads and locks, because the locks were released and the writes undone."""
        self.records.clear()
        self.rows.clear()


class Writes:
    """The writes of one script. None is a removal."""

    def __init__(self, link: Link, seen: Seen) -> None:
        self.records: dict[str, Record | None] = {}
        self.rows: dict[RowKey, Row | None] = {}
        self._link = link
        self._seen = seen
        self._sent: list[tuple[Sent, int]] = []

    def __bool__(self) -> bool:
        return bool(self.records or self.rows)

    @property
    def lost_a_race(self) -> bool:
        """True if another transaction changed data that these writes depend on. Then the transaction must not be
        committed. The value is valid after the next `sync` of the link."""
        return any(sent.rowcount != expected for sent, expected in self._sent)

    def send(self) -> None:
        """Send all writes without waiting, and clear them."""
        self.send_records()
        for (kind, key), row in self.rows.items():
            self._send_row(kind, key, row)
        self.rows = {}

    def send_records(self) -> None:
        """Send the records without waiting, and clear them."""
        self._seen.locked = self._seen.locked or bool(self)
        for rollout_id, record in self.records.items():
            if record is None:
                self._link.send(f"DELETE FROM @spans {_AT}", (rollout_id,))
                summaries.remove(self._link, rollout_id)
                self._link.send(f"DELETE FROM @rollouts {_AT}", (rollout_id,))
            else:
                self._send_record(rollout_id, record)
            self._seen.records[rollout_id] = record
        self.records = {}

    def _send_record(self, rollout_id: str, record: Record) -> None:
        exists, before = rollout_id in self._seen.records, self._seen.records.get(rollout_id)
        dialect, columns, body = self._link.dialect, columns_of(record), record_type().dump_json(record)
        self._count_change()
        if before is None:
            statement = _insert(dialect.columns, replace=not exists)
            values = (rollout_id, record.rollout.run_id, *columns[: len(dialect.columns)], body)
            self.checked(statement, values)
            if not exists:
                summaries.remove(self._link, rollout_id)
            summaries.insert(self._link, record)
            return
        old = columns_of(before)
        changed = [place for place in range(len(dialect.columns)) if old[place] != columns[place]]
        names = "".join(f"{dialect.columns[place]} = ?, " for place in changed)
        values = (*(columns[place] for place in changed), body, rollout_id)
        self.checked(f"UPDATE @rollouts SET change = @change, {names}body = ? {_AT}", values)
        summaries.update(self._link, before, record)

    def _send_row(self, kind: Kind, key: str, row: Row | None) -> None:
        was_read, stored = (kind, key) in self._seen.rows, self._seen.rows.get((kind, key))
        version = 0 if stored is None else stored[0]
        if row is None:
            if stored is not None:
                self.checked(f"{_DROP} AND @unchanged", (kind, key, version))
            elif not was_read:
                self._link.send(_DROP, (kind, key))
        else:
            column, own, changed = ("change, ", "@change, ", "change = @change, ") if kind == "run" else ("", "", "")
            body = row_type(kind).dump_json(row)
            if kind == "run":
                self._count_change()
            if stored is not None:
                statement = f"UPDATE @rows SET {changed}@next_version, body = ? {_ROW_AT} AND @unchanged"
                self.checked(statement, (body, kind, key, version))
            else:
                put = (
                    f"INSERT INTO @rows ({column}@partition, @version, kind, key, body)"
                    f" VALUES ({own}@own, @first_version, ?, ?, ?) ON CONFLICT (@partition, kind, key) DO "
                )
                also = "change = excluded.change, " if kind == "run" else ""
                update = f"UPDATE SET {also}@next_version, body = excluded.body"
                self.checked(put + ("NOTHING" if was_read else update), (kind, key, body))
                if not was_read:
                    return  # of a version that is not known
        self._seen.rows[kind, key] = None if row is None else (version + 1, row)

    def _count_change(self) -> None:
        if self._link.dialect.count_change:
            self._link.send(self._link.dialect.count_change)

    def checked(self, statement: str, values: Sequence[object], expected: int = 1) -> None:
        """Send a statement that changes `expected` rows unless another transaction was faster."""
        self._sent.append((self._link.send(statement, values), expected))


def columns_of(record: Record) -> Columns:
    """Return the fields of a record that its row repeats, for the longest list of `Dialect.columns`."""
    return (*indexed(record), record.attempts[-1].attempt_id if record.attempts else None)


@cache
def _insert(columns: tuple[str, ...], *, replace: bool) -> str:
    conflict = f"UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in (*columns, 'change', 'body'))}"
    return (
        f"INSERT INTO @rollouts (change, @partition, rollout_id, run_id, {', '.join(columns)}, body)"
        f" VALUES (@change, @own, {', '.join('?' * (len(columns) + 3))})"
        f" ON CONFLICT (@partition, rollout_id) DO {conflict if replace else 'NOTHING'}"
    )
