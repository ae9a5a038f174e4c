"""Checks of the numbers that strategies are given: an error names the setting, the value and what was expected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T", bound=str)


def check_count(name: str, value: int, *, minimum: int = 1) -> int:
    """Return `value` if it is a whole number of at least `minimum`.

    Raises:
        TypeError: it is no whole number (True and False are none).
        ValueError: it is too small.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number of at least {minimum}; got {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}; got {value}")
    return value


def check_seconds(name: str, value: float) -> float:
    """Return `value` if it is a number of seconds: finite and not negative.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative, infinite or NaN.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds; got {value!r}")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be a finite number of seconds, 0 or more; got {value}")
    return float(value)


def check_port(name: str, value: int) -> int:
    """Return `value` if it is a TCP port, or 0 for a free one.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is not within 0 to 65535.
    """
    if check_count(name, value, minimum=0) > 65535:
        raise ValueError(f"{name} must be at most 65535; got {value}")
    return value


def check_choice(name: str, value: str, choices: Sequence[T]) -> T:
    """Return `value` if it is one of the choices, spelt exactly.

    Raises:
        ValueError: it is not.
    """
    for choice in choices:
        if value == choice:
            return choice
    raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")
