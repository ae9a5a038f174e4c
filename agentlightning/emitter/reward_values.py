"""What a reward is: a finite number, or several by name, of which one is learnt from. None is no reward.

The one rule for what agents emit and return, for `reward_fn`, policy faults and exit codes, and for spans that are
read back.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, cast

_PRIMARY_NAMES = ("reward", "primary")


def as_number(value: object) -> float | None:
    """Return a number as a float (Python's, NumPy's, a tensor of one element), None for anything else."""
    if isinstance(value, (bool, int, float, numbers.Real)):
        return float(value)
    item = getattr(value, "item", None)
    if getattr(value, "ndim", None) == 0 and callable(item):
        return as_number(item())
    return None


def as_reward(value: object) -> float | None:
    """Return a reward as a float; None for what is no finite number."""
    number = as_number(value)
    return number if number is not None and math.isfinite(number) else None


def checked_reward(value: object) -> float:
    """Return a reward as a float.

    Raises:
        TypeError: it is no number.
        ValueError: it is NaN or infinite.
    """
    number = as_number(value)
    if number is None:
        raise TypeError(f"Reward must be a number, got: {type(value).__name__}")
    if not math.isfinite(number):
        raise ValueError(f"Reward must be finite, got: {number}")
    return number


def are_dimensions(value: object) -> TypeGuard[Mapping[str, Any]]:
    """True for a dictionary of numbers by name, which is a reward of several dimensions."""
    if not isinstance(value, Mapping) or not value:
        return False
    items = cast("Mapping[Any, Any]", value).items()
    return all(isinstance(name, str) and as_number(number) is not None for name, number in items)


def primary_dimension(values: Mapping[str, Any], declared: Sequence[str] = ()) -> str | None:
    """Return the name of the dimension to learn from, None if it is not there: the first of those that were declared,
    else `reward` or `primary`."""
    return next((name for name in declared[:1] or _PRIMARY_NAMES if name in values), None)
