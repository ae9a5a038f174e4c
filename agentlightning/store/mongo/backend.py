"""Runs scripts against MongoDB: on a few threads with the blocking driver, and again if another writer was faster."""

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
from typing import Any, TypeVar

from pymongo import ReadPreference
from pymongo.change_stream import CollectionChangeStream
from pymongo.errors import AutoReconnect, OperationFailure, PyMongoError, ServerSelectionTimeoutError

from agentlightning.errors import AgentLightningError, BadRequestError, BusyError, ConflictError, NotFoundError
from agentlightning.store.engine.clock import SharedClock
from agentlightning.store.mongo.change_numbers import ChangeNumbers
from agentlightning.store.mongo.documents import SPANS, Document, LostRace, Partition, check_spans
from agentlightning.store.mongo.flush import flush
from agentlightning.store.mongo.link import Place
from agentlightning.store.mongo.queue import LEASE_SECONDS
from agentlightning.store.mongo.run_records import Direct
from agentlightning.store.mongo.tx import MongoTx, Turns
from agentlightning.store.rules.tx import Notes, Tx
from agentlightning.utils.backoff import Outage, backoff_delays

logger = logging.getLogger(__name__)
R = TypeVar("R")
_THREADS = 8
_MAX_WAITING = 10_000
_TRY_SECONDS = LEASE_SECONDS + 5.0
"""Seconds for which a script is retried: longer than any lock of a dead process."""
_PAUSES = (0.001, 0.1)
_LOOKS = (0.02, 0.25)
"""Seconds between two looks at the counter of changes, right after a change of others and when nothing changes."""


