"""The `Retry-After` header: how long a server asks its clients to wait. Every client of ours reads it here.

Source: RFC 9110, section 10.2.3: a whole number of seconds, or a date. Fractions of a second are read too, since model
servers send them.
"""

from __future__ import annotations

import email.utils
import math
import time
from typing import Final

LONGEST_RETRY_AFTER: Final = 86_400.0
"""Seconds; a longer time is cut to this."""


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
