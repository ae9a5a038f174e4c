"""The clock of a database, as its clients know it: this machine's, set by the difference that was seen last.

Machines with clocks that differ then agree on the order of the queue, on leases and on limits, up to half a round trip.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)
_WORTH_A_WARNING_SECONDS = 5.0


class SharedClock:
    """Wall-clock seconds of a server. Usable from any thread."""

    def __init__(self) -> None:
        self._ahead = 0.0
        self._warned = False

    def now(self) -> float:
        """Return the server's time as far as it is known."""
        return time.time() + self._ahead

    def set(self, ask: Callable[[], float]) -> None:
        """Ask the server for its time and note by how much it is ahead (the answer is from half-way between)."""
        began = time.time()
        theirs = ask()
        self._ahead = theirs - (began + time.time()) / 2
        if abs(self._ahead) > _WORTH_A_WARNING_SECONDS and not self._warned:
            self._warned = True
            logger.warning(
                "the clock of this machine and that of the database differ by %.1f s; the store goes by the database's",
                self._ahead,
            )
