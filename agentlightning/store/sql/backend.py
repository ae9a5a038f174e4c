"""The threads that run scripts in a database. One thread writes, with many scripts in one transaction (group commit);
others read.

A script that raises has sent nothing, so it does not affect the other scripts of its transaction. A script is run again
if it conflicts with other changes or its connection is lost before the commit, because scripts are repeatable.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from agentlightning.errors import AgentLightningError, BusyError, ConflictError
from agentlightning.store.rules.tx import Notes, Tx
from agentlightning.store.sql.tx import SqlTx
from agentlightning.utils.backoff import OUTAGE_SECONDS, backoff_delay

R = TypeVar("R")
T = TypeVar("T", bound=SqlTx)
Script = Callable[[Tx], Any]
Future = concurrent.futures.Future[Any] | asyncio.Future[Any]
_MAX_WAITING = 10_000
_PAUSE_SECONDS = (0.005, 0.25)
"""Pauses between two tries to connect in seconds: the approximate first one, and the longest."""


@dataclass(slots=True, eq=False)
class Job:
    """A script that is waiting for a thread, and the future of its caller."""

    script: Script
    future: Future
    loop: asyncio.AbstractEventLoop | None
    """Event loop of the future; None for a future that any thread can set."""
    result: tuple[Any, Notes] | None = None
    error: Exception | None = None
    since: float = field(default_factory=time.monotonic)
    tries: int = 0
    """Number of tries that ended with a lost connection."""
    alone: bool = False
    """True if it must be run in a separate transaction, which may wait for locks."""

    def waited(self) -> float:
        """Return the seconds since the job was submitted."""
        return time.monotonic() - self.since

    def settle(self) -> None:
        """Set the result of the future, unless the caller was cancelled."""
        if self.future.done():
            return
        if self.error is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(self.error)


Jobs = queue.SimpleQueue["Job | None"]
"""Scripts that are waiting for a thread; None ends every thread that reads from it."""


def answer(jobs: list[Job]) -> None:
    """Return the results to all callers. The callers of one event loop are grouped, so that it wakes once."""
    of_loop: dict[asyncio.AbstractEventLoop, list[Job]] = {}
    for job in jobs:
        if job.loop is None:
            job.settle()
        else:
            of_loop.setdefault(job.loop, []).append(job)
    for loop, settled in of_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there
            loop.call_soon_threadsafe(_settle_all, settled)


def _settle_all(jobs: list[Job]) -> None:
    for job in jobs:
        job.settle()


class LostRaceError(Exception):
    """Raised if these scripts must be run again, alone, because of other changes. Nothing was committed. Scripts with
    an error are not run again."""

    def __init__(self, jobs: list[Job]) -> None:
        super().__init__(f"{len(jobs)} scripts")
        self.jobs = jobs


class LostConnectionError(Exception):
    """Raised if the connection was lost or not opened, and nothing was committed. It has the error for the callers."""

    def __init__(self, error: Callable[[Job], AgentLightningError]) -> None:
        super().__init__("lost")
        self.error = error


class Session:
    """The connection of one thread, opened at its first use. Each database implements how a transaction is run."""

    def transact(self, jobs: list[Job]) -> list[Job]:
        """Run the scripts in one transaction. Each job then has the result or the error of its script. Return the jobs
        that must be run again.

        Raises:
            LostRaceError: some scripts must be run again, alone.
            LostConnectionError: all scripts must be run again.
            Exception: a script cannot be stored.
        """
        raise NotImplementedError

    def run(self, jobs: list[Job]) -> list[Job]:
        """Run scripts and return their results to the callers; return the jobs that must be run again."""
        try:
            again = self.transact(jobs)
        except LostRaceError as lost:
            answer([job for job in lost.jobs if job.error is not None])
            others = [job for job in jobs if job not in lost.jobs]
            return [*(job for job in lost.jobs if job.error is None), *(self.run(others) if others else ())]
        except LostConnectionError as lost:
            late = [job for job in jobs if job.tries and job.waited() > OUTAGE_SECONDS]
            for job in jobs:
                job.tries += 1
                job.error = lost.error(job) if job in late else None
            again = [job for job in jobs if job not in late]
            if again:
                time.sleep(backoff_delay(max(job.tries for job in again), *_PAUSE_SECONDS))
        except Exception as error:  # every caller gets an answer
            if len(jobs) > 1:
                return [late for job in jobs for late in self.run([job])]
            jobs[0].error, again = error, []
        answer([job for job in jobs if job not in again] if again else jobs)
        return again

    def close(self) -> None:
        """Close the connection, if it belongs to the thread."""


def run_scripts(jobs: list[Job], begin: Callable[[Job], T], refusal: type[Exception]) -> list[tuple[Job, T]]:
    """Run scripts one after the other; return the successful ones with their transactions.

    Raises:
        Exception: a `refusal` of the database, or a value that it does not accept.
    """
    finished: list[tuple[Job, T]] = []
    for job in jobs:
        tx = begin(job)
        job.error = None
        try:
            result = job.script(tx)
        except refusal:
            raise
        except Exception as error:  # the caller gets it; the other scripts go on
            tx.undo()
            job.error = error
            continue
        tx.finish()
        job.result = (result, tx.notes)
        finished.append((job, tx))
    return finished


class Worker:
    """A thread and its session. It ends when it gets None from `jobs` and all earlier jobs are done.

    Scripts that must be run alone are passed to `slow`; without `slow`, they are run here.
    """

    def __init__(self, name: str, session: Session, jobs: Jobs, most: int, slow: Jobs | None = None) -> None:
        self.jobs = jobs
        self._session = session
        self._most = most
        self._slow = slow
        self._again: list[Job] = []
        self._ending = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while not self._ending or self._again:
                batch = self._next_batch()
                together = [job for job in batch if not job.alone]
                for jobs in (together, *([job] for job in batch if job.alone)):
                    for job in self._session.run(jobs) if jobs else ():
                        if job.alone and self._slow is not None:
                            self._slow.put(job)
                        else:
                            self._again.append(job)
        finally:
            self._session.close()

    def _next_batch(self) -> list[Job]:
        """Wait for work; jobs that must be run again come first."""
        batch, self._again = self._again, []
        while len(batch) < self._most and not self._ending and not (batch and self.jobs.empty()):
            job = self.jobs.get()
            if job is None:
                self.jobs.put(None)  # for the other threads that take from it
                self._ending = True
            else:
                batch.append(job)
        return batch


class Process:
    """The threads of one process. They start at their first use. `place` names the database in errors."""

    def __init__(self, place: object) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._closed = False
        self._queues: tuple[Jobs, Jobs] = (queue.SimpleQueue(), queue.SimpleQueue())
        self._workers: dict[bool, list[Worker]] = {}

    def start(self, jobs: Jobs, write: bool) -> list[Worker]:
        """Start the threads that write, or those that read, in the order in which they must be ended."""
        raise NotImplementedError

    def submit(self, job: Job, write: bool) -> None:
        """Run a script in a thread.

        Raises:
            BusyError: too many scripts are waiting.
            ConflictError: the store is closed.
        """
        jobs = self._queues[write]
        with self._lock:
            self.check_open()
            if write not in self._workers:
                self._workers[write] = self.start(jobs, write)
            if jobs.qsize() >= _MAX_WAITING:
                text = f"{_MAX_WAITING} calls are waiting for the store {self._place!r}, which is its limit; retry"
                raise BusyError(text)
            jobs.put(job)

    def check_open(self) -> None:
        """Check that the store is not closed.

        Raises:
            ConflictError: the store is closed.
        """
        if self._closed:
            raise ConflictError(f"The store {self._place!r} is closed")

    def close(self) -> None:
        """Run the waiting scripts, then end all threads. Calling it again does nothing."""
        with self._lock:
            self._closed = True
        for worker in (*self._workers.get(True, ()), *self._workers.get(False, ())):
            worker.jobs.put(None)
            worker.thread.join()


P = TypeVar("P", bound=Process)


class SqlBackend(Generic[P]):
    """Run scripts in one store of a database. Threads and connections start at their first use.

    A forked process creates its own threads and connections and does not use those of its parent.
    """

    shared = True
    persistent = True

    def __init__(self) -> None:
        self._processes: dict[int, P] = {}

    def begin_process(self) -> P:
        """Return new threads and connections for this process."""
        raise NotImplementedError

    def execute(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        future: concurrent.futures.Future[tuple[R, Notes]] = concurrent.futures.Future()
        self._process().submit(Job(script, future, None), write)
        return future.result()

    async def run(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[R, Notes]] = loop.create_future()
        self._process().submit(Job(script, future, loop), write)
        return await future

    def close(self) -> None:
        self._process().close()

    def _process(self) -> P:
        """Return the threads and connections of this process."""
        here = self._processes.get(os.getpid())
        if here is None:
            for inherited in self._processes.values():
                inherited.check_open()
            here = self._processes.setdefault(os.getpid(), self.begin_process())
        return here
