"""A thread that runs writing scripts, many in one transaction (group commit).

A script that raises has sent nothing, so it does not disturb the other scripts of its batch. A script that meets a row
locked by another transaction, or finds at the end that its data was changed, is run again: scripts are repeatable.

A process has one writer for most scripts, and one for scripts that must be run alone and may have to wait. Two writers
for all scripts would not be faster: concurrent scripts often concern the same workers and would wait for each other.
"""

from __future__ import annotations

import logging
import queue
import threading
import time

import psycopg

from agentlightning.errors import BusyError, StoreUnreachableError, StoreWriteError
from agentlightning.store.postgres.job import OUTAGE_SECONDS, Job, Jobs, refused
from agentlightning.store.postgres.link import Link, Place, passes, reason
from agentlightning.store.postgres.schema import OTHER_VERSION
from agentlightning.store.postgres.tx import LockedError, PostgresTx
from agentlightning.store.rules.durable import SCHEMA_VERSION, check_not_newer
from agentlightning.store.sql.writes import Seen

logger = logging.getLogger(__name__)
_BATCH = 64
_PATIENCE_SECONDS = 30.0
"""Seconds for which a script is retried after lost races."""


class LostRacesError(Exception):
    """Raised when another transaction changed data that these scripts read; nothing was committed."""

    def __init__(self, jobs: list[Job]) -> None:
        super().__init__(f"{len(jobs)} scripts")
        self.jobs = jobs


class UnknownOutcomeError(Exception):
    """Raised when the connection was lost while the server committed."""


