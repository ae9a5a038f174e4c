"""Waits that ran out of time and will be asked for again in a moment, as a client does that waits in chunks.

They stay parked meanwhile, so that the next chunk of a wait for ten thousand rollouts need not look at each again.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from agentlightning.store.waiters import Waiter

_KEEP_SECONDS = 5.0
_MOST = 64


@dataclass(slots=True, eq=False)
class KeptWait:
    """A parked waiter, what its caller saw, and when (monotonic)."""

    waiter: Waiter
    result: Any
    looked: float


class KeptWaits:
    """The kept waits of one store. Usable from any thread; a wait is taken up again on its own event loop only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits: dict[tuple[Hashable, asyncio.AbstractEventLoop], KeptWait] = {}

    def take(self, what: Hashable, look_again: float | None) -> KeptWait | None:
        """Return the wait for this, if it is kept and nothing has happened to it since; it is then the caller's."""
        with self._lock:
            kept = self._waits.pop((what, asyncio.get_running_loop()), None)
        if kept is None:
            return None
        old = look_again is not None and time.monotonic() - kept.looked > look_again
        if kept.waiter.touched or old:
            kept.waiter.leave()
            return None
        return kept

    def keep(self, what: Hashable, wait: KeptWait) -> bool:
        """Keep a wait for some seconds; False if there is one for this already, or too many."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if (what, loop) in self._waits or len(self._waits) >= _MOST:
                return False
            self._waits[what, loop] = wait
        loop.call_later(_KEEP_SECONDS, self._let_go, what, loop, wait)
        return True

    def _let_go(self, what: Hashable, loop: asyncio.AbstractEventLoop, wait: KeptWait) -> None:
        with self._lock:
            if self._waits.get((what, loop)) is not wait:
                return
            del self._waits[what, loop]
        wait.waiter.leave()
