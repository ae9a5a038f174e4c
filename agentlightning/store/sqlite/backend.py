"""Runs scripts in one SQLite file, which several processes may use at once.

One writer thread drains waiting scripts into one transaction (group commit), each under a savepoint of its own; reads
use a second connection (write-ahead log). With `synchronous="FULL"` an acknowledged change survives a loss of power.
Source of the file format's guarantees: https://www.sqlite.org/wal.html and https://www.sqlite.org/pragma.html#pragma_synchronous
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Literal, TypeVar

from agentlightning.base.private_files import make_private, tighten
from agentlightning.errors import AgentLightningError, BadRequestError, BusyError, ConflictError, StoreWriteError
from agentlightning.store.rules.tx import Notes, Tx
from agentlightning.store.sqlite.jobs import Job, run_batch, settle
from agentlightning.store.sqlite.presence import Presence
from agentlightning.store.sqlite.schema import prepare
from agentlightning.store.sqlite.tx import SQLiteLink, SQLiteTx

R = TypeVar("R")
_BATCH, _MAX_WAITING = 256, 10_000
_BUSY_MS = 10_000
_CACHE_KIB, _CHECKPOINT_PAGES = 32_768, 4_000
_COARSE_SECONDS = 2.5


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
        self._here = _Process(self._open(), path)
        self._inherited: list[_Process] = []
        self._seen_version: int | None = None
        self._seen_written = 0.0
        prepare(self._here.reader, path)

    def execute(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        if not write:
            return self._read(script)
        future: concurrent.futures.Future[tuple[R, Notes]] = concurrent.futures.Future()
        self._submit(Job(script, future, None))
        return future.result()

    async def run(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        if not write:
            return self._read(script)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[R, Notes]] = loop.create_future()
        self._submit(Job(script, future, loop))
        return await future

    def now(self) -> float:
        return time.time()

    def set_clock(self) -> None:
        """Do nothing: the file is on this machine."""

    def await_change(self, timeout: float) -> bool:
        here = self._process()
        if here.open.acquire(timeout=timeout):
            here.open.release()
        # The file system knows, at a fraction of what the database takes to say, whether this process or another may
        # have written to the log since the last look. Some keep times in steps of 2 seconds.
        with contextlib.suppress(FileNotFoundError):
            written = os.stat(self._here.presence.log).st_mtime
            before, self._seen_written = self._seen_written, written
            if written == before and time.time() - written >= _COARSE_SECONDS:
                return False
        with here.writing:  # the connection that writes does not count its own commits as changes
            version = self._writer(here).execute("PRAGMA data_version").fetchone()[0]
        previous, self._seen_version = self._seen_version, version
        return version != previous

    def close(self) -> None:
        here = self._process()
        with here.starting:
            if self._closed:
                return
            self._closed = True
            here.open.release()
            here.jobs.put(None)
        if here.thread is not None:
            here.thread.join()
        with here.writing:  # somebody may be in the middle of a look
            if here.writer is not None:
                here.writer.close()
        with here.reading:
            here.reader.close()

    def _process(self) -> _Process:
        """Return the connections, threads and locks of this process."""
        if self._here.pid != os.getpid():
            parent = self._here
            parent.presence.check_database()
            self._inherited.append(parent)  # closing the parent's connection here would release its locks
            self._here = _Process(self._open(), self._path)
            self._here.presence.database = parent.presence.database
        return self._here

    def _open(self) -> sqlite3.Connection:
        with contextlib.suppress(OSError):  # a failure is reported when the file is opened
            make_private(self._path)
            for beside in ("-wal", "-shm", "-journal"):  # SQLite gives them the mode of the database as it makes them
                tighten(self._path + beside)
        try:
            db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=_BUSY_MS / 1000)
            db.execute("PRAGMA journal_mode = WAL")
        except sqlite3.Error as error:
            raise BadRequestError(
                f"Cannot open the SQLite store {self._path!r}: {error}. "
                "Expected a path to a new or existing store file in a folder that can be written."
            ) from error
        db.execute(f"PRAGMA synchronous = {self._synchronous}")
        db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        db.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        return db

    def _read(self, script: Callable[[Tx], R]) -> tuple[R, Notes]:
        here = self._process()
        with here.reading:
            self._check_open()
            try:
                here.reader.execute("BEGIN")
                try:
                    tx = SQLiteTx(SQLiteLink(here.reader))
                    return script(tx), tx.notes
                finally:
                    here.reader.execute("ROLLBACK")
            except sqlite3.Error as error:
                raise StoreWriteError(f"The SQLite store {self._path!r} could not be read: {error}") from error

    def _submit(self, job: Job) -> None:
        here = self._process()
        with here.starting:
            self._check_open()
            if here.thread is None:
                with here.writing:
                    self._writer(here)
                here.thread = threading.Thread(
                    target=self._write_all, args=(here,), name="agl-sqlite-writer", daemon=True
                )
                here.thread.start()
            if here.jobs.qsize() >= _MAX_WAITING:
                raise BusyError(
                    f"{_MAX_WAITING} changes wait for the SQLite store {self._path!r} already; try again later"
                )
            here.jobs.put(job)

    def _writer(self, here: _Process) -> sqlite3.Connection:
        """Return the writing connection; the caller holds `here.writing`."""
        self._check_open()
        if here.writer is None:
            here.presence.check_database()  # SQLite would make a new one
            here.writer = self._open()
        return here.writer

    def _check_open(self) -> None:
        if self._closed:
            raise ConflictError(f"The store {self._path!r} is closed")

    def _write_all(self, here: _Process) -> None:
        assert here.writer is not None
        while (job := here.jobs.get()) is not None:
            batch = [job]
            while len(batch) < _BATCH and not here.jobs.empty():
                following = here.jobs.get()
                if following is None:
                    here.jobs.put(None)
                    break
                batch.append(following)
            with here.writing:  # nobody is answered before the batch is on disk, in the file of this name
                try:
                    here.presence.begin(here.writer)
                    run_batch(SQLiteLink(here.writer), self._path, batch)
                    here.presence.check()
                except (sqlite3.Error, AgentLightningError) as error:
                    if here.writer.in_transaction:
                        here.writer.execute("ROLLBACK")
                    unwritten = StoreWriteError(
                        f"The SQLite store {self._path!r} could not write: {error}. "
                        "Nothing of this call was stored; try it again when the cause is gone."
                    )
                    for job in batch:
                        job.error = unwritten if isinstance(error, sqlite3.Error) else error
            settle(batch)


class _Process:
    """The connections, threads and locks of one process."""

    def __init__(self, reader: sqlite3.Connection, path: str) -> None:
        self.pid = os.getpid()
        self.reader = reader
        self.presence = Presence(path)
        self.reading = threading.Lock()
        self.writer: sqlite3.Connection | None = None
        self.writing = threading.Lock()
        self.thread: threading.Thread | None = None
        self.starting = threading.Lock()
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.open = threading.Lock()
        """Held until `close`, so that a thread can pause on it: an event would cost twice the processor time."""
        self.open.acquire()
