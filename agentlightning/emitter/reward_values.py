"""Values of a reward: a finite number of at most 1e15 in size, or several by name, of which one is trained on. None is
no reward.

The same rule holds for emitted and returned rewards, for `reward_fn`, policy faults and exit codes, and for spans
that are read back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, cast

from agentlightning.errors import RewardError
from agentlightning.utils.rewards import LARGEST_REWARD, USABLE_REWARD, as_number, as_reward

__all__ = ["USABLE_REWARD", "are_dimensions", "as_number", "as_reward", "checked_reward", "primary_dimension"]

_PRIMARY_NAMES = ("reward", "primary")


def checked_reward(value: object) -> float:
    """Return a reward as a float.

    Raises:
        RewardError: it is no number, NaN, infinite, or more than 1e15 in size.
    """
    number = as_number(value)
    if number is None:
        raise RewardError(f"Reward must be a number, got: {type(value).__name__}")
    if not math.isfinite(number):
        raise RewardError(f"Reward must be finite, got: {number}")
    if as_reward(number) is None:
        raise RewardError(f"Reward must be at most {LARGEST_REWARD:g} in size, got: {number}; scale or clip it")
    return number


def are_dimensions(value: object) -> TypeGuard[Mapping[str, Any]]:
    """True for a dictionary of numbers by name, which is a reward of several dimensions."""
    if not isinstance(value, Mapping) or not value:
        return False
    items = cast("Mapping[Any, Any]", value).items()
    return all(isinstance(name, str) and as_number(number) is not None for name, number in items)


def primary_dimension(values: Mapping[str, Any], declared: Sequence[str] = ()) -> str | None:
    """Return the name of the dimension to train on, None if it is not there: the first of those that were declared,
    else `reward` or `primary`."""
    return next((name for name in declared[:1] or _PRIMARY_NAMES if name in values), None)
