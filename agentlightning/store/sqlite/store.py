"""The store in one SQLite file, durable and without a server. Several processes can use the file at the same time.

One thread writes, with many scripts in one transaction. Reads use a second connection (write-ahead log). With
`synchronous="FULL"`, an acknowledged change survives a power failure.
Source of the guarantees of SQLite: https://www.sqlite.org/wal.html and https://www.sqlite.org/pragma.html#pragma_synchronous
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from typing_extensions import override

from agentlightning.base.private_files import make_private, tighten
from agentlightning.errors import AgentLightningError, BadRequestError, StoreWriteError
from agentlightning.store.engine import EngineStore
from agentlightning.store.rules.tx import Notes, Tx
from agentlightning.store.sql.backend import Job, Jobs, Process, Session, SqlBackend, Worker, run_scripts
from agentlightning.store.sql.writes import Seen
from agentlightning.store.sqlite.presence import Presence
from agentlightning.store.sqlite.schema import check_version, prepare
from agentlightning.store.sqlite.tx import SQLiteLink, SQLiteTx
from agentlightning.types import RetentionPolicy

if TYPE_CHECKING:
    from agentlightning.utils.metrics import MetricsBackend

R = TypeVar("R")
_BATCH = 256
_BUSY_MS = 10_000
_CACHE_KIB, _CHECKPOINT_PAGES = 32_768, 4_000
_COARSE_SECONDS = 2.5


class SQLiteLightningStore(EngineStore):
    """A durable store in the file `path`, which is created if it does not exist.

    `synchronous="NORMAL"` is faster, but can lose the last changes if the machine (not the process) crashes.
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
        engine: dict[str, Any] = {
            "scan_debounce_seconds": scan_debounce_seconds,
            "lease_seconds": lease_seconds,
            "retention": retention,
        }
        self._settings: dict[str, Any] = {"synchronous": synchronous, **engine}
        super().__init__(SQLiteBackend(self.path, synchronous), tracker=tracker, **engine)

    @override
    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the arguments, so that a copy in another process opens the same file."""
        return partial(SQLiteLightningStore, self.path, **self._settings), ()


class SQLiteBackend(SqlBackend["_Process"]):
    """Run scripts in one file: the thread of the caller reads, and another thread writes."""

    def __init__(self, path: str, synchronous: Literal["FULL", "NORMAL"]) -> None:
        super().__init__()
        self._path = path
        self._synchronous = synchronous
        self._seen_version: int | None = None
        self._seen_written = 0.0
        prepare(self._process().reader, path)

    @override
    def begin_process(self) -> _Process:
        parent = next(iter(self._processes.values()), None)
        if parent is not None:
            parent.presence.check_database()
        here = _Process(self._path, self._synchronous)
        if parent is not None:
            here.presence.database = parent.presence.database
        return here

    @override
    def execute(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        return super().execute(script) if write else self._process().read(script)

    @override
    async def run(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        return await super().run(script) if write else self._process().read(script)

    def now(self) -> float:
        return time.time()

    def set_clock(self) -> None:
        """Do nothing, because the file is on this machine."""

    def await_change(self, timeout: float) -> bool:
        here = self._process()
        if here.open.acquire(timeout=timeout):
            here.open.release()
        # The file system knows, at a fraction of what the database takes to say, whether this process or another may
        # have written to the log since the last look. Some keep times in steps of 2 seconds.
        with contextlib.suppress(FileNotFoundError):
            written = os.stat(here.presence.log).st_mtime
            before, self._seen_written = self._seen_written, written
            if written == before and time.time() - written >= _COARSE_SECONDS:
                return False
        with here.writing:  # the connection that writes does not count its own commits as changes
            version = here.writer().execute("PRAGMA data_version").fetchone()[0]
        previous, self._seen_version = self._seen_version, version
        return version != previous


class _Process(Process):
    """The connections, the writing thread and the locks of one process."""

    def __init__(self, path: str, synchronous: str) -> None:
        super().__init__(path)
        self._path = path
        self._synchronous = synchronous
        self.reader = self._connect()
        self.presence = Presence(path)
        self._reading = threading.Lock()
        self._writer: sqlite3.Connection | None = None
        self.writing = threading.Lock()
        self.open = threading.Lock()
        """Held until `close`, so that a thread can wait for it. An event would take twice the processor time."""
        self.open.acquire()

    def _connect(self) -> sqlite3.Connection:
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
                "Expected the path of a new or existing store file in a writable folder."
            ) from error
        db.execute(f"PRAGMA synchronous = {self._synchronous}")
        db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        db.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        return db

    def writer(self) -> sqlite3.Connection:
        """Return the writing connection. The caller must hold `writing`."""
        self.check_open()
        if self._writer is None:
            self.presence.check_database()  # SQLite would make a new one
            self._writer = self._connect()
        return self._writer

    def read(self, script: Callable[[Tx], R]) -> tuple[R, Notes]:
        """Run a read-only script on a snapshot."""
        with self._reading:
            self.check_open()
            try:
                self.reader.execute("BEGIN")
                try:
                    tx = SQLiteTx(SQLiteLink(self.reader))
                    return script(tx), tx.notes
                finally:
                    self.reader.execute("ROLLBACK")
            except sqlite3.Error as error:
                raise StoreWriteError(f"The SQLite store {self._path!r} could not be read: {error}") from error

    @override
    def start(self, jobs: Jobs, write: bool) -> list[Worker]:
        with self.writing:
            session = _Writing(self._path, self.writer(), self.writing, self.presence)
        return [Worker("agl-sqlite-writer", session, jobs, _BATCH)]

    @override
    def close(self) -> None:
        if self.open.locked():
            self.open.release()
        super().close()
        with self.writing:  # somebody may be in the middle of a look
            if self._writer is not None:
                self._writer.close()
        with self._reading:
            self.reader.close()


class _Writing(Session):
    """Run writing scripts on a connection that belongs to the process."""

    def __init__(self, path: str, db: sqlite3.Connection, lock: threading.Lock, presence: Presence) -> None:
        self._path = path
        self._db = db
        self._lock = lock
        self._presence = presence

    @override
    def transact(self, jobs: list[Job]) -> list[Job]:
        with self._lock:  # nobody is answered before the scripts are on disk, in the file of this name
            try:
                self._presence.begin(self._db)
                link = SQLiteLink(self._db)
                link.send("BEGIN IMMEDIATE")
                check_version(self._db, self._path)
                seen = Seen()
                run_scripts(jobs, lambda _: SQLiteTx(link, seen), sqlite3.Error)
                link.send("COMMIT")
                self._presence.check()
            except (sqlite3.Error, AgentLightningError) as error:
                unwritten = StoreWriteError(
                    f"The SQLite store {self._path!r} could not write: {error}. "
                    "Nothing of this call was stored. Fix the cause and retry."
                )
                for job in jobs:
                    job.error = unwritten if isinstance(error, sqlite3.Error) else error
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
        return []
