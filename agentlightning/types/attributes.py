"""The types of span attributes, and their validation.

A span has a dozen attributes or more. Validating each one with a union of eight types takes half the time of reading a
span, so attributes with plain values are accepted after a check of their classes. The union validates only the others:
it converts values if possible and reports wrong ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, cast

from pydantic import FailFast, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


class _FailFast(FailFast):
    """Reject a list at its first wrong entry, so that a long list causes one error. Can be used in a union."""

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
    """Return a copy of attributes that are already valid; validate others with the union."""
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
    """Validate with `_copied_if_plain`. Serialize values unchanged, because all of them were validated."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        as_it_is = core_schema.simple_ser_schema("any")
        return core_schema.no_info_wrap_validator_function(_copied_if_plain, handler(source), serialization=as_it_is)


Attributes = Annotated[dict[str, AttributeValue], _PlainFirst()]
"""Attributes of a span, of an event or of a resource, by name."""
