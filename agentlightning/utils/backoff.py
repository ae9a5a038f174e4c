"""Backoff: the delay before a retry, the retry of calls that may be repeated, and the time before a client gives up on
a server that does not respond.

`Retry-After` is the time that a server requests its clients to wait; every client of this package reads it here.
Source: RFC 9110, section 10.2.3: whole seconds or a date. Fractions are accepted, since model servers send them.
"""

from __future__ import annotations

import asyncio
import email.utils
import itertools
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Final, TypeVar

from agentlightning.errors import BusyError
from agentlightning.utils.concurrency.loops import within
from agentlightning.utils.id import SYSTEM_RANDOM

logger = logging.getLogger(__name__)
T = TypeVar("T")

JITTER = 0.25
"""The fraction by which a delay is randomly shortened or lengthened, so that callers that failed together do not
retry together."""

OUTAGE_SECONDS: Final = 60.0
"""Seconds without a reachable store before a client gives up, unless the user sets `store_unreachable_timeout` of a
runner or `deadline` of a client. The common default of runners, algorithm, gateway and database."""
JUMP_SECONDS: Final = 5.0
"""Seconds by which a wait may end late. A longer delay means that the process was paused, for example by Ctrl+Z, a
frozen container or a frozen machine."""
_FIRST_DELAY, _LONGEST_DELAY = 0.05, 2.0
_TRIES = 6
"""The first try gets the time divided by this number, each further try twice as long as the one before."""
_SHORTEST_TRY = 1.0
LONGEST_RETRY_AFTER: Final = 86_400.0
"""Longest accepted time in seconds; longer times are reduced to it."""


def doubled(failures: int, first: float, longest: float = math.inf) -> float:
    """Return `first`, doubled with each failure after the first one, and at most `longest`."""
    return min(first * 2.0 ** min(max(failures - 1, 0), 30), longest)


def backoff_delay(failures: int, first: float, longest: float = math.inf) -> float:
    """Return the seconds to wait after this number of failures in a row: doubled each time, with jitter."""
    return doubled(failures, first, longest) * SYSTEM_RANDOM.uniform(1 - JITTER, 1 + JITTER)


def backoff_delays(first: float, longest: float = math.inf) -> Iterator[float]:
    """Yield the delay after the first failure, after the second and so on, without end."""
    return (backoff_delay(failures, first, longest) for failures in itertools.count(1))


class Outage:
    """Detects that a server has been unreachable for too long: several failed tries over `seconds`.

    A jump of this process's own clock between two of its calls restarts the outage, since the server may have been
    paused as well. `clock` gives monotonic seconds. Used by one thread.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self.tries = 0
        """Failed tries since the last response or jump."""
        self._clock = clock
        self._since: float | None = None
        self._due = math.inf
        self._jumped = -math.inf

    @property
    def away(self) -> float:
        """Seconds since the first of the failed tries began; 0 before a failed try."""
        return 0.0 if self._since is None else self._clock() - self._since

    @property
    def try_seconds(self) -> float:
        """Seconds for the next try: a part of the time, so that one lost response does not use all of it."""
        first = max(self.seconds / _TRIES, min(_SHORTEST_TRY, self.seconds / 2), 0.01)
        return max(first, min(doubled(self.tries + 1, first), self.seconds - self.away))

    def expect(self, seconds: float) -> bool:
        """Record that the next call follows within `seconds`; return True if the clock has jumped."""
        now = self._clock()
        jumped = now - self._due > JUMP_SECONDS
        if jumped:
            self.answered()
            self._jumped = now
        self._due = now + seconds
        return jumped

    def failed(self, began: float, pause: float = 0.0) -> bool:
        """Record a failed try; return True if it was the last: the next one, after `pause`, would be too late."""
        self.expect(pause)
        now = self._clock()
        self.tries += 1
        if self._since is None:
            self._since = max(min(began, now), self._jumped)
        return self.tries > 1 and now + pause - self._since >= self.seconds

    def answered(self) -> None:
        """Record a response."""
        self.tries, self._since, self._due = 0, None, math.inf


async def retry_for(seconds: float | Outage, call: Callable[[], Coroutine[object, object, T]], what: str) -> T:
    """Return the result of `call`. Retry it with backoff if it gets no response, until the outage is over.

    Raises:
        TimeoutError, OSError, BusyError: the error of the last try.
        Exception: any other error of the call, immediately.
    """
    outage = seconds if isinstance(seconds, Outage) else Outage(seconds)
    delays = backoff_delays(_FIRST_DELAY, _LONGEST_DELAY)
    while True:
        began, limit = time.monotonic(), outage.try_seconds
        outage.expect(limit)
        try:
            answer = await within(limit, call())
        except (TimeoutError, OSError, BusyError) as error:
            delay = max(next(delays), error.retry_after if isinstance(error, BusyError) else 0.0)
            if outage.failed(began, delay):
                raise
            logger.debug("no response to %s (%s); retrying in %.2f s", what, error, delay)
        else:
            outage.answered()
            return answer
        await asyncio.sleep(delay)


def retry_after_seconds(value: str | None) -> float | None:
    """Return the seconds to wait, from 0 to `LONGEST_RETRY_AFTER`; None without a readable header."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, IndexError, OverflowError, OSError):  # raised for odd fields of a date
            return None
    return min(LONGEST_RETRY_AFTER, max(0.0, seconds)) if math.isfinite(seconds) else None
