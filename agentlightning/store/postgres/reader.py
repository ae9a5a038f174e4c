"""A thread that runs reading scripts, one at a time, each on a separate snapshot."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import psycopg

from agentlightning.store.postgres.job import OUTAGE_SECONDS, Job, Jobs, Script, refused
from agentlightning.store.postgres.link import Link, Place
from agentlightning.store.postgres.tx import PostgresTx
from agentlightning.store.rules.tx import Notes


class Reader:
    """One connection and its thread, which ends when it gets None from `jobs`."""

    def __init__(self, name: str, place: Place, partition: str, jobs: Jobs, on_held_back: Callable[[], None]) -> None:
        self._place = place
        self._partition = partition
        self._jobs = jobs
        self._on_held_back = on_held_back
        self._link: Link | None = None
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                while not job.future.done():  # until there is an answer
                    try:
                        job.future.set_result(self._read(job.script))
                    except Exception as error:  # every caller gets an answer
                        self._after_error(job, error)
                if self._link is not None:  # let the snapshot go; the caller has the answer already
                    try:
                        self._link.send("COMMIT")
                        self._link.sync()
                    except psycopg.Error:
                        self._give_up_link()
        finally:
            self._give_up_link()

    def _read(self, script: Script) -> tuple[object, Notes]:
        if self._link is None:
            self._link = Link(self._place, self._partition, keep_plans=False)
        self._link.begin(" ISOLATION LEVEL REPEATABLE READ READ ONLY")
        tx = PostgresTx(self._link)
        result = script(tx)
        if tx.held_back:
            self._on_held_back()
        return result, tx.notes

    def _after_error(self, job: Job, error: Exception) -> None:
        """Pass the error to the caller, unless the connection was lost: a read can be repeated."""
        if not isinstance(error, psycopg.Error) or (self._link is not None and self._link.roll_back()):
            job.future.set_exception(refused(self._place, error))
            return
        self._give_up_link()
        if job.tries and job.waited() > OUTAGE_SECONDS:
            tried = f"Tried for {job.waited():.0f} s; is the server running?"
            job.future.set_exception(self._place.unreachable(error, tried))
            return
        job.put_aside()
        time.sleep(max(0.0, job.due - time.monotonic()))

    def _give_up_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
