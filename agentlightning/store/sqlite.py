"""The store in one SQLite file: nothing to install, nothing lost. Several processes may use the file at once.

One writer thread drains waiting scripts into one transaction (group commit), each under a savepoint of its own; reads
use a second connection (write-ahead log). With `synchronous="FULL"` an acknowledged change survives a loss of power.
Source of the file format's guarantees: https://www.sqlite.org/wal.html and https://www.sqlite.org/pragma.html#pragma_synchronous
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter
from typing_extensions import override

from agentlightning.errors import BadRequestError, ConflictError
from agentlightning.store.backend import ROW_TYPES, Counts, Kind, Notes, Record, Row, Tx
from agentlightning.store.engine import EngineStore
from agentlightning.store.query import Plan, page_of
from agentlightning.store.reaper import forget
from agentlightning.types import Span

R = TypeVar("R")
SCHEMA_VERSION = 1
_BATCH = 256
_BUSY_MS = 10_000
_RECORD: TypeAdapter[Record] = TypeAdapter(Record)
_encode = Span.__pydantic_serializer__.to_json
_decode = Span.__pydantic_validator__.validate_json

_SCHEMA = """
CREATE TABLE rollouts (
    number INTEGER PRIMARY KEY, rollout_id TEXT NOT NULL UNIQUE, run_id TEXT, status TEXT NOT NULL,
    start_time REAL NOT NULL, queued_at REAL, deadline REAL,
    worker_id TEXT, attempts INTEGER NOT NULL, body BLOB NOT NULL
);
CREATE INDEX rollouts_queue ON rollouts (run_id, queued_at, number) WHERE queued_at IS NOT NULL;
CREATE INDEX rollouts_deadline ON rollouts (deadline) WHERE deadline IS NOT NULL;
CREATE INDEX rollouts_worker ON rollouts (worker_id, number) WHERE worker_id IS NOT NULL;
CREATE INDEX rollouts_status ON rollouts (status, start_time);
CREATE TABLE spans (
    number INTEGER PRIMARY KEY, rollout_id TEXT NOT NULL, attempt_id TEXT NOT NULL, span_id TEXT NOT NULL,
    body BLOB NOT NULL, UNIQUE (rollout_id, attempt_id, span_id)
);
CREATE TABLE rows (
    number INTEGER PRIMARY KEY, kind TEXT NOT NULL, key TEXT NOT NULL, body BLOB NOT NULL, UNIQUE (kind, key)
);
"""


class _SQLiteTx:
    """The primitives over one connection, inside a transaction that the backend opened."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.notes = Notes()
        self._db = connection

    def load(self, rollout_id: str) -> Record | None:
        row = self._db.execute("SELECT body FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
        return None if row is None else _RECORD.validate_json(row[0])

    def save(self, record: Record) -> None:
        rollout = record.rollout
        self._db.execute(
            "INSERT INTO rollouts (rollout_id, run_id, status, start_time, queued_at, deadline, worker_id,"
            " attempts, body) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (rollout_id) DO UPDATE SET"
            " status = excluded.status, start_time = excluded.start_time, queued_at = excluded.queued_at,"
            " deadline = excluded.deadline, worker_id = excluded.worker_id,"
            " attempts = excluded.attempts, body = excluded.body",
            (
                rollout.rollout_id,
                rollout.run_id,
                rollout.status,
                rollout.start_time,
                record.queued_at,
                record.deadline,
                record.holder,
                len(record.attempts),
                _RECORD.dump_json(record),
            ),
        )

    def claim(self, run_id: str | None) -> Record | None:
        row = self._db.execute(
            "SELECT body FROM rollouts WHERE queued_at IS NOT NULL AND run_id IS ? ORDER BY queued_at, number LIMIT 1",
            (run_id,),
        ).fetchone()
        return None if row is None else _RECORD.validate_json(row[0])

    def find(self, plan: Plan) -> tuple[list[Record], int]:
        where, values = _where(plan)
        if plan.sort_by in (None, "start_time"):
            return self._find_page(plan, where, values)
        rows = self._db.execute(f"SELECT body FROM rollouts{where} ORDER BY number", values)
        records = {r.rollout.rollout_id: r for r in (_RECORD.validate_json(row[0]) for row in rows)}
        rollouts = [record.rollout for record in records.values()]
        page, total = page_of(rollouts, plan.sort_by, plan.descending, plan.limit, plan.offset)
        return [records[rollout.rollout_id] for rollout in page], total

    def _find_page(self, plan: Plan, where: str, values: list[Any]) -> tuple[list[Record], int]:
        order = "number" if plan.sort_by is None else f"start_time {'DESC' if plan.descending else 'ASC'}, number"
        total = self._db.execute(f"SELECT count(*) FROM rollouts{where}", values).fetchone()[0]
        rows = self._db.execute(
            f"SELECT body FROM rollouts{where} ORDER BY {order} LIMIT ? OFFSET ?", [*values, plan.limit, plan.offset]
        )
        return [_RECORD.validate_json(row[0]) for row in rows], total

    def due(self, now: float, limit: int) -> list[Record]:
        rows = self._db.execute(
            "SELECT body FROM rollouts WHERE deadline IS NOT NULL AND deadline < ? ORDER BY deadline LIMIT ?",
            (now, limit),
        )
        return [_RECORD.validate_json(row[0]) for row in rows]

    def held(self, worker_id: str, limit: int) -> list[tuple[str, str]]:
        rows = self._db.execute(
            "SELECT rollout_id, body FROM rollouts WHERE worker_id = ? ORDER BY number DESC LIMIT ?", (worker_id, limit)
        )
        return [(rollout_id, _RECORD.validate_json(body).attempts[-1].attempt_id) for rollout_id, body in rows]

    def add_spans(self, spans: Sequence[Span]) -> list[bool]:
        statement = "INSERT OR IGNORE INTO spans (rollout_id, attempt_id, span_id, body) VALUES (?, ?, ?, ?)"
        return [
            self._db.execute(statement, (s.rollout_id, s.attempt_id, s.span_id, _encode(s))).rowcount == 1
            for s in spans
        ]

    def spans(self, rollout_id: str, attempt_id: str | None) -> list[Span]:
        where, values = "rollout_id = ?", [rollout_id]
        if attempt_id is not None:
            where, values = where + " AND attempt_id = ?", [rollout_id, attempt_id]
        rows = self._db.execute(f"SELECT body FROM spans WHERE {where} ORDER BY number", values)
        return [_decode(row[0]) for row in rows]

    def get(self, kind: Kind, key: str) -> Row | None:
        row = self._db.execute("SELECT body FROM rows WHERE kind = ? AND key = ?", (kind, key)).fetchone()
        return None if row is None else ROW_TYPES[kind].validate_json(row[0])

    def put(self, kind: Kind, key: str, row: Row) -> None:
        self._db.execute(
            "INSERT INTO rows (kind, key, body) VALUES (?, ?, ?)"
            " ON CONFLICT (kind, key) DO UPDATE SET body = excluded.body",
            (kind, key, ROW_TYPES[kind].dump_json(row)),
        )

    def drop(self, kind: Kind, key: str) -> None:
        self._db.execute("DELETE FROM rows WHERE kind = ? AND key = ?", (kind, key))

    def scan(self, kind: Kind) -> list[tuple[str, Row]]:
        rows = self._db.execute("SELECT key, body FROM rows WHERE kind = ? ORDER BY number", (kind,))
        return [(key, ROW_TYPES[kind].validate_json(body)) for key, body in rows]


def _where(plan: Plan) -> tuple[str, list[Any]]:
    """Return the WHERE clause of a plan and its values."""
    tests: list[str] = []
    values: list[Any] = []
    for column, wanted in (("status", plan.status_in), ("rollout_id", plan.ids)):
        if wanted is not None:
            tests.append(f"{column} IN (SELECT value FROM json_each(?))")
            values.append(_TEXTS.dump_json(list(wanted)).decode())
    if plan.id_contains is not None:
        tests.append("instr(rollout_id, ?) > 0")
        values.append(plan.id_contains)
    clauses = ["(" + (" OR " if plan.any_of else " AND ").join(tests) + ")"] if tests else []
    if plan.run_id is not None:
        clauses.append("run_id IS ?")
        values.append(plan.run_id[0])
    return (" WHERE " + " AND ".join(clauses) if clauses else ""), values


_TEXTS: TypeAdapter[list[str]] = TypeAdapter(list[str])
_Job = tuple[Callable[[Tx], Any], "concurrent.futures.Future[Any]"]


class SQLiteBackend:
    """One writer thread and one reading connection per process. Threads start with the first use."""

    shared = True
    persistent = True

    def __init__(self, path: str, synchronous: Literal["FULL", "NORMAL"]) -> None:
        self._path = path
        self._synchronous = synchronous
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._writer: threading.Thread | None = None
        self._reader = self._open()
        self._closed = False
        _prepare(self._reader, path)

    def execute(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        return self._submit(script).result() if write else self._read(script)

    async def run(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        if not write:
            return self._read(script)
        return await asyncio.shield(asyncio.wrap_future(self._submit(script)))

    def counts(self) -> Counts:
        with self._lock:
            rollouts, attempts = self._reader.execute(
                "SELECT count(*), coalesce(sum(attempts), 0) FROM rollouts"
            ).fetchone()
            spans, size = self._reader.execute("SELECT count(*), coalesce(sum(length(body)), 0) FROM spans").fetchone()
        return Counts(rollouts, attempts, spans, size)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._jobs.put(None)
        if self._writer is not None:
            self._writer.join()
        self._reader.close()

    def _open(self) -> sqlite3.Connection:
        try:
            db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=_BUSY_MS / 1000)
            db.execute("PRAGMA journal_mode = WAL")
        except sqlite3.Error as error:
            raise BadRequestError(
                f"Cannot open the SQLite store {self._path!r}: {error}. "
                "Expected a path to a new or existing store file in a folder that can be written."
            ) from error
        db.execute(f"PRAGMA synchronous = {self._synchronous}")
        return db

    def _read(self, script: Callable[[Tx], R]) -> tuple[R, Notes]:
        with self._lock:
            self._check_open()
            self._reader.execute("BEGIN")
            try:
                tx = _SQLiteTx(self._reader)
                return script(tx), tx.notes
            finally:
                self._reader.execute("ROLLBACK")

    def _submit(self, script: Callable[[Tx], R]) -> concurrent.futures.Future[tuple[R, Notes]]:
        future: concurrent.futures.Future[tuple[R, Notes]] = concurrent.futures.Future()
        with self._lock:
            self._check_open()
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_all, name="agl-sqlite-writer", daemon=True)
                self._writer.start()
            self._jobs.put((script, future))
        return future

    def _check_open(self) -> None:
        if self._closed:
            raise ConflictError(f"The store {self._path!r} is closed")

    def _write_all(self) -> None:
        db = self._open()
        try:
            while (job := self._jobs.get()) is not None:
                batch = [job]
                while len(batch) < _BATCH and not self._jobs.empty():
                    following = self._jobs.get()
                    if following is None:
                        self._jobs.put(None)
                        break
                    batch.append(following)
                self._commit(db, batch)
        finally:
            db.close()

    def _commit(self, db: sqlite3.Connection, batch: list[_Job]) -> None:
        """Run a batch in one transaction; nobody is answered before it is on disk."""
        answers: list[tuple[concurrent.futures.Future[Any], Any, BaseException | None]] = []
        try:
            db.execute("BEGIN IMMEDIATE")
            for script, future in batch:
                answers.append((future, *_under_savepoint(db, script)))
            db.execute("COMMIT")
        except sqlite3.Error as error:
            if db.in_transaction:
                db.execute("ROLLBACK")
            answers = [(future, None, _store_error(self._path, error)) for _, future in batch]
        for future, result, error in answers:
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)


