"""Runs scripts against MongoDB, on a few threads with the blocking driver, and again after a lost race."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

from pymongo import ReadPreference
from pymongo.change_stream import CollectionChangeStream
from pymongo.errors import AutoReconnect, OperationFailure, PyMongoError, ServerSelectionTimeoutError

from agentlightning.errors import AgentLightningError, BadRequestError, BusyError, ConflictError
from agentlightning.store.engine.clock import SharedClock
from agentlightning.store.mongo.change_numbers import ChangeNumbers
from agentlightning.store.mongo.documents import LEASE_SECONDS, Document, LostRace
from agentlightning.store.mongo.flush import flush
from agentlightning.store.mongo.link import Place
from agentlightning.store.mongo.schema import SPANS, Partition, check_spans
from agentlightning.store.mongo.tx import MongoTx, Tries, Turns
from agentlightning.store.rules.tx import Notes, Tx
from agentlightning.utils.backoff import Outage, backoff_delays

logger = logging.getLogger(__name__)
R = TypeVar("R")
_THREADS = 8
_MAX_WAITING = 10_000
_TRY_SECONDS = LEASE_SECONDS + 5.0
"""Seconds for which a script is retried: longer than a lock of a dead process."""
_PAUSES = (0.001, 0.1)
_LOOKS = (0.02, 0.25)
"""Seconds between two checks of the counter of changes: directly after a change of others, and if nothing changes."""


class MongoBackend:
    """A client and a few threads per process. They are created at the first use, which connects. Thread-safe.

    A forked process creates its own client and threads and does not use those of its parent.
    """

    shared = True
    persistent = True

    def __init__(self, place: Place, database: str, partition: str, spans: str = SPANS) -> None:
        if not partition or "\0" in partition:
            raise BadRequestError(f"partition_id must be a non-empty string without null bytes; got {partition!r}")
        self._place = place
        self._clock = SharedClock()
        self._make = partial(
            _Process, place, database, partition, SPANS if spans is None else check_spans(spans), self._clock
        )
        self._closed = False
        self._opened = False
        """True after an operation has reached the server. Before that, a wrong address fails immediately."""
        self._processes: dict[int, _Process] = {}

    def execute(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        """Run a script and flush its writes; retry while another writer is faster or the server is unreachable."""
        here, tries = self._process(), Tries()
        outage = Outage(self._place.outage_seconds if self._opened else 0.0)
        end, delays, reconnected = time.monotonic() + _TRY_SECONDS, backoff_delays(*_PAUSES), False
        try:
            while True:
                began = time.monotonic()
                try:
                    with MongoTx(here.partition, here.numbers, here.turns, tries if write else None) as tx:
                        result = script(tx)
                        flush(tx)
                    self._opened = True
                    return result, tx.notes
                except LostRace:
                    tries.flushing = False
                except AutoReconnect as error:
                    if tries.flushing:
                        raise  # something may have been written
                    if reconnected or isinstance(error, ServerSelectionTimeoutError):
                        if not outage.seconds or outage.failed(began):
                            raise
                        logger.debug("cannot connect to the MongoDB store %r; retrying", self._place)
                        end = time.monotonic() + _TRY_SECONDS
                    reconnected = True  # a connection that the server had closed meanwhile
                if time.monotonic() > end:
                    raise BusyError(
                        f"The call conflicted with other writers of the MongoDB store {self._place!r} for "
                        f"{_TRY_SECONDS:.0f} s; retry later"
                    )
                time.sleep(next(delays))
        except PyMongoError as error:
            raise self._place.failed(error) from None  # the cause may quote documents

    async def run(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        job = partial(self.execute, script, write=write)
        return await asyncio.shield(asyncio.wrap_future(self._process().submit(job)))

    def now(self) -> float:
        return self._clock.now()

    def set_clock(self) -> None:
        try:
            self._clock.set(self._process().server_time)
        except (PyMongoError, AgentLightningError) as error:
            logger.debug("cannot read the clock of the MongoDB server: %r", error)

    def await_change(self, timeout: float) -> bool:
        try:
            return self._process().others_wrote(timeout)
        except PyMongoError as error:
            raise self._place.failed(error) from None

    def close(self) -> None:
        closed, self._closed = self._closed, True
        here = self._processes.get(os.getpid())
        if not closed and here is not None:
            here.close()

    def _process(self) -> _Process:
        """Return the client and threads of this process."""
        if self._closed:
            raise ConflictError(f"The MongoDB store {self._place!r} is closed")
        return self._processes.get(os.getpid()) or self._processes.setdefault(os.getpid(), self._make())


class _Process:
    """The client, threads and change numbers of one process. Connects at the first use."""

    def __init__(self, place: Place, database: str, partition: str, spans: str, clock: SharedClock) -> None:
        self._clock = clock
        self._client = place.client()
        self._preparing = threading.Lock()
        self._prepared = False
        self.turns = Turns()
        here = self._client.get_database(database, read_preference=ReadPreference.PRIMARY)
        self._partition = Partition(here, partition, spans)
        self.numbers = ChangeNumbers(self._partition)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="agl-mongo")
        self._room = threading.Semaphore(_MAX_WAITING)
        self._stopped = threading.Event()
        self._streams = False
        """True if the server reports changes. Only replica sets and clusters do."""
        self._stream: CollectionChangeStream[Document] | None = None
        self._pause = _LOOKS[0]
        self._next_look = 0.0

    @property
    def partition(self) -> Partition:
        """The collections with their indexes, after the cleanup of data of dead processes."""
        if not self._prepared:
            with self._preparing:
                if not self._prepared:
                    hello = self._client.admin.command("hello")
                    self._streams = "setName" in hello or hello.get("msg") == "isdbgrid"
                    self._partition.prepare()
                    self._clock.set(self.server_time)
                    self._prepared = True
        return self._partition

    def server_time(self) -> float:
        """Return the server's wall-clock time in seconds, rounded to milliseconds; this machine's time if it reports
        none."""
        server_time = self._client.admin.command("hello").get("localTime")
        return server_time.replace(tzinfo=UTC).timestamp() if isinstance(server_time, datetime) else time.time()

    def submit(self, job: Callable[[], R]) -> Future[R]:
        """Run a job on one of the threads.

        Raises:
            BusyError: too many jobs are waiting.
        """
        if not self._room.acquire(blocking=False):
            raise BusyError(f"Too many calls are waiting for MongoDB (the limit is {_MAX_WAITING}); retry later")
        future = self._pool.submit(job)
        future.add_done_callback(lambda _: self._room.release())
        return future

    def others_wrote(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds; return True if other processes may have changed data since the last call."""
        assert self.partition  # connected
        if not self._wait(timeout) and time.monotonic() < self._next_look:
            return False
        news = self.numbers.others_wrote()
        first, longest = _LOOKS
        self._pause = first if news else min(self._pause * 1.5, longest)
        self._next_look = time.monotonic() + self._pause
        return news

    def _wait(self, timeout: float) -> bool:
        """Wait; return True as soon as the server reports a change."""
        end, changed = time.monotonic() + timeout, False
        try:
            if self._streams and self._stream is None:
                changes = [{"$match": {"fullDocument.partition": self._partition.name}}, {"$project": {"_id": 1}}]
                self._stream = self._partition.rollouts.watch(changes, max_await_time_ms=max(1, int(timeout * 1000)))
            while self._stream is not None and self._stream.try_next() is not None:
                changed = True
                if time.monotonic() > end:
                    break
        except OperationFailure as error:
            logger.warning("no change stream (error code %s); polling the counter of changes instead", error.code)
            self._streams = changed = False
            self._end_stream()
        if not changed:
            self._stopped.wait(max(0.0, end - time.monotonic()))  # a server may answer before the time is up
        return changed

    def _end_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with contextlib.suppress(PyMongoError):
                stream.close()

    def close(self) -> None:
        """Wait for the jobs in progress, then close the client."""
        self._stopped.set()
        self._pool.shutdown(wait=True)
        self._end_stream()
        self._client.close()