class Writer:
    """One connection and its thread, which ends when it gets None from `jobs` and has answered all earlier jobs.

    Scripts that must be run alone go to `slow`, or are run here without one. `announcement`: channel and text of the
    notification that goes with a change.
    """

    def __init__(
        self, name: str, place: Place, partition: str, announcement: tuple[str, str], jobs: Jobs, slow: Jobs | None
    ) -> None:
        self._place = place
        self._partition = partition
        self._announcement = announcement
        self._jobs = jobs
        self._slow = slow
        self._aside: list[Job] = []
        self._ending = False
        self._link: Link | None = None
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while not self._ending or self._aside:
                batch = self._next_batch()
                together = [job for job in batch if not job.alone]
                for jobs in (together, *([job] for job in batch if job.alone)):
                    if jobs:
                        self._settle(jobs)
        finally:
            if self._link is not None:
                self._link.close()

    def _next_batch(self) -> list[Job]:
        """Wait for work. Jobs that were put aside come first, so that they are the first to wait for their locks."""
        now = time.monotonic()
        batch = [job for job in self._aside if job.due <= now]
        self._aside = [job for job in self._aside if job.due > now]
        pause = 0.0 if batch else min((job.due - now for job in self._aside), default=None)
        if self._ending:
            time.sleep(pause or 0.0)
        while len(batch) < _BATCH and not self._ending:
            try:
                job = self._jobs.get_nowait() if pause == 0.0 else self._jobs.get(timeout=pause)
            except queue.Empty:
                break
            pause = 0.0
            if job is None:
                self._ending = True
            elif job.due > time.monotonic():
                self._aside.append(job)
            else:
                batch.append(job)
        return batch

    def _settle(self, jobs: list[Job]) -> None:
        """Run the scripts in one transaction and answer their callers, or put them aside to be run again."""
        try:
            answers = self._transact(jobs)
        except LostRacesError as lost:
            for job in lost.jobs:
                job.alone = True
                self._again(job, "lost a race against other changes")
            rest = [job for job in jobs if job not in lost.jobs]
            if rest:
                self._settle(rest)
        except UnknownOutcomeError as error:
            logger.warning("%r: the connection was lost during a commit of %d calls", self._place, len(jobs))
            for job in jobs:
                job.future.set_exception(
                    StoreUnreachableError(
                        f"The connection to the PostgreSQL store {self._place!r} was lost during a commit ({error}). "
                        "The answer to the commit was lost, too: the call may or may not have been stored. "
                        "A call that carries a token may be repeated."
                    )
                )
        except Exception as error:  # every caller of the batch gets an answer
            self._after_error(jobs, error)
        else:
            for job, result, raised in answers:
                if raised is None:
                    job.future.set_result(result)
                elif isinstance(raised, LockedError):
                    self._again(job, "found its rows locked by other changes", at_once=True)
                else:
                    job.future.set_exception(raised)

    def _transact(self, jobs: list[Job]) -> list[tuple[Job, object, Exception | None]]:
        """Run the scripts in one transaction; return their results or errors when the transaction is on disk.

        Raises:
            LostRacesError: some of them must be run again; nothing was committed.
            UnknownOutcomeError: perhaps it was committed.
            Exception: anything else; nothing was committed.
        """
        if self._link is None:
            self._link = Link(self._place, self._partition, keep_plans=True)
        link, seen = self._link, Seen()
        link.begin()
        answers: list[tuple[Job, object, Exception | None]] = []
        written: list[tuple[Job, PostgresTx]] = []
        for job in jobs:
            tx = PostgresTx(link, seen, careful=job.alone)
            try:
                result = job.script(tx)
            except psycopg.Error:
                raise
            except Exception as error:  # the caller gets it; the other scripts of the batch go on
                tx.undo()
                answers.append((job, None, error))
                continue
            tx.finish()
            answers.append((job, (result, tx.notes), None))
            written.append((job, tx))
        if any(tx.notes.changed for _, tx in written):
            link.send("SELECT pg_notify(%s, %s)", self._announcement)
        other_version = link.send(OTHER_VERSION, (SCHEMA_VERSION,))
        link.sync()
        for (version,) in other_version.fetchall():
            check_not_newer(repr(self._place), version)
            raise StoreWriteError(f"The tables of {self._place!r} have been put back to schema version {version}")
        losers = [job for job, tx in written if tx.lost_a_race]
        if losers:
            self._roll_back()
            raise LostRacesError(losers)
        try:
            link.send("COMMIT")
            link.sync()
        except psycopg.Error as error:
            if not self._roll_back():
                raise UnknownOutcomeError(reason(error)) from error
            raise  # the server said no, so it is rolled back
        return answers

    def _after_error(self, jobs: list[Job], error: Exception) -> None:
        """Run the scripts again one by one, since nothing was committed, or fail them if the error would recur."""
        connected = self._roll_back()
        if connected and len(jobs) > 1:
            for job in jobs:
                self._settle([job])
            return
        for job in jobs:
            if isinstance(error, psycopg.Error) and not connected:
                if job.tries and job.waited() > OUTAGE_SECONDS:
                    message = (
                        f"The PostgreSQL store {self._place!r} cannot be written: {reason(error)} (tried for "
                        f"{job.waited():.0f} s). Nothing of this call was stored; try it again when the server answers."
                    )
                    job.future.set_exception(StoreWriteError(message))
                else:
                    job.put_aside()
                    self._aside.append(job)
            elif isinstance(error, psycopg.Error) and passes(error):
                job.alone = True
                self._again(job, f"was stopped ({reason(error)})")
            else:
                job.future.set_exception(refused(self._place, error))

    def _roll_back(self) -> bool:
        """Leave the transaction; return False if there is no connection, or it had to be closed."""
        if self._link is None:
            return False
        if self._link.roll_back():
            return True
        self._link.close()
        self._link = None
        return False

    def _again(self, job: Job, why: str, *, at_once: bool = False) -> None:
        if job.waited() > _PATIENCE_SECONDS:
            message = f"The call {why} for {job.waited():.0f} s in {self._place!r}; nothing of it was stored"
            job.future.set_exception(BusyError(message))
            return
        if at_once and not job.alone:
            job.put_back()
        else:
            job.put_aside()
        if job.alone and self._slow is not None:
            self._slow.put(job)
        else:
            self._aside.append(job)
