"""The feed of changes that other processes make in shared data: one thread per store, only while a caller waits.

It asks the backend whether another process may have changed something, reads which rollouts changed since its cursor,
and tells the waiters, as the scripts of this process do for their own changes.
"""

from __future__ import annotations

import logging
import os
import threading
import time

from agentlightning.store.base import FINISHED, QUEUING
from agentlightning.store.engine.waiters import Waiters
from agentlightning.store.rules.tx import Backend, Notes, Record, RunRow

logger = logging.getLogger(__name__)
_SHORTEST_PAUSE = 0.02
_LONGEST_PAUSE = 0.1
"""Between two checks, in seconds: short after a change, growing while nothing changes."""
_IDLE_CHECKS = 100
"""The thread ends after this many checks without a waiting caller."""
_PAGE = 1000


class Follower:
    """Wakes the waiters of one store for changes of other processes."""

    def __init__(self, backend: Backend, waiters: Waiters) -> None:
        self._backend = backend
        self._waiters = waiters
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._stop = threading.Event()

    async def follow(self) -> None:
        """Hear every change from now on, for as long as somebody is parked. Returns when that is so."""
        with self._lock:
            if self._running():
                return
        (cursor, _) = await self._backend.run(lambda tx: tx.last_change(), write=False)
        with self._lock:
            if not self._running():
                self._pid = os.getpid()
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(cursor, self._stop), name="agl-store-follower", daemon=True
                )
                self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._stop.set()
        if thread is not None and self._pid == os.getpid() and thread is not threading.current_thread():
            thread.join(5.0)

    def _running(self) -> bool:
        return self._thread is not None and self._pid == os.getpid()

    def _run(self, cursor: str, stop: threading.Event) -> None:
        idle, pause = 0, _SHORTEST_PAUSE
        while not stop.is_set():
            try:
                changed = self._backend.await_change(pause)
                pause = _SHORTEST_PAUSE if changed else min(pause * 1.1, _LONGEST_PAUSE)
                if changed:
                    cursor = self._tell(cursor)
            except Exception:  # what hinders the look (a server that restarts) passes; the waiters look by themselves
                logger.exception("following the changes of the store failed; trying again")
                self._waiters.wake_all()
                stop.wait(1.0)
            idle = 0 if self._waiters.parked else idle + 1
            if idle > _IDLE_CHECKS:
                with self._lock:
                    if not self._waiters.parked and self._thread is threading.current_thread():
                        self._thread = None
                        return

    def _tell(self, cursor: str) -> str:
        while True:
            (records, cursor), _ = self._backend.execute(lambda tx, at=cursor: tx.changes(at, _PAGE), write=False)
            if records:
                self._waiters.wake(notes_of(records))
            if len(records) < _PAGE:
                return cursor


def notes_of(records: list[Record | RunRow]) -> Notes:
    """Return what waiters may want to know of changed rollouts and runs."""
    notes, now = Notes(changed=True), time.time()
    for record in records:
        if isinstance(record, RunRow):
            continue
        available = record.available_at
        if record.rollout.status in QUEUING and available is not None:
            (notes.queued if available <= now else notes.delayed).append(record.rollout.run_id)
        elif record.rollout.status in FINISHED:
            notes.finished.append(record.rollout.rollout_id)
    return notes