def _under_savepoint(db: sqlite3.Connection, script: Callable[[Tx], Any]) -> tuple[Any, BaseException | None]:
    """Run one script; return its result, or what it raised, of which no trace is left."""
    db.execute("SAVEPOINT script")
    tx = _SQLiteTx(db)
    try:
        result = (script(tx), tx.notes)
    except sqlite3.Error:
        raise
    except Exception as error:  # the caller gets it; the neighbours in the batch go on
        db.execute("ROLLBACK TO script")
        db.execute("RELEASE script")
        return None, error
    db.execute("RELEASE script")
    return result, None


def _store_error(path: str, error: sqlite3.Error) -> Exception:
    return OSError(
        f"The SQLite store {path!r} could not write: {error}. Nothing of this call was stored; try it again."
    )


def _prepare(db: sqlite3.Connection, path: str) -> None:
    """Make the tables in a new file; refuse a file that a newer version wrote."""
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        raise ConflictError(
            f"The store {path!r} has schema version {version}, this program knows up to {SCHEMA_VERSION}. "
            "Open it with the newer agentlightning that wrote it."
        )
    if version == 0:
        db.execute("BEGIN IMMEDIATE")
        if db.execute("PRAGMA user_version").fetchone()[0] == 0:
            for statement in _SCHEMA.split(";"):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.execute("COMMIT")


