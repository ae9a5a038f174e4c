"""Checks of single settings, with errors that say what was wrong and what was expected."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from agentlightning.errors import BadRequestError, closest_name


def check_number(
    name: str,
    value: Any,
    kind: type[int] | type[float],
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> None:
    """Return if the value is a finite number of its kind within its bounds.

    Raises:
        BadRequestError: it is not; names the setting, what was expected and the value.
    """
    numeric = isinstance(value, (int, kind)) and not isinstance(value, bool)
    low = (at_least is not None and numeric and value < at_least) or (above is not None and numeric and value <= above)
    high = (at_most is not None and numeric and value > at_most) or (below is not None and numeric and value >= below)
    if not numeric or not math.isfinite(value) or low or high:
        bounds = {"of at least": at_least, "above": above, "and at most": at_most, "and below": below}
        wanted = " ".join(f"{text} {bound}" for text, bound in bounds.items() if bound is not None)
        article = "a whole number" if kind is int else "a number"
        raise BadRequestError(f"{name} must be {article} {wanted}".rstrip() + f"; got {value!r}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Return if the value is one of the choices.

    Raises:
        BadRequestError: it is not; names the choices and the nearest one.
    """
    if value not in choices:
        near = closest_name(value, choices) if isinstance(value, str) else None
        hint = f". Did you mean {near!r}?" if near else ""
        raise BadRequestError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}{hint}")


def check_flag(name: str, value: object) -> None:
    """Return if the value is True or False.

    Raises:
        BadRequestError: it is something else.
    """
    if not isinstance(value, bool):
        raise BadRequestError(f"{name} must be True or False; got {value!r}")


def refuse_pairs(pairs: Mapping[str, bool]) -> None:
    """Return if none of the pairs is given: `pairs` says of each, named in words, whether it is.

    Raises:
        BadRequestError: one is.
    """
    for text, is_given in pairs.items():
        if is_given:
            raise BadRequestError("These settings do not go together: " + text)
