"""Typed values from the attributes of one span. A value of the wrong type is reported and skipped; nothing raises.

Other programs write these attributes as lists or as text. The readers of tokens, content and rewards use this module.
"""

from __future__ import annotations

import ast
import math
import reprlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, cast

from pydantic_core import from_json

from agentlightning.base.field_help import explain_fields
from agentlightning.types import Span

Fields = dict[str, Any]
"""A decoded JSON object, or the nested attributes of a span."""
ProblemKind = Literal[
    "bad_attribute",
    "extra_choices",
    "bad_reward",
    "lost_reward",
    "duplicate_span",
    "parent_cycle",
    "failed_call",
    "empty_call",
    "unknown_agent",
]


@explain_fields
@dataclass(frozen=True, slots=True)
class Problem:
    """An excluded part of a trace, and the reason; the rest of the trace was read."""

    kind: ProblemKind
    """Kind of the problem, in a word."""
    span_id: str
    """Span with the problem."""
    detail: str
    """Description with the values, for display."""


class AttributeReader:
    """Reads typed values from a span's attributes. A value of the wrong type counts as absent and is reported."""

    __slots__ = ("attributes", "problems", "span_id")

    def __init__(self, span: Span, problems: list[Problem]) -> None:
        self.attributes: Mapping[str, object] = span.attributes
        self.span_id = span.span_id
        self.problems = problems

    def report(self, key: str, expected: str) -> None:
        text = reprlib.repr(self.attributes.get(key))
        self.problems.append(Problem("bad_attribute", self.span_id, f"{key} is {text}; expected {expected}"))

    def text(self, *keys: str) -> str | None:
        """Return the first non-empty text among the keys."""
        for key in keys:
            value = self.attributes.get(key)
            if isinstance(value, str):
                if value:
                    return value
            elif value is not None:
                self.report(key, "text")
        return None

    def integer(self, key: str) -> int | None:
        value = self.attributes.get(key)
        if value is None or type(value) is int:
            return value
        self.report(key, "an integer")
        return None

    def token_ids(self, *keys: str) -> list[int] | None:
        """Return the first non-empty list of token ids among the keys; in a list of lists, the first list counts."""
        get = self.attributes.get
        for key in keys:
            if (value := get(key)) is None or (isinstance(value, str) and (value := self.decoded(key)) is None):
                continue
            ids = token_ids(value)
            if ids is None and is_list(value) and len(value) > 0:
                ids = token_ids(value[0])
            if ids is None:
                self.report(key, "a list of token ids (integers of at least 0)")
            elif ids:
                return ids
        return None

    def floats(self, key: str) -> list[float] | None:
        value = self.decoded(key)
        if value is None:
            return None
        numbers = finite_floats(value)
        if numbers is None:
            self.report(key, "a list of finite numbers")
        return numbers

    def decoded(self, key: str) -> Any:
        """Return the value of a key, text decoded as JSON or as a Python literal; None if absent or not decodable."""
        value = self.attributes.get(key)
        if not isinstance(value, str):
            return value
        try:
            return decode_text(value)
        except ValueError:
            self.report(key, "JSON or a Python literal")
            return None


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (list, tuple))


def as_dict(value: object) -> Fields:
    """Return the value if it is a dict, otherwise an empty dict."""
    return cast(Fields, value) if isinstance(value, dict) else {}


def dicts_in(value: object) -> list[Fields]:
    """Return the dicts in a list or tuple; none for anything else."""
    return [cast(Fields, item) for item in value if isinstance(item, dict)] if is_list(value) else []


def token_ids(value: object) -> list[int] | None:
    """Return a copy of a list or tuple of integers of at least 0; None for anything else, including booleans."""
    if not is_list(value) or (value and type(value[0]) is not int):
        return None
    try:
        array("Q", value)  # the fastest check of every element
    except (TypeError, OverflowError):
        return None
    return list(value)


def finite_floats(value: object) -> list[float] | None:
    """Return a list or tuple of finite numbers as floats; None for anything else."""
    if not is_list(value):
        return None
    try:
        total = sum(value)  # the fastest check of every element: only finite numbers have a finite sum
    except TypeError:
        return None
    if type(total) is float and math.isfinite(total):
        return list(map(float, value))
    if not set(map(type, value)) <= {int, float}:
        return None
    numbers = list(map(float, value))
    return numbers if all(map(math.isfinite, numbers)) else None


def decode_text(text: str) -> Any:
    """Return the value that a text encodes in JSON or as a Python literal.

    Raises:
        ValueError: it is neither.
    """
    try:
        return from_json(text)  # twice as fast as the standard library on lists of numbers
    except ValueError:
        pass
    try:
        return from_json(_literal_as_json(text))
    except ValueError:
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError("neither JSON nor a Python literal") from error


def decoded(value: object) -> Any:
    """Return a value, a text decoded as JSON or as a Python literal; None for a text that is neither."""
    if not isinstance(value, str):
        return value
    try:
        return decode_text(value)
    except ValueError:
        return None


def _literal_as_json(text: str) -> str:
    """Return a Python literal as JSON, ten times faster to read than by `ast`, where that is certain to be the same.

    Without a double quote and a backslash every string literal is plain and single-quoted, so that the odd parts
    between the quotes are the strings.
    """
    if '"' in text or "\\" in text:
        raise ValueError("needs the real parser")
    if not any(word in text for word in ("None", "True", "False")):
        return text.replace("'", '"')
    parts = text.split("'")
    parts[::2] = [part.replace("None", "null").replace("True", "true").replace("False", "false") for part in parts[::2]]
    return '"'.join(parts)
