"""The store in PostgreSQL: for a fleet of processes and machines, several stores (partitions) in one database.

The isolation level is READ COMMITTED. A script locks the rows that it changes, or checks them at its end (`tx.py`). If
a row is locked or has changed, the script is run again. One writer commits many scripts in one transaction; a second
writer runs scripts that must be run alone and may have to wait. Two writers for all scripts would not be faster,
because concurrent scripts often change the same workers and would wait for each other. Readers have snapshots. Waiters
in other processes are notified of changes with NOTIFY (`listener.py`).

The server's setting `synchronous_commit` (default: on) determines when an acknowledged change is on its disk. Needs
PostgreSQL 13 or later, and connections with a session: a pooler in transaction mode is not supported. Each process has
up to five connections.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import time
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
from typing_extensions import override

from agentlightning.errors import (
    AgentLightningError,
    BadRequestError,
    BusyError,
    ConflictError,
    StoreUnreachableError,
    StoreWriteError,
)
from agentlightning.store.engine import EngineStore
from agentlightning.store.engine.clock import SharedClock
from agentlightning.store.postgres.link import Database, Link, Place, is_bad_value, passes, reason
from agentlightning.store.postgres.listener import Listener
from agentlightning.store.postgres.schema import OTHER_VERSION, prepare
from agentlightning.store.postgres.tx import LockedError, PostgresTx
from agentlightning.store.rules.durable import SCHEMA_VERSION, check_not_newer
from agentlightning.store.sql.backend import (
    Job,
    Jobs,
    LostConnectionError,
    LostRaceError,
    Process,
    Session,
    SqlBackend,
    Worker,
    run_scripts,
)
from agentlightning.store.sql.writes import Seen
from agentlightning.types import RetentionPolicy

if TYPE_CHECKING:
    from agentlightning.utils.metrics import MetricsBackend

logger = logging.getLogger(__name__)
_READERS = 2
_BATCH = 64
_PATIENCE_SECONDS = 30.0
"""Seconds for which a script is retried after lost races."""


class PostgresLightningStore(EngineStore):
    """A durable store in a PostgreSQL database. Its tables are created if they do not exist.

    `uri` is postgresql://user:password@host:5432/database. `partition` separates stores in one database: two stores
    with the same partition have the same data.

    Raises:
        BadRequestError: an argument has a wrong value.
        ConflictError: the tables have a newer version, or the user has no permission to create them.
        StoreUnreachableError: the server does not respond, or rejects the user.
    """

    def __init__(
        self,
        uri: str,
        *,
        partition: str = "default",
        scan_debounce_seconds: float = 10.0,
        lease_seconds: float = 30.0,
        retention: RetentionPolicy | None = None,
        tracker: MetricsBackend | None = None,
    ) -> None:
        self.partition = partition
        self._uri = uri
        engine: dict[str, Any] = {
            "scan_debounce_seconds": scan_debounce_seconds,
            "lease_seconds": lease_seconds,
            "retention": retention,
        }
        self._settings: dict[str, Any] = {"partition": partition, **engine}
        super().__init__(PostgresBackend(uri, partition), tracker=tracker, **engine)

    @override
    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the arguments, so that a copy opens the same partition. The pickle contains the password."""
        return partial(PostgresLightningStore, self._uri, **self._settings), ()


class PostgresBackend(SqlBackend["_Process"]):
    """Run scripts in one partition of a database."""

    def __init__(self, uri: str, partition: str) -> None:
        super().__init__()
        if not partition or "\0" in partition:
            raise BadRequestError(f"partition must be a non-empty string without null bytes; got {partition!r}")
        self._place = Place(uri)
        self._partition = partition
        self._clock = SharedClock()
        try:
            with self._place.connect() as db:
                prepare(db, repr(self._place), partition)
                self._clock.set(lambda: _server_time(db))
        except psycopg.OperationalError as error:
            raise self._place.unreachable(
                error, "Is the server running there, and are user, password and database correct?"
            ) from error
        except psycopg.Error as error:
            raise ConflictError(
                f"The tables of the store cannot be created in {self._place!r}: {reason(error)}. "
                "The user needs permission to create tables, and the server must be PostgreSQL 13 or newer."
            ) from error

    @override
    def begin_process(self) -> _Process:
        return _Process(self._place, self._partition)

    def now(self) -> float:
        return self._clock.now()

    def set_clock(self) -> None:
        try:
            with self._place.connect() as db:
                self._clock.set(lambda: _server_time(db))
        except psycopg.Error as error:
            logger.debug("cannot read the clock of the PostgreSQL server: %s", reason(error))

    def await_change(self, timeout: float) -> bool:
        return self._process().listener.await_change(timeout)


def _server_time(db: Database) -> float:
    row = db.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchone()
    return row[0] if row is not None else time.time()


class _Process(Process):
    """The threads and connections of one process. They start at their first use."""

    def __init__(self, place: Place, partition: str) -> None:
        super().__init__(place)
        self._here = (place, partition)
        channel = "agl_" + hashlib.sha1(partition.encode(), usedforsecurity=False).hexdigest()[:24]
        self._announcement = (channel, uuid.uuid4().hex)
        self.listener = Listener(place, *self._announcement)

    @override
    def start(self, jobs: Jobs, write: bool) -> list[Worker]:
        if not write:
            return [
                Worker(f"agl-postgres-reader-{n}", _Reading(*self._here, self.listener), jobs, 1)
                for n in range(_READERS)
            ]
        slow: Jobs = queue.SimpleQueue()
        return [
            Worker("agl-postgres-writer", _Writing(*self._here, self._announcement), jobs, _BATCH, slow),
            Worker("agl-postgres-slow-writer", _Writing(*self._here, self._announcement), slow, _BATCH),
        ]

    @override
    def close(self) -> None:
        super().close()
        self.listener.close()


