"""Detects that another process changed data in a partition (LISTEN), with one thread, while a caller is waiting.

The thread also reads if no caller is waiting, because the server's queue grows if a listener does not read.
"""

from __future__ import annotations

import logging
import threading
import time

import psycopg

from agentlightning.store.postgres.link import Place, reason

logger = logging.getLogger(__name__)
_IDLE_SECONDS = 60.0
"""Seconds without a call after which the thread ends and the connection is closed."""
_LOOK_SECONDS = 0.1
"""Seconds after which the thread checks whether it should end."""
_RECONNECT_SECONDS = 0.5
_HELD_BACK_SECONDS = 0.02


class Listener:
    """Record the notifications of other processes on a channel. Those of `instance` are from this process."""

    def __init__(self, place: Place, channel: str, instance: str) -> None:
        self._place = place
        self._channel = channel
        self._instance = instance
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._last_call = 0.0
        self._news = threading.Event()
        self._held_back = False
        self._closed = threading.Event()

    def await_change(self, timeout: float) -> bool:
        """Block for at most `timeout` seconds until there may be changes; return False if there are none."""
        with self._lock:
            self._last_call = time.monotonic()
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="agl-postgres-listener", daemon=True)
                self._thread.start()
        held_back, self._held_back = self._held_back, False
        news = self._news.wait(min(timeout, _HELD_BACK_SECONDS) if held_back else timeout)
        if news:
            self._news.clear()
        return news or held_back

    def look_again(self) -> None:
        """Make the next `await_change` return True, because there are changes that could not be reported yet."""
        self._held_back = True

    def close(self) -> None:
        """End the thread and wait for it. Calling it again does nothing."""
        with self._lock:
            self._closed.set()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        failing = False
        while not self._is_over():
            try:
                with self._place.connect() as db:
                    db.execute(f'LISTEN "{self._channel}"'.encode())
                    failing = False
                    self._news.set()  # earlier announcements were missed
                    while not self._is_over():
                        notes = db.notifies(timeout=_LOOK_SECONDS, stop_after=1)
                        if any(note.payload != self._instance for note in notes):
                            self._news.set()
                    return
            except psycopg.Error as error:
                if not failing:
                    logger.warning("%r: cannot listen for changes of other processes: %s", self._place, reason(error))
                failing = True
                self._closed.wait(_RECONNECT_SECONDS)

    def _is_over(self) -> bool:
        """Return True if this thread must end: the store was closed, or no caller is waiting."""
        with self._lock:
            over = self._closed.is_set() or time.monotonic() - self._last_call > _IDLE_SECONDS
            if over:
                self._thread = None
            return over
