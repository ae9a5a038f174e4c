"""Random identifiers and times, drawn from the system's randomness."""

from __future__ import annotations

import hashlib
import os
from random import SystemRandom
from typing import Final

SYSTEM_RANDOM: Final = SystemRandom()
"""The random source of waits, samples and ids of the framework. It is independent of `random`, which an agent may seed,
and forked processes do not share it."""


def generate_id(length: int) -> str:
    """Return `length` random lower-case hexadecimal characters.

    Raises:
        ValueError: `length` is not positive.
    """
    if length <= 0:
        raise ValueError("length must be a positive integer")
    return os.urandom((length + 1) // 2).hex()[:length]


def derive_id(token: str, index: int, length: int) -> str:
    """Return the `index`-th identifier that belongs to `token`; the same token always has the same identifiers."""
    return hashlib.sha256(f"{token}/{index}".encode()).hexdigest()[:length]


def count_id(first: int, index: int, length: int) -> str:
    """Return the `index`-th identifier after a random `first`."""
    return f"{first + index:0{length}x}"[-length:]
