"""Backoff: how long to wait before something is tried again, and the retry of calls that may be made twice.

`Retry-After` is how long a server asks its clients to wait; every client of ours reads it here. Source: RFC 9110,
section 10.2.3: a whole number of seconds, or a date. Fractions of a second are read too, since model servers send them.
"""

from __future__ import annotations

import asyncio
import email.utils
import itertools
import logging
import math
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Final, TypeVar

from agentlightning.errors import BusyError
from agentlightning.utils.concurrency.loops import within

logger = logging.getLogger(__name__)
T = TypeVar("T")

JITTER = 0.25
"""The part of a delay by which it is shortened or lengthened at random, so that those who failed together do not
retry together."""

_FIRST_DELAY, _LONGEST_DELAY = 0.05, 2.0
_TRIES = 6
"""The first try gets this part of the time, each further one twice as long as the one before."""
_SHORTEST_TRY = 1.0
LONGEST_RETRY_AFTER: Final = 86_400.0
"""Seconds; a longer time is cut to this."""


def doubled(failures: int, first: float, longest: float = math.inf) -> float:
    """Return `first`, doubled with each failure after the first one, and at most `longest`."""
    return min(first * 2.0 ** min(max(failures - 1, 0), 30), longest)


def backoff_delay(failures: int, first: float, longest: float = math.inf) -> float:
    """Return the seconds to wait after so many failures in a row: doubled each time, with jitter."""
    return doubled(failures, first, longest) * random.uniform(1 - JITTER, 1 + JITTER)


def backoff_delays(first: float, longest: float = math.inf) -> Iterator[float]:
    """Yield the delay after the first failure, the second and so on, without end."""
    return (backoff_delay(failures, first, longest) for failures in itertools.count(1))


async def retry_for(seconds: float, call: Callable[[], Coroutine[object, object, T]], what: str) -> T:
    """Return what `call` gives; made again with backoff while it is not answered, for `seconds` at most.

    One try gets a part of the time only, so that an answer that was lost does not take all of it.

    Raises:
        TimeoutError, OSError, BusyError: that of the last try.
        Exception: whatever else the call raises, at once.
    """
    end, delays = time.monotonic() + seconds, backoff_delays(_FIRST_DELAY, _LONGEST_DELAY)
    limit = max(seconds / _TRIES, min(_SHORTEST_TRY, seconds))
    while True:
        try:
            return await within(max(min(limit, end - time.monotonic()), 0.01), call())
        except (TimeoutError, OSError, BusyError) as error:
            delay = max(next(delays), error.retry_after if isinstance(error, BusyError) else 0.0)
            if time.monotonic() + delay >= end:
                raise
            logger.debug("no answer to %s (%s); next try in %.2f s", what, error, delay)
        await asyncio.sleep(delay)
        limit *= 2


def retry_after_seconds(value: str | None) -> float | None:
    """Return the seconds to wait, finite, from 0 to `LONGEST_RETRY_AFTER`; None without a header that can be read."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, IndexError, OverflowError, OSError):  # what odd fields of a date raise
            return None
    return min(LONGEST_RETRY_AFTER, max(0.0, seconds)) if math.isfinite(seconds) else None
