"""The store in one SQLite file: nothing to install, nothing lost. Several processes may use the file at once.

One writer thread drains waiting scripts into one transaction (group commit), each under a savepoint of its own; reads
use a second connection (write-ahead log). With `synchronous="FULL"` an acknowledged change survives a loss of power.
Source of the file format's guarantees: https://www.sqlite.org/wal.html and https://www.sqlite.org/pragma.html#pragma_synchronous
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import queue
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from typing_extensions import override

from agentlightning.errors import BadRequestError, BusyError, ConflictError, StoreWriteError
from agentlightning.store.backend import Notes, Tx
from agentlightning.store.engine import EngineStore
from agentlightning.store.sqlite_schema import prepare
from agentlightning.store.sqlite_tx import SQLiteTx
from agentlightning.types import RetentionPolicy

if TYPE_CHECKING:
    from agentlightning.utils.metrics import MetricsBackend

R = TypeVar("R")
_BATCH = 256
_BUSY_MS = 10_000
_MAX_WAITING = 10_000
_Future = concurrent.futures.Future[Any]
_Job = tuple["Callable[[Tx], Any] | None", "concurrent.futures.Future[Any]"]
"""A script; None asks for the version of the data, which other connections' commits change."""


class SQLiteBackend:
    """One writer thread and one reading connection per process. Threads start with the first write.

    A process that inherits the backend over a fork makes its own, and leaves those of its parent alone.
    """

    shared = True
    persistent = True

    def __init__(self, path: str, synchronous: Literal["FULL", "NORMAL"]) -> None:
        self._path = path
        self._synchronous = synchronous
        self._closed = False
        self._here = _Process(self._open())
        self._inherited: list[_Process] = []
        self._seen_version: int | None = None
        prepare(self._here.reader, path)

    def execute(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        return self._submit(script).result() if write else self._read(script)

    async def run(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        if not write:
            return self._read(script)
        return await asyncio.shield(asyncio.wrap_future(self._submit(script)))

    def await_change(self, timeout: float) -> bool:
        self._process().stop.wait(timeout)
        version = self._submit(None).result()
        before, self._seen_version = self._seen_version, version
        return version != before

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        here = self._process()
        here.stop.set()
        here.jobs.put(None)
        if here.writer is not None:
            here.writer.join()
        here.reader.close()

    def _process(self) -> _Process:
        """Return what belongs to this process."""
        if self._here.pid != os.getpid():
            self._inherited.append(self._here)  # closing the parent's connection here would release its locks
            self._here = _Process(self._open())
        return self._here

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
        self._check_open()
        here = self._process()
        with here.reading:
            try:
                here.reader.execute("BEGIN")
                try:
                    tx = SQLiteTx(here.reader)
                    return script(tx), tx.notes
                finally:
                    here.reader.execute("ROLLBACK")
            except sqlite3.Error as error:
                raise StoreWriteError(f"The SQLite store {self._path!r} could not be read: {error}") from error

    def _submit(self, script: Callable[[Tx], Any] | None) -> _Future:
        self._check_open()
        here = self._process()
        future = _Future()
        with here.starting:
            if here.writer is None:
                here.writer = threading.Thread(
                    target=self._write_all, args=(here,), name="agl-sqlite-writer", daemon=True
                )
                here.writer.start()
        if here.jobs.qsize() >= _MAX_WAITING:
            raise BusyError(f"{_MAX_WAITING} changes wait for the SQLite store {self._path!r} already; try again later")
        here.jobs.put((script, future))
        return future

    def _check_open(self) -> None:
        if self._closed:
            raise ConflictError(f"The store {self._path!r} is closed")

    def _write_all(self, here: _Process) -> None:
        db = self._open()
        try:
            while (job := here.jobs.get()) is not None:
                batch = [job]
                while len(batch) < _BATCH and not here.jobs.empty():
                    following = here.jobs.get()
                    if following is None:
                        here.jobs.put(None)
                        break
                    batch.append(following)
                for script, future in batch:
                    if script is None:
                        _answer(future, lambda: db.execute("PRAGMA data_version").fetchone()[0])
                writes = [(script, future) for script, future in batch if script is not None]
                if writes:
                    self._commit(db, writes)
        finally:
            db.close()

    def _commit(self, db: sqlite3.Connection, batch: list[tuple[Callable[[Tx], Any], _Future]]) -> None:
        """Run a batch in one transaction; nobody is answered before it is on disk."""
        answers: list[tuple[_Future, Any, BaseException | None]] = []
        try:
            db.execute("BEGIN IMMEDIATE")
            for script, future in batch:
                answers.append((future, *_under_savepoint(db, script)))
            db.execute("COMMIT")
        except sqlite3.Error as error:
            if db.in_transaction:
                db.execute("ROLLBACK")
            failure = StoreWriteError(
                f"The SQLite store {self._path!r} could not write: {error}. "
                "Nothing of this call was stored; try it again when the cause is gone."
            )
            answers = [(future, None, failure) for _, future in batch]
        for future, result, error in answers:
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)


class _Process:
    """The connections, threads and locks of one process."""

    def __init__(self, reader: sqlite3.Connection) -> None:
        self.pid = os.getpid()
        self.reader = reader
        self.reading = threading.Lock()
        self.starting = threading.Lock()
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.writer: threading.Thread | None = None
        self.stop = threading.Event()


def _answer(future: _Future, ask: Callable[[], Any]) -> None:
    try:
        future.set_result(ask())
    except sqlite3.Error as error:
        future.set_exception(error)


def _under_savepoint(db: sqlite3.Connection, script: Callable[[Tx], Any]) -> tuple[Any, BaseException | None]:
    """Run one script; return its result, or what it raised, of which no trace is left."""
    db.execute("SAVEPOINT script")
    tx = SQLiteTx(db)
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
        retention: RetentionPolicy | None = None,
        tracker: MetricsBackend | None = None,
    ) -> None:
        if synchronous not in ("FULL", "NORMAL"):
            raise BadRequestError(f"synchronous must be 'FULL' or 'NORMAL'; got {synchronous!r}")
        self.path = str(path)
        self._settings: dict[str, Any] = {
            "synchronous": synchronous,
            "scan_debounce_seconds": scan_debounce_seconds,
            "lease_seconds": lease_seconds,
            "retention": retention,
        }
        super().__init__(
            SQLiteBackend(self.path, synchronous),
            scan_debounce_seconds=scan_debounce_seconds,
            lease_seconds=lease_seconds,
            retention=retention,
            tracker=tracker,
        )

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process opens the same file."""
        return _reopen, (self.path, self._settings)


def _reopen(path: str, settings: dict[str, Any]) -> SQLiteLightningStore:
    return SQLiteLightningStore(path, **settings)


__all__ = ["SQLiteBackend", "SQLiteLightningStore"]
