"""The values of a reward, and the readers of rewards on spans.

A reward is a finite number of at most 1e15 in size, or several by name, one of which is used for training; None means
no reward.
The same rule holds for emitted and returned rewards, for `reward_fn`, policy faults and exit codes, and for spans.

The readers never raise: a span with an invalid reward has no reward. The emitter, the adapters and the store, which
keeps the final reward of each attempt, use them.
"""

from __future__ import annotations

import json
import logging
import math
import numbers
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Final, TypeGuard, cast

from pydantic import TypeAdapter

from agentlightning.errors import RewardError
from agentlightning.semconv import AGL_ANNOTATION, LightningSpanAttributes, RewardPydanticModel
from agentlightning.types import SpanLike
from agentlightning.utils.attributes import filter_and_unflatten_attributes

logger = logging.getLogger(__name__)

REWARD: Final = LightningSpanAttributes.REWARD.value
_LEGACY_OUTPUTS: Final = ("agentops.task.output", "agentops.entity.output")
_PREFIX: Final = f"{REWARD}."
LARGEST_REWARD: Final = 1e15
"""Largest absolute value: sums, squares and differences of all rewards stay finite, also in 32 bits."""
USABLE_REWARD: Final = f"a finite number of at most {LARGEST_REWARD:g} in magnitude (scale or clip larger ones)"
MARKS: Final = (_PREFIX.encode(), *(key.encode() for key in _LEGACY_OUTPUTS), AGL_ANNOTATION.encode())
"""Strings: the encoded form of every span with a reward contains at least one of them."""


def as_number(value: object) -> float | None:
    """Return a number as a float (Python's, NumPy's, a tensor of one element), None for anything else."""
    if isinstance(value, (bool, int, float, numbers.Real)):
        try:
            return float(value)
        except OverflowError:  # a whole number beyond every float
            return -math.inf if value != abs(value) else math.inf
    item = getattr(value, "item", None)
    if getattr(value, "ndim", None) == 0 and callable(item):
        return as_number(item())
    return None


def as_reward(value: object) -> float | None:
    """Return a reward as a float; None if it is not a finite number, or larger than `LARGEST_REWARD`."""
    number = as_number(value)
    return number if number is not None and abs(number) <= LARGEST_REWARD else None


def checked_reward(value: object) -> float:
    """Return a reward as a float.

    Raises:
        RewardError: the value is not a number, or is NaN, infinite, or more than 1e15 in size.
    """
    number = as_number(value)
    if number is None:
        raise RewardError(f"Reward must be a number, got: {type(value).__name__}")
    if not math.isfinite(number):
        raise RewardError(f"Reward must be finite, got: {number}")
    if as_reward(number) is None:
        raise RewardError(f"Reward must be at most {LARGEST_REWARD:g} in magnitude, got: {number}; scale or clip it")
    return number


def are_dimensions(value: object) -> TypeGuard[Mapping[str, Any]]:
    """True for a dictionary of numbers by name, which is a reward of several dimensions."""
    if not isinstance(value, Mapping) or not value:
        return False
    items = cast("Mapping[Any, Any]", value).items()
    return all(isinstance(name, str) and as_number(number) is not None for name, number in items)


def primary_dimension(values: Mapping[str, Any], declared: Sequence[str] = ()) -> str | None:
    """Return the name of the dimension to train on: the first declared one, else `reward` or `primary`; None if the
    values do not have it."""
    return next((name for name in declared[:1] or ("reward", "primary") if name in values), None)


def may_hold_reward(span: SpanLike) -> bool:
    """Return False for a span that certainly has no reward, by a cheap check: most spans have none."""
    attributes = span.attributes
    if not attributes:
        return False
    return (
        _PREFIX in "\n".join(attributes)
        or _LEGACY_OUTPUTS[0] in attributes
        or _LEGACY_OUTPUTS[1] in attributes
        or (span.name == AGL_ANNOTATION and "reward" in attributes)
    )


def get_rewards_from_span(span: SpanLike) -> list[RewardPydanticModel]:
    """Return the dimensions of the reward on this span, the primary one first; none if it has no readable reward."""
    attributes = span.attributes or {}
    if _PREFIX not in "\n".join(attributes) or not any(key.startswith(_PREFIX) for key in attributes):
        return []  # the first look costs a tenth of the second, and most spans have no reward
    try:
        dimensions = filter_and_unflatten_attributes(cast(Mapping[str, Any], attributes), REWARD)
        return _dimensions_type().validate_python(dimensions)
    except ValueError as error:
        logger.warning("Span %s has reward attributes that cannot be read: %s", span.name, error)
        return []


@cache  # made at its first use: importing this takes no time
def _dimensions_type() -> TypeAdapter[list[RewardPydanticModel]]:
    return TypeAdapter(list[RewardPydanticModel])


def get_reward_value(span: SpanLike) -> float | None:
    """Return the primary reward on this span, also in the forms of older versions; None without a reward."""
    rewards = get_rewards_from_span(span)
    return rewards[0].value if rewards else _in_older_form(span)


def _in_older_form(span: SpanLike) -> float | None:
    attributes = span.attributes or {}
    for key in _LEGACY_OUTPUTS:  # `{"type": "reward", "value": ...}`, given as text or as a dictionary
        output: object = attributes.get(key)
        if isinstance(output, str):
            with suppress(ValueError):
                output = json.loads(output)
        fields = cast(dict[str, Any], output) if isinstance(output, dict) else {}
        if fields.get("type") == "reward" and (value := as_number(fields.get("value"))) is not None:
            return value
    if span.name == AGL_ANNOTATION and "reward" in attributes:
        return as_number(attributes["reward"])
    return None


def find_final_reward(spans: Sequence[SpanLike]) -> float | None:
    """Return the last reward in the given order; None without rewards."""
    for span in reversed(spans):
        value = get_reward_value(span)
        if value is not None:
            return value
    return None


def reward_of_span(span: SpanLike) -> tuple[float | None, dict[str, float] | None] | None:
    """Return the usable reward on a span and its usable dimensions by name; None if it has no reward.

    An unusable reward still counts as a reward: if it is the last one, it is the final reward, and the attempt is not
    used for training.
    """
    if not may_hold_reward(span):
        return None
    dimensions = get_rewards_from_span(span)
    value = dimensions[0].value if dimensions else _in_older_form(span)
    if value is None:
        return None
    usable = {each.name: each.value for each in dimensions if as_reward(each.value) is not None}
    return as_reward(value), usable or None