class SQLiteLightningStore(EngineStore):
    """A durable store in the file `path`; made if it is not there.

    `synchronous="NORMAL"` is faster and may lose the last moments when the machine (not the process) dies.
    """

    def __init__(
        self,
        path: str | Path = "agl.db",
        *,
        synchronous: Literal["FULL", "NORMAL"] = "FULL",
        scan_debounce_seconds: float = 10.0,
        lease_seconds: float = 30.0,
    ) -> None:
        if synchronous not in ("FULL", "NORMAL"):
            raise BadRequestError(f"synchronous must be 'FULL' or 'NORMAL'; got {synchronous!r}")
        self.path = str(path)
        self._settings: dict[str, Any] = {
            "synchronous": synchronous,
            "scan_debounce_seconds": scan_debounce_seconds,
            "lease_seconds": lease_seconds,
        }
        super().__init__(
            SQLiteBackend(self.path, synchronous),
            scan_debounce_seconds=scan_debounce_seconds,
            lease_seconds=lease_seconds,
        )

    @override
    async def close(self) -> None:
        forget(self)
        await super().close()

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process opens the same file."""
        return _reopen, (self.path, self._settings)


def _reopen(path: str, settings: dict[str, Any]) -> SQLiteLightningStore:
    return SQLiteLightningStore(path, **settings)


__all__ = ["SQLiteBackend", "SQLiteLightningStore"]
