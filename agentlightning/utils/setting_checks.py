"""Checks of settings, with errors that name the setting, the expectation and the value."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from agentlightning.errors import BadRequestError, closest_name

T = TypeVar("T", bound=str)


@dataclass(frozen=True)
class Bounds:
    """The limits of a number, in an annotation: `Annotated[int, Bounds(at_least=1)]`."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None


def check_fields(settings: object) -> None:
    """Check each field of a dataclass against its annotation: `bool`, a `Literal`, `str` (not empty), and `int` or
    `float` with the limits in `Annotated`. None is allowed if the annotation allows it; fields of other types are not
    checked.

    Raises:
        BadRequestError: a value does not match; the message has the setting, the expectation and the value.
    """
    for name, hint in _hints(type(settings)).items():
        _check(name, getattr(settings, name), hint)


@cache
def _hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _check(name: str, value: object, hint: Any) -> None:
    if get_origin(hint) in (Union, UnionType):
        options = get_args(hint)
        if options[1:] == (type(None),) and value is not None:
            _check(name, value, options[0])
        return
    bounds = Bounds()
    if get_origin(hint) is Annotated:
        hint, bounds = get_args(hint)
    if get_origin(hint) is Literal:
        check_choice(name, value, get_args(hint))
    elif hint is bool and not isinstance(value, bool):
        raise BadRequestError(f"{name} must be True or False; got {value!r}")
    elif hint is str and (not isinstance(value, str) or not value):
        raise BadRequestError(f"{name} must be a non-empty string; got {value!r}")
    elif hint in (int, float):
        check_number(name, value, hint, bounds)


def check_number(name: str, value: Any, kind: type[int] | type[float], bounds: Bounds) -> None:
    """Check that the value is a finite number of this kind within its limits.

    Raises:
        BadRequestError: it is not; the message has the setting, the expectation and the value.
    """
    numeric = isinstance(value, (int, kind)) and not isinstance(value, bool)
    least, above, most, below = bounds.at_least, bounds.above, bounds.at_most, bounds.below
    low = numeric and ((least is not None and value < least) or (above is not None and value <= above))
    high = numeric and ((most is not None and value > most) or (below is not None and value >= below))
    if not numeric or not math.isfinite(value) or low or high:
        words = {"of at least": least, "above": above, "and at most": most, "and below": below}
        requirements = [f"{text} {bound}" for text, bound in words.items() if bound is not None]
        article = "a whole number" if kind is int else "a number"
        raise BadRequestError(f"{' '.join([name, 'must be', article, *requirements])}; got {value!r}")


def check_choice(name: str, value: object, choices: Sequence[T]) -> T:
    """Return the value if it is one of the choices, spelt exactly.

    Raises:
        BadRequestError: it is not; the message has the choices and the nearest one.
    """
    for choice in choices:
        if value == choice:
            return choice
    near = closest_name(value, choices) if isinstance(value, str) else None
    hint = f". Did you mean {near!r}?" if near else ""
    raise BadRequestError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}{hint}")


def check_count(name: str, value: int, *, minimum: int = 1) -> int:
    """Return the value if it is a whole number of at least `minimum`.

    Raises:
        TypeError: the value is not a whole number.
        ValueError: the value is too small.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number of at least {minimum}; got {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}; got {value}")
    return value


def check_amount(name: str, value: float, unit: str = "") -> float:
    """Return the value if it is a finite number and not negative; `unit` is its unit, such as ` of seconds`.

    Raises:
        TypeError: the value is not a number.
        ValueError: the value is not finite, or is negative.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number{unit}; got {value!r}")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be a finite number{unit}, 0 or more; got {value}")
    return value


def check_seconds(name: str, value: float) -> float:
    """Return the value as a float if it is a number of seconds: finite, not negative. Errors as in `check_amount`."""
    return float(check_amount(name, value, " of seconds"))


def check_port(name: str, value: int) -> int:
    """Return the value if it is a TCP port, or 0 for a free one; errors as in `check_count`."""
    if check_count(name, value, minimum=0) > 65535:
        raise ValueError(f"{name} must be at most 65535; got {value}")
    return value


def refuse_pairs(pairs: Mapping[str, bool]) -> None:
    """Check that no pair of incompatible settings is set: `pairs` maps the name of each pair to whether it is.

    Raises:
        BadRequestError: a pair is set.
    """
    for text, is_given in pairs.items():
        if is_given:
            raise BadRequestError("These settings cannot be combined: " + text)


def check_names(
    algorithm: str,
    names: Sequence[str],
    known: Sequence[str],
    *,
    other_names: Mapping[str, str],
    without_meaning: Mapping[str, str] | None = None,
) -> None:
    """Check that an algorithm has all these settings.

    Args:
        other_names: the settings by the names that other libraries use.
        without_meaning: settings of other algorithms, and the reasons why this algorithm does not have them.

    Raises:
        TypeError: a setting is unknown; the message has the nearest setting, or all of them.
    """
    for name in names:
        refused = f"{algorithm} has no setting {name!r}"
        if name in other_names:
            raise TypeError(f"{refused}. Use {other_names[name]} instead")
        if without_meaning and name in without_meaning:
            raise TypeError(f"{refused}: {without_meaning[name]}")
        if name not in known:
            near = closest_name(name, known)
            hint = f"Did you mean {near!r}?" if near else f"The settings are: {', '.join(known)}"
            raise TypeError(f"{refused}. {hint}")
