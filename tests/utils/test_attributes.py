"""Nested values as span attributes and back."""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import math
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from agentlightning.utils.attributes import MOST_ELEMENTS
from agentlightning.utils.otel import (
    check_attributes_sanity,
    filter_and_unflatten_attributes,
    filter_attributes,
    flatten_attributes,
    sanitize_attribute_value,
    sanitize_attributes,
    sanitize_list_attribute_sanity,
    unflatten_attributes,
)

leaves = st.one_of(st.integers(), st.text(), st.booleans(), st.floats(allow_nan=False), st.none())
names = st.text("abcdef_", min_size=1, max_size=5)
nested = st.recursive(
    leaves,
    lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(names, inner, min_size=1, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(names, nested, min_size=1, max_size=4), st.booleans())
def test_what_was_flattened_comes_back(value: dict[str, Any], expand: bool) -> None:
    assert unflatten_attributes(flatten_attributes(value, expand_leaf_lists=expand)) == value


@pytest.mark.parametrize(
    ("value", "expand", "flat"),
    [
        ({"a": {"b": 1}, "c": [1, 2]}, False, {"a.b": 1, "c": [1, 2]}),
        ({"c": [1, 2]}, True, {"c.0": 1, "c.1": 2}),
        ([1, 2], False, {"0": 1, "1": 2}),
        ({"c": [{"d": 1}, 2]}, False, {"c.0.d": 1, "c.1": 2}),
        ({"a": {}, "b": []}, False, {}),
        ({"a": None, "t": (1, 2)}, False, {"a": None, "t": (1, 2)}),
        (5, False, {"": 5}),
    ],
)
def test_flat_forms(value: Any, expand: bool, flat: dict[str, Any]) -> None:
    assert flatten_attributes(value, expand_leaf_lists=expand) == flat


def test_a_list_of_mixed_types_is_numbered_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert flatten_attributes({"a": [1, "x"]}) == {"a.0": 1, "a.1": "x"}
    assert "mixes int, str" in caplog.text


def test_a_key_that_is_no_string_is_named_with_its_place() -> None:
    with pytest.raises(ValueError, match=r"3 of type int at 'a\.b'"):
        flatten_attributes({"a": {"b": {3: 1}}})


@pytest.mark.parametrize(
    ("flat", "value"),
    [
        ({}, {}),
        ({"a.0": 1, "a.1": 2}, {"a": [1, 2]}),
        ({"a.0": 1, "a.2": 2}, {"a": {"0": 1, "2": 2}}),
        ({"a.00": 1}, {"a": {"00": 1}}),
        ({"a": 1, "a.b": 2}, {"a": {"b": 2}}),
        ({"a.b": 2, "a": 1}, {"a": 1}),
    ],
)
def test_nested_forms(flat: dict[str, Any], value: Any) -> None:
    assert unflatten_attributes(flat) == value


def test_a_prefix_takes_itself_and_what_is_below() -> None:
    attributes = {"x": 1, "x.y": 2, "xy": 3}
    assert filter_attributes(attributes, "x") == {"x": 1, "x.y": 2}
    assert filter_and_unflatten_attributes({"x.y": 2, "xy": 3}, "x") == {"y": 2}
    assert filter_and_unflatten_attributes({"xy": 3}, "x") == {}


def test_a_value_at_the_prefix_itself_is_no_branch() -> None:
    with pytest.raises(ValueError, match="'x' has a value"):
        filter_and_unflatten_attributes({"x": 1}, "x")


@pytest.mark.parametrize(
    ("value", "sane"),
    [
        (True, True),
        ([True, 2], [1, 2]),
        ([1, 2.5, True], [1.0, 2.5, 1.0]),
        ([], []),
        (None, "null"),
        ({"a": 1}, '{"a": 1}'),
        ([1, "x"], '[1, "x"]'),
    ],
)
def test_values_are_made_to_fit(value: Any, sane: Any) -> None:
    assert sanitize_attribute_value(value) == sane
    assert type(sanitize_attribute_value(value)) is type(sane)


class _Model(BaseModel):
    when: datetime.datetime = datetime.datetime(2026, 1, 2)


@dataclasses.dataclass
class _Data:
    model: _Model
    path: Path = Path("a/b")


class _Level(Enum):
    HIGH = "high"


@pytest.mark.parametrize(
    ("value", "sane"),
    [
        (_Model(), '{"when": "2026-01-02T00:00:00"}'),
        ({"data": _Data(_Model())}, '{"data": {"model": {"when": "2026-01-02T00:00:00"}, "path": "a/b"}}'),
        ([{"when": datetime.date(2026, 1, 2)}], '[{"when": "2026-01-02"}]'),
        ({"n": math.nan, "ok": 1.5}, '{"n": "nan", "ok": 1.5}'),
        ({_Level.HIGH: 1, 2: _Level.HIGH}, '{"high": 1, "2": "high"}'),
        ({"raw": b"ab"}, '{"raw": "YWI="}'),
        (_Level.HIGH, "high"),
        ({1, 2}, [1, 2]),
        (np.float32(1.5), 1.5),
        (np.arange(3), [0, 1, 2]),
        ({"row": np.array([[1.5]])}, '{"row": [[1.5]]}'),
    ],
)
def test_what_json_cannot_hold_becomes_json_of_what_it_means_when_forced(value: Any, sane: Any) -> None:
    assert sanitize_attribute_value(value) == sane
    assert type(sanitize_attribute_value(value)) is type(sane)
    with pytest.raises(ValueError, match="Object must be JSON serializable"):
        sanitize_attribute_value(value, force=False)
    with pytest.raises(ValueError, match="Failed to sanitize attribute 'k'"):
        sanitize_attributes({"k": value}, force=False)


class _Login(BaseModel):
    user: str = "u"
    key: str = Field(default="sk-hidden", repr=False)
    token: str = Field(default="sk-hidden", exclude=True)


@dataclasses.dataclass
class _Session:
    user: str = "u"
    key: str = dataclasses.field(default="sk-hidden", repr=False)


@pytest.mark.parametrize("value", [_Login(), _Session()])
def test_fields_that_a_class_does_not_show_are_left_out(value: object) -> None:
    assert sanitize_attribute_value(value) == '{"user": "u"}'


def test_of_a_large_array_its_short_text_is_kept() -> None:
    assert len(sanitize_attribute_value(np.zeros(MOST_ELEMENTS))) == MOST_ELEMENTS
    large = sanitize_attribute_value({"image": np.zeros((MOST_ELEMENTS, 2))})
    assert len(large) < 1000
    assert json.loads(large)["image"].startswith("[[0. 0.]")


def test_a_generator_is_named_and_not_used_up_and_a_cycle_is_text() -> None:
    numbers = (number for number in range(3))
    assert "generator object" in json.loads(sanitize_attribute_value({"g": numbers}))["g"]
    assert list(numbers) == [0, 1, 2]
    cycle: dict[str, Any] = {}
    cycle["again"] = cycle
    assert sanitize_attribute_value(cycle) == "{'again': {...}}"


def test_a_list_without_a_common_type_is_refused() -> None:
    with pytest.raises(ValueError, match="List must contain only one type of primitive values, got: int, str"):
        sanitize_list_attribute_sanity([1, "x"])


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({1: "x"}, "Attribute key must be a string"),
        ({"k": [1, "x"]}, "Failed to sanitize list attribute 'k'"),
        ({"k": None}, "Attribute value must be a string, int, float, bool, or list of these"),
        ({"k": (1, 2)}, "Attribute value must be a string, int, float, bool, or list of these"),
    ],
)
def test_attributes_that_a_span_cannot_hold_are_refused_by_key(attributes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_attributes_sanity(attributes)