class _Session(Session):
    """A connection that is opened again after it was lost."""

    keep_plans: bool

    def __init__(self, place: Place, partition: str) -> None:
        self._place = place
        self._partition = partition
        self._link: Link | None = None

    @override
    def transact(self, jobs: list[Job]) -> list[Job]:
        try:
            if self._link is None:
                self._link = Link(self._place, self._partition, keep_plans=self.keep_plans)
            return self._transact(self._link, jobs)
        except psycopg.Error as error:
            if not self._roll_back():
                raise LostConnectionError(partial(self._given_up, error)) from error
            if len(jobs) > 1:
                raise  # it is the error of one of them
            if passes(error):
                return self._late(jobs, f"was stopped by the server ({reason(error)})")
            if is_bad_value(error):
                text = f"The PostgreSQL store cannot store a value of this call: {reason(error)}"
                raise BadRequestError(text) from error
            raise StoreWriteError(
                f"The PostgreSQL store {self._place!r} rejected the call: {reason(error)}. "
                "Nothing of this call was stored. Fix the cause and retry."
            ) from error
        except Exception:
            self._roll_back()
            raise

    def _transact(self, link: Link, jobs: list[Job]) -> list[Job]:
        raise NotImplementedError

    def _given_up(self, error: psycopg.Error, job: Job) -> AgentLightningError:
        raise NotImplementedError

    def _late(self, jobs: list[Job], why: str) -> list[Job]:
        """Return the scripts that must be run again, alone. Scripts that have waited too long get an error."""
        for job in jobs:
            job.alone = True
            if job.waited() > _PATIENCE_SECONDS:
                text = f"The call {why} for {job.waited():.0f} s in {self._place!r}. Nothing of it was stored; retry"
                job.error = BusyError(text)
        return [job for job in jobs if not isinstance(job.error, BusyError)]

    def _roll_back(self) -> bool:
        """Leave the transaction; return False if there is no connection or it was closed."""
        if self._link is not None and self._link.roll_back():
            return True
        self.close()
        return False

    @override
    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


class _Reading(_Session):
    """Run read-only scripts, each on a separate snapshot."""

    keep_plans = False

    def __init__(self, place: Place, partition: str, listener: Listener) -> None:
        super().__init__(place, partition)
        self._listener = listener

    @override
    def run(self, jobs: list[Job]) -> list[Job]:
        again = super().run(jobs)
        if self._link is not None:  # release the snapshot; the caller has the result already
            try:
                self._link.send("COMMIT")
                self._link.sync()
            except psycopg.Error:
                self.close()
        return again

    @override
    def _transact(self, link: Link, jobs: list[Job]) -> list[Job]:
        link.begin(" ISOLATION LEVEL REPEATABLE READ READ ONLY")
        for _, tx in run_scripts(jobs, lambda _: PostgresTx(link), psycopg.Error):
            if tx.held_back:
                self._listener.look_again()
        return []

    @override
    def _given_up(self, error: psycopg.Error, job: Job) -> StoreUnreachableError:
        return self._place.unreachable(error, f"Tried for {job.waited():.0f} s; is the server running?")


class _Writing(_Session):
    """Run writing scripts. `announcement`: channel and text of the notification that is sent with a change."""

    keep_plans = True

    def __init__(self, place: Place, partition: str, announcement: tuple[str, str]) -> None:
        super().__init__(place, partition)
        self._announcement = announcement

    @override
    def _transact(self, link: Link, jobs: list[Job]) -> list[Job]:
        seen = Seen()
        link.begin()
        written = run_scripts(jobs, lambda job: PostgresTx(link, seen, careful=job.alone), psycopg.Error)
        if any(tx.notes.changed for _, tx in written):
            link.send("SELECT pg_notify(%s, %s)", self._announcement)
        other_version = link.send(OTHER_VERSION, (SCHEMA_VERSION,))
        link.sync()
        for (version,) in other_version.fetchall():
            check_not_newer(repr(self._place), version)
            raise StoreWriteError(f"The tables of {self._place!r} were reverted to schema version {version}")
        if losers := [job for job, tx in written if tx.lost_a_race]:
            self._late(losers, "lost a race against other changes")
            raise LostRaceError(losers)
        try:
            link.send("COMMIT")
            link.sync()
        except psycopg.Error as error:
            if self._roll_back():
                raise  # the server rejected it, so it is rolled back
            self._leave_open(jobs, error)
            return []
        locked = [job for job in jobs if isinstance(job.error, LockedError)]
        return self._late(locked, "found its rows locked by other changes")

    def _leave_open(self, jobs: list[Job], error: psycopg.Error) -> None:
        """Set the error of every caller: the connection was lost while the server committed."""
        logger.warning("%r: the connection was lost during a commit of %d calls", self._place, len(jobs))
        for job in jobs:
            job.error = StoreUnreachableError(
                f"The connection to the PostgreSQL store {self._place!r} was lost during a commit ({reason(error)}). "
                "It is unknown whether the call was stored. You can repeat a call that carries a token."
            )

    @override
    def _given_up(self, error: psycopg.Error, job: Job) -> StoreWriteError:
        return StoreWriteError(
            f"The PostgreSQL store {self._place!r} cannot be written: {reason(error)} (tried for "
            f"{job.waited():.0f} s). Nothing of this call was stored. Retry when the server responds again."
        )
