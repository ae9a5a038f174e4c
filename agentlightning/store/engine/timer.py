"""The timer that notices lost workers and lapsed attempts when nobody calls: one daemon thread per process."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import Protocol

logger = logging.getLogger(__name__)


class Watched(Protocol):
    """A store that wants to be looked at."""

    @property
    def scan_interval(self) -> float:
        """Seconds between two looks."""
        ...

    def scan_now(self) -> None:
        """Look for lapsed attempts."""
        ...


class _Reaper:
    """Looks at every watched store at its interval. Holds stores weakly, ends when none is left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stores: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def watch(self, store: Watched) -> None:
        with self._lock:
            self._stores.add(store)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="agl-reaper", daemon=True)
                self._thread.start()

    def forget(self, store: Watched) -> None:
        with self._lock:
            self._stores.discard(store)

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            with self._lock:
                stores = list(self._stores)
                if not stores:
                    self._thread = None
                    return
            interval = min(store.scan_interval for store in stores)
            for store in stores:
                try:
                    store.scan_now()
                except Exception:  # one store's trouble must not stop the watch over the others
                    with self._lock:
                        watched = store in self._stores
                    if watched:  # else it was closed during the look
                        logger.exception("looking for lapsed attempts failed; trying again in %.1f s", interval)
            del stores
            pause.wait(interval)


_reaper = _Reaper()


def watch(store: Watched) -> None:
    """Look at the store from now on, for as long as it lives. Cheap when it is watched already."""
    _reaper.watch(store)


def forget(store: Watched) -> None:
    """Stop looking at the store."""
    _reaper.forget(store)


def _after_fork() -> None:
    global _reaper
    _reaper = _Reaper()


os.register_at_fork(after_in_child=_after_fork)
