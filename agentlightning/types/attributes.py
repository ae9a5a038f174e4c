"""The values that an attribute of a span may hold, and their validation.

A span has a dozen attributes or more, and validating each by a union of eight types took half the time of reading a
span. So attributes with plain values are accepted after one check of their classes. Only others go through the union,
which converts values where it can and reports what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, cast

from pydantic import FailFast, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


class _FailFast(FailFast):
    """Reject a list at its first wrong entry, so that a long one produces one error; allowed in a union."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


_FIRST = _FailFast()
AttributeValue = (
    str
    | bool
    | int
    | float
    | Annotated[list[str], _FIRST]
    | Annotated[list[bool], _FIRST]
    | Annotated[list[int], _FIRST]
    | Annotated[list[float], _FIRST]
)
"""Type of an attribute's value."""

_SCALARS = frozenset((str, bool, int, float))


def _copied_if_plain(value: Any, validate: Callable[[Any], Any]) -> Any:
    """Return a copy of attributes that are already valid, or the result of the union for any others."""
    if value.__class__ is not dict:
        return validate(value)
    copy = cast("dict[str, Any]", value.copy())
    for name, item in value.items():  # one plain loop: sets of the classes take twice as long
        kind = item.__class__
        if name.__class__ is not str:
            return validate(value)
        if kind in _SCALARS:
            continue
        of_items = set(map(type, item)) if kind is list else _SCALARS
        if len(of_items) > 1 or not of_items <= _SCALARS:
            return validate(value)
        copy[name] = item.copy()
    return copy


class _PlainFirst:
    """Validate as `_copied_if_plain` does, and serialize values unchanged, since all of them were validated."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        as_it_is = core_schema.simple_ser_schema("any")
        return core_schema.no_info_wrap_validator_function(_copied_if_plain, handler(source), serialization=as_it_is)


Attributes = Annotated[dict[str, AttributeValue], _PlainFirst()]
"""Attributes of a span, of an event or of a resource, by name."""
