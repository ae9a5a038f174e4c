"""Group commit: scripts that wait for the writer of a SQLite store run in one transaction and are answered together."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentlightning.store.rules.tx import Tx
from agentlightning.store.sqlite.schema import check_version
from agentlightning.store.sqlite.tx import SQLiteLink, SQLiteTx, Transaction


@dataclass(slots=True)
class Job:
    """A script that waits for the writer, and the future of its caller."""

    script: Callable[[Tx], object]
    future: concurrent.futures.Future[Any] | asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop | None
    """Event loop of the future; None for a future that any thread may set."""
    result: object = None
    error: BaseException | None = None

    def settle(self) -> None:
        """Set the result of the future, unless the caller has left."""
        if self.future.done():
            return
        if self.error is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(self.error)


def run_batch(link: SQLiteLink, path: str, batch: list[Job]) -> None:
    """Run the scripts in one transaction and commit it; each job then has a result, or the error of its script, which
    has stored nothing.

    Raises:
        sqlite3.Error, ConflictError: nothing of the batch is stored; the transaction may still be open.
    """
    link.send("BEGIN IMMEDIATE")
    check_version(link.db, path)
    seen = Transaction(link)
    for job in batch:
        tx = SQLiteTx(link, seen)
        try:
            result = job.script(tx)
        except sqlite3.Error:
            raise
        except Exception as error:  # the caller gets it; the other scripts of the batch go on
            tx.undo()
            job.error = error
            continue
        try:
            tx.finish()
        except sqlite3.Error:
            raise
        except Exception as error:  # a value that the file does not accept: it is undone with the writes before it
            link.send("ROLLBACK")
            job.error = error
            for other in batch if len(batch) > 1 else ():
                other.error = None
                run_batch(link, path, [other])
            return
        job.result = (result, tx.notes)
    seen.write()
    link.send("COMMIT")


def settle(batch: list[Job]) -> None:
    """Answer every caller; callers of one event loop together, which wakes it once."""
    of_loop: dict[asyncio.AbstractEventLoop, list[Job]] = {}
    for job in batch:
        if job.loop is None:
            job.settle()
        else:
            of_loop.setdefault(job.loop, []).append(job)
    for loop, jobs in of_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there
            loop.call_soon_threadsafe(_settle_all, jobs)


def _settle_all(jobs: list[Job]) -> None:
    for job in jobs:
        job.settle()