class MongoBackend:
    """A client and a few threads per process, made with the first use, which connects. Usable from any thread.

    A process that inherits the backend over a fork makes its own, and leaves those of its parent alone.
    """

    shared = True
    persistent = True

    def __init__(self, place: Place, database: str, partition: str, spans: str = SPANS) -> None:
        if not partition or "\0" in partition:
            raise BadRequestError(
                f"partition_id must be a text that is not empty, without null bytes; got {partition!r}"
            )
        self._place = place
        self._database = database
        self._partition = partition
        self._spans = check_spans(spans)
        self._closed = False
        self._opened = False
        """True once an operation has reached the server: until then a wrong address fails at once."""
        self._processes: dict[int, _Process] = {}
        self._clock = SharedClock()

    def execute(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        outage = Outage(self._place.outage_seconds if self._opened else 0.0)
        try:
            here = self._process()
            if write:
                result = self._write(here, script, outage)
                self._opened = True
                return result
            for delay in backoff_delays(*_PAUSES):
                began = time.monotonic()
                try:
                    tx = MongoTx(here.partition, here.numbers, None)
                    result = script(tx)
                    self._opened = True
                    return result, tx.notes
                except AutoReconnect as error:
                    self._after_try(outage, began, error)
                time.sleep(delay)
            raise AssertionError("the delays have no end")
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
            logger.debug("the clock of the MongoDB server was not read: %r", error)

    def await_change(self, timeout: float) -> bool:
        try:
            return self._process().others_wrote(timeout)
        except PyMongoError as error:
            raise self._place.failed(error) from None

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            here = self._processes.get(os.getpid())
            if here is not None:
                here.close()

    def _after_try(self, outage: Outage, began: float, error: AutoReconnect) -> None:
        """Raise the error of a try that did not reach the server, unless another try follows."""
        if not outage.seconds or outage.failed(began):
            raise error
        logger.debug("the MongoDB store %r cannot be reached, trying again", self._place)

    def _process(self) -> _Process:
        """Return the client and threads of this process."""
        if self._closed:
            raise ConflictError(f"The MongoDB store {self._place!r} is closed")
        here = self._processes.get(os.getpid())
        if here is None:
            made = _Process(self._place, self._database, self._partition, self._spans, self._clock)
            here = self._processes.setdefault(os.getpid(), made)
        return here

    def _write(self, here: _Process, script: Callable[[Tx], R], outage: Outage) -> tuple[R, Notes]:
        """Run a script and flush its writes; retry while another writer is faster or the server is unreachable."""
        end, delays = time.monotonic() + _TRY_SECONDS, backoff_delays(*_PAUSES)
        careful = reconnected = False
        direct = Direct()
        while True:
            flushed, reachable, began = False, True, time.monotonic()
            tx = None
            try:
                tx = MongoTx(here.partition, here.numbers, here.turns, careful=careful, direct=direct)
                result = script(tx)
                flush(tx)
                flushed = True
                return result, tx.notes
            except LostRace as lost:
                careful = careful or lost.careful
            except NotFoundError:
                direct.take_back(here.partition)
                raise
            except AutoReconnect as error:
                reachable = False
                if tx is not None and tx.flushing:
                    raise  # something may have been written
                if reconnected or isinstance(error, ServerSelectionTimeoutError):
                    self._after_try(outage, began, error)
                    end = time.monotonic() + _TRY_SECONDS
                reconnected = True  # a connection that the server had closed meanwhile
            finally:
                if tx is not None:
                    tx.end(flushed=flushed, reachable=reachable)
            if time.monotonic() > end:
                raise BusyError(
                    f"For {_TRY_SECONDS:.0f} s other writers of the MongoDB store {self._place!r} were faster; "
                    "try again later"
                )
            time.sleep(next(delays))


class _Process:
    """The client, threads and numbers of one process. Connects with the first use."""

    def __init__(self, place: Place, database: str, partition: str, spans: str, clock: SharedClock) -> None:
        self._clock = clock
        self._client = place.client()
        self._preparing = threading.Lock()
        self._prepared = False
        self.turns = Turns()
        self._partition = Partition(
            self._client.get_database(database, read_preference=ReadPreference.PRIMARY), partition, spans
        )
        self.numbers = ChangeNumbers(self._partition.counters, self._partition.id("counters"))
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="agl-mongo")
        self._lock = threading.Lock()
        self._waiting = 0
        self._stopped = threading.Event()
        self._streams = False
        self._stream: CollectionChangeStream[Document] | None = None
        self._pause = _LOOKS[0]
        self._next_look = 0.0

    @property
    def partition(self) -> Partition:
        """The collections, with their indexes, after the clean-up of a dead process's data."""
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
        """Return the server's wall-clock seconds, in steps of a millisecond; this machine's if it reports none."""
        server_time = self._client.admin.command("hello").get("localTime")
        return server_time.replace(tzinfo=UTC).timestamp() if isinstance(server_time, datetime) else time.time()

    def submit(self, job: Callable[[], R]) -> Future[R]:
        """Run a job on one of the threads.

        Raises:
            BusyError: too many wait already.
        """
        with self._lock:
            if self._waiting >= _MAX_WAITING:
                raise BusyError(f"{_MAX_WAITING} calls wait for the MongoDB server already; try again later")
            self._waiting += 1
        future = self._pool.submit(job)
        future.add_done_callback(self._answered)
        return future

    def _answered(self, _: Future[Any]) -> None:
        with self._lock:
            self._waiting -= 1

    def others_wrote(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds; return True if other processes may have changed data since the last call."""
        assert self.partition  # connected
        woken = self._wait(timeout)
        if not woken and time.monotonic() < self._next_look:
            return False
        news = self.numbers.others_wrote()
        first, longest = _LOOKS
        self._pause = first if news else min(self._pause * 1.5, longest)
        self._next_look = time.monotonic() + self._pause
        return news

    def _wait(self, timeout: float) -> bool:
        """Wait; return True as soon as the server reports a change. Only replica sets and clusters do."""
        if not self._streams:
            self._stopped.wait(timeout)
            return False
        try:
            if self._stream is None:
                changes = [{"$match": {"fullDocument.partition": self._partition.name}}, {"$project": {"_id": 1}}]
                self._stream = self._partition.rollouts.watch(changes, max_await_time_ms=max(1, int(timeout * 1000)))
            end, changed = time.monotonic() + timeout, False
            while self._stream.try_next() is not None:
                changed = True
                if time.monotonic() > end:
                    break
            if not changed:
                self._stopped.wait(max(0.0, end - time.monotonic()))  # a server may answer before the time is up
            return changed
        except OperationFailure as error:
            logger.warning("no change stream, the counter is looked at instead: error code %s", error.code)
            self._streams = False
            return False
        finally:
            if not self._streams:
                self._end_stream()

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
