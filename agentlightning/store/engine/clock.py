"""The clock of a database, as its clients know it: this machine's monotonic one, set by what the server said last.

Machines with clocks that differ then agree on the order of the queue, on leases and on limits, up to half a round trip.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)
_WORTH_A_WARNING_SECONDS = 5.0


class SharedClock:
    """Wall-clock seconds of a server. Usable from any thread. A jump of this machine's own clock does not change it."""

    def __init__(self) -> None:
        self._at_zero: float | None = None
        """The server's time when this machine's monotonic clock stood at zero."""
        self._warned = False

    def now(self) -> float:
        """Return the server's time as far as it is known; this machine's before it was asked for."""
        return time.time() if self._at_zero is None else time.monotonic() + self._at_zero

    def set(self, ask: Callable[[], float]) -> None:
        """Ask the server for its time and note it (the answer is from half-way between)."""
        began = time.monotonic()
        theirs = ask()
        self._at_zero = theirs - (began + time.monotonic()) / 2
        ahead = self.now() - time.time()
        if abs(ahead) > _WORTH_A_WARNING_SECONDS and not self._warned:
            self._warned = True
            logger.warning(
                "the clock of this machine and that of the database differ by %.1f s; the store goes by the database's",
                ahead,
            )
