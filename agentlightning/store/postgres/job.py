"""A script that waits for a thread, and the error that its caller gets when the database refuses it."""

from __future__ import annotations

import concurrent.futures
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psycopg

from agentlightning.errors import BadRequestError, StoreWriteError
from agentlightning.store.postgres.link import Place, is_bad_value, reason
from agentlightning.store.rules.tx import Tx
from agentlightning.utils.backoff import OUTAGE_SECONDS, backoff_delay

_PAUSE_SECONDS = (0.005, 0.25)
"""Pauses between two runs of a script, in seconds: about the first one, and the longest."""
_TRIES_IN_COMPANY = 3
"""Number of runs with others after which a script is run in a separate transaction, which waits for locks."""

__all__ = ["OUTAGE_SECONDS", "Future", "Job", "Jobs", "Script", "refused"]
Script = Callable[[Tx], object]
Future = concurrent.futures.Future[Any]


@dataclass(slots=True)
class Job:
    """A script and the caller that waits for it."""

    script: Script
    future: Future = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)
    tries: int = 0
    due: float = 0.0
    """Earliest time of its next run (monotonic)."""
    alone: bool = False
    """It must be run in a separate transaction."""

    def put_aside(self) -> None:
        """Schedule another run after a growing pause."""
        self.tries += 1
        self.due = time.monotonic() + backoff_delay(self.tries, *_PAUSE_SECONDS)

    def put_back(self) -> None:
        """Schedule another run at once, and alone if that has happened too often."""
        self.tries += 1
        self.due = 0.0
        self.alone = self.alone or self.tries >= _TRIES_IN_COMPANY

    def waited(self) -> float:
        """Return the seconds since it was submitted."""
        return time.monotonic() - self.since


Jobs = queue.SimpleQueue["Job | None"]
"""Scripts that wait for a thread; each None ends one thread."""


def refused(place: Place, error: Exception) -> Exception:
    """Return the caller's error for a database error that a retry would meet, too."""
    if not isinstance(error, psycopg.Error):
        return error
    if is_bad_value(error):
        return BadRequestError(f"The PostgreSQL store cannot hold a value of this call: {reason(error)}")
    return StoreWriteError(
        f"The PostgreSQL store {place!r} refused: {reason(error)}. "
        "Nothing of this call was stored; try it again when the cause is gone."
    )
