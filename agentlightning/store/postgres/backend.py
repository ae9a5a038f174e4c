"""Passes scripts to the threads of this process: a few writers, a few readers, one listener."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable
from typing import TypeVar

import psycopg

from agentlightning.errors import BadRequestError, BusyError, ConflictError
from agentlightning.store.engine.clock import SharedClock
from agentlightning.store.postgres.job import Future, Job, Jobs, Script
from agentlightning.store.postgres.link import Database, Place, reason
from agentlightning.store.postgres.listener import Listener
from agentlightning.store.postgres.reader import Reader
from agentlightning.store.postgres.schema import prepare
from agentlightning.store.postgres.writer import Writer
from agentlightning.store.rules.tx import Notes, Tx

logger = logging.getLogger(__name__)
R = TypeVar("R")
_READERS = 2
_MAX_WAITING = 10_000


class PostgresBackend:
    """Runs scripts in one partition of a database. Threads and connections start with the first use.

    A process that inherits the backend over a fork makes its own, and leaves those of its parent alone.
    """

    shared = True
    persistent = True

    def __init__(self, uri: str, partition: str) -> None:
        if not partition or "\0" in partition:
            raise BadRequestError(f"partition must be a text that is not empty, without null bytes; got {partition!r}")
        self._place = Place(uri)
        self._partition = partition
        self._closed = False
        self._processes: dict[int, _Process] = {}
        self._clock = SharedClock()
        try:
            with self._place.connect() as db:
                prepare(db, repr(self._place), partition)
                self._clock.set(lambda: _server_time(db))
        except psycopg.OperationalError as error:
            raise self._place.unreachable(
                error, "Is the server running there, and are user, password and database right?"
            ) from error
        except psycopg.Error as error:
            raise ConflictError(
                f"The tables of the store cannot be made in {self._place!r}: {reason(error)}. "
                "The user needs the right to create tables there, and the server must be PostgreSQL 13 or newer."
            ) from error

    def execute(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        return self._submit(script, write).result()

    async def run(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        return await asyncio.shield(asyncio.wrap_future(self._submit(script, write)))

    def now(self) -> float:
        return self._clock.now()

    def set_clock(self) -> None:
        try:
            with self._place.connect() as db:
                self._clock.set(lambda: _server_time(db))
        except psycopg.Error as error:
            logger.debug("the clock of the PostgreSQL server was not read: %s", reason(error))

    def await_change(self, timeout: float) -> bool:
        return self._process().listener.await_change(timeout)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._process().close()

    def _submit(self, script: Script, write: bool) -> Future:
        if self._closed:
            raise ConflictError(f"The store {self._place!r} is closed")
        return self._process().submit(script, write)

    def _process(self) -> _Process:
        """Return the threads and connections of this process."""
        pid = os.getpid()
        return self._processes.get(pid) or self._processes.setdefault(pid, _Process(self._place, self._partition))


class _Process:
    """The threads and connections of one process. Costs nothing until it is used."""

    def __init__(self, place: Place, partition: str) -> None:
        self._place = place
        self._partition = partition
        channel = "agl_" + hashlib.sha1(partition.encode(), usedforsecurity=False).hexdigest()[:24]
        self._announcement = (channel, uuid.uuid4().hex)
        self.listener = Listener(place, *self._announcement)
        self._starting = threading.Lock()
        self._writes: Jobs = queue.SimpleQueue()
        self._slow_writes: Jobs = queue.SimpleQueue()
        self._reads: Jobs = queue.SimpleQueue()
        self._writers: list[Writer] = []
        self._readers: list[Reader] = []
        self._closed = False

    def submit(self, script: Script, write: bool) -> Future:
        """Submit a script; the future has its result and its notes."""
        jobs = self._writes if write else self._reads
        if jobs.qsize() >= _MAX_WAITING:
            raise BusyError(f"{_MAX_WAITING} calls wait for the store {self._place!r} already; try again later")
        job = Job(script)
        job.future.set_running_or_notify_cancel()  # it is run even if its caller gives up
        jobs.put(job)
        if not (self._writers if write else self._readers):
            with self._starting:
                if write and not self._writers and not self._closed:
                    here = (self._place, self._partition, self._announcement)
                    self._writers = [
                        Writer("agl-postgres-writer", *here, self._writes, self._slow_writes),
                        Writer("agl-postgres-slow-writer", *here, self._slow_writes, None),
                    ]
                elif not write and not self._readers and not self._closed:
                    held_back = self.listener.look_again
                    self._readers = [
                        Reader(f"agl-postgres-reader-{n}", self._place, self._partition, self._reads, held_back)
                        for n in range(_READERS)
                    ]
        if self._closed:
            self._refuse(jobs)
        return job.future

    def close(self) -> None:
        """Run the waiting scripts, then end every thread."""
        with self._starting:
            self._closed = True
        for writer, jobs in zip(self._writers, (self._writes, self._slow_writes), strict=False):
            jobs.put(None)
            writer.thread.join()
        for _ in self._readers:
            self._reads.put(None)
        for reader in self._readers:
            reader.thread.join()
        for jobs in (self._writes, self._reads):
            self._refuse(jobs)
        self.listener.close()

    def _refuse(self, jobs: Jobs) -> None:
        """Fail the scripts that came too late, when no thread runs them any more."""
        if any(each.thread.is_alive() for each in (*self._writers, *self._readers)):
            return
        with contextlib.suppress(queue.Empty):
            while True:
                job = jobs.get_nowait()
                if job is not None:
                    job.future.set_exception(ConflictError(f"The store {self._place!r} is closed"))


def _server_time(db: Database) -> float:
    row = db.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchone()
    return row[0] if row is not None else time.time()
