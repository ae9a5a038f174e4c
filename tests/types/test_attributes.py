"""Attributes of spans: plain ones are taken at a look, and what comes out is what the union of types makes of them."""

import enum
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

import agentlightning as agl
from agentlightning.types.attributes import Attributes, AttributeValue

QUICK: TypeAdapter[Any] = TypeAdapter(Attributes)
UNION: TypeAdapter[Any] = TypeAdapter(dict[str, AttributeValue])


class Colour(enum.StrEnum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Text(str):
    pass


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
)
ODD = [Colour.RED, Level.HIGH, Text("t"), b"x", (1, 2), ("a",), [Level.HIGH], [Text("t"), "u"], object(), [[1]], {1}]


def outcome(adapter: TypeAdapter[Any], text: str | None, value: Any) -> object:
    """Return the types and values of a value, or the place and reason of its refusal."""
    try:
        made = adapter.validate_python(value) if text is None else adapter.validate_json(text)
    except ValidationError as error:
        return [(each["loc"], each["type"], each["msg"]) for each in error.errors(include_url=False)]
    return {
        key: (type(item), repr(item), [type(x) for x in item] if type(item) is list else 0)
        for key, item in made.items()
    }


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4))
def test_the_quick_way_makes_what_the_union_makes(value: dict[str, Any]) -> None:
    assert outcome(QUICK, None, value) == outcome(UNION, None, value)
    text = json.dumps(value)
    assert outcome(QUICK, text, None) == outcome(UNION, text, None)


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: type(odd).__name__)
def test_values_of_other_classes_are_converted_or_refused_as_before(odd: object) -> None:
    for value in ({"a": odd}, {"a": 1, "b": [1], "c": odd}, {odd: 1} if odd.__hash__ else odd, odd):
        assert outcome(QUICK, None, value) == outcome(UNION, None, value)


def test_a_span_shares_nothing_with_what_it_was_made_of() -> None:
    given_attributes: dict[str, Any] = {"ids": [1, 2], "text": "t"}
    span = agl.Span.from_attributes(attributes=given_attributes)
    given_attributes["ids"].append(3)
    given_attributes["text"] = "u"
    assert span.attributes == {"ids": [1, 2], "text": "t"}


def test_a_span_is_written_and_read_back_with_every_kind_of_value() -> None:
    attributes: Any = {
        "text": "Grüße \x00", "yes": True, "one": 1, "big": 10**25, "half": 0.5, "endless": math.inf,
        "texts": ["a"], "flags": [True], "ids": [1, 2], "figures": [0.5, -math.inf], "none": [],
    }  # fmt: skip
    span = agl.Span.from_attributes(attributes=attributes)
    again = agl.Span.model_validate_json(span.model_dump_json())
    assert again == span
    assert {key: type(value) for key, value in again.attributes.items()} == {
        key: type(value) for key, value in attributes.items()
    }


def test_the_schema_of_attributes_is_that_of_the_union() -> None:
    for mode in ("validation", "serialization"):
        assert QUICK.json_schema(mode=mode) == UNION.json_schema(mode=mode)
