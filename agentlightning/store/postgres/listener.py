"""Detects that another process changed data in a partition (LISTEN), with one thread, while a caller waits for it.

The thread also reads when nobody waits: a listener that does not read holds back the server's queue for everybody.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from typing import TYPE_CHECKING

import psycopg

from agentlightning.store.postgres.link import Place, reason

if TYPE_CHECKING:
    from _typeshed import HasFileno

logger = logging.getLogger(__name__)
_IDLE_SECONDS = 60.0
"""Seconds without a call after which the thread ends and the connection is closed."""
_RECONNECT_SECONDS = 0.5
_HELD_BACK_SECONDS = 0.02


class Listener:
    """Records the announcements of others on a channel; those of `instance` are from this process."""

    def __init__(self, place: Place, channel: str, instance: str) -> None:
        self._place = place
        self._channel = channel
        self._instance = instance
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._last_call = 0.0
        self._news = threading.Event()
        self._held_back = False
        self._closed = False
        self._stopper: socket.socket | None = None
        """Closing it wakes the thread."""

    def await_change(self, timeout: float) -> bool:
        """Block for at most `timeout` seconds until there may be changes; return False if there certainly are none."""
        self._last_call = time.monotonic()
        with self._lock:
            if self._thread is None and not self._closed:
                self._stopper, stop = socket.socketpair()
                self._thread = threading.Thread(
                    target=self._run, args=(stop,), name="agl-postgres-listener", daemon=True
                )
                self._thread.start()
        held_back, self._held_back = self._held_back, False
        news = self._news.wait(min(timeout, _HELD_BACK_SECONDS) if held_back else timeout)
        if news:
            self._news.clear()
        return news or held_back

    def look_again(self) -> None:
        """Make the next `await_change` return True: there are changes that could not be reported yet."""
        self._held_back = True

    def close(self) -> None:
        """End the thread and wait for it; may be called twice."""
        with self._lock:
            self._closed = True
            thread, stopper = self._thread, self._stopper
        if thread is not None and stopper is not None:
            stopper.close()
            thread.join()

    def _run(self, stop: socket.socket) -> None:
        failing = False
        while True:
            try:
                with self._place.connect() as db:
                    db.execute(f'LISTEN "{self._channel}"'.encode())
                    failing = False
                    self._news.set()  # earlier announcements were missed
                    while time.monotonic() - self._last_call <= _IDLE_SECONDS:
                        if stop in _readable(stop, db, timeout=_IDLE_SECONDS):
                            break
                        if any(note.payload != self._instance for note in db.notifies(timeout=0)):
                            self._news.set()
            except psycopg.Error as error:
                if not failing:
                    logger.warning("%r: not hearing changes of other processes: %s", self._place, reason(error))
                failing = True
                _readable(stop, timeout=_RECONNECT_SECONDS)
            with self._lock:
                if self._closed or time.monotonic() - self._last_call > _IDLE_SECONDS:
                    self._thread = None
                    if self._stopper is not None:
                        self._stopper.close()
                    break
        stop.close()


def _readable(*sources: HasFileno, timeout: float) -> list[object]:
    """Wait until one of the sources has something to read, and return those that have."""
    with selectors.DefaultSelector() as selector:
        for source in sources:
            selector.register(source, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(timeout)]
