"""The values that an attribute of a span may hold, and their validation.

A span has a dozen attributes or more, and a union of eight types for each was half of what reading a span costs. So
attributes whose values are plain are taken in one look at their classes; only others go through the union, which
converts what may be converted and says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, cast

from pydantic import FailFast, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


class _FailFast(FailFast):
    """Refuses a list at its first wrong entry, so that a long one costs one error; can stand in a union."""

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
"""What an attribute may hold."""

_SCALARS = frozenset((str, bool, int, float))


def _copied_if_plain(value: Any, validate: Callable[[Any], Any]) -> Any:
    """Return a copy of attributes that are right as they are; what the union makes of any others."""
    if value.__class__ is not dict:
        return validate(value)
    copied = cast("dict[str, Any]", value.copy())
    for name, item in value.items():  # one plain loop: sets of the classes take twice as long
        kind = item.__class__
        if name.__class__ is not str:
            return validate(value)
        if kind in _SCALARS:
            continue
        of_items = set(map(type, item)) if kind is list else _SCALARS
        if len(of_items) > 1 or not of_items <= _SCALARS:
            return validate(value)
        copied[name] = item.copy()
    return copied


class _PlainFirst:
    """Validates as `_copied_if_plain` does, and writes values as what they are: all of them were validated."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        as_it_is = core_schema.simple_ser_schema("any")
        return core_schema.no_info_wrap_validator_function(_copied_if_plain, handler(source), serialization=as_it_is)


Attributes = Annotated[dict[str, AttributeValue], _PlainFirst()]
"""The data of a span, of an event or of a resource, by name."""
