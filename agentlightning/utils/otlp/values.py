"""Conversion of OTLP's values to values that a span may hold, and back.

A span holds strings, booleans, integers, floats and lists of one of these. OTLP has more: lists of mixed or nested
values, key-value lists, bytes, empty values. Those are kept as JSON text, bytes as base64 text: no value is an error.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue

from agentlightning.types import Attributes, AttributeValue

_SCALARS = frozenset(("string_value", "bool_value", "int_value", "double_value"))
_NUMBERS = frozenset(("int_value", "double_value"))
_LARGEST_INT = 2**63 - 1


def attributes_of(pairs: Iterable[KeyValue]) -> Attributes:
    """Return key-value pairs as attributes; the last one counts if a key repeats."""
    attributes: Attributes = {}
    for pair in pairs:
        value = pair.value  # each of the three is empty unless it is the kind; asking for the kind costs more
        attributes[pair.key] = value.string_value or value.int_value or value.double_value or _attribute(value)
    return attributes


def _attribute(value: AnyValue) -> AttributeValue:
    kind = value.WhichOneof("value")
    if kind in _SCALARS:
        return getattr(value, cast(str, kind))
    if kind == "bytes_value":
        return _base64(value.bytes_value)
    if kind != "array_value":
        return json.dumps(_json_value(value))
    values = value.array_value.values
    if not values:
        return []
    first = cast(str, values[0].WhichOneof("value"))
    if first in _SCALARS:
        items = [getattr(item, first) for item in values]
        if all(items):  # none is empty, so all are of the kind of the first
            return items
    kinds = {item.WhichOneof("value") for item in values}
    if len(kinds) == 1:
        (kind,) = kinds
        if kind in _SCALARS:
            return [getattr(item, cast(str, kind)) for item in values]
        if kind == "bytes_value":
            return [_base64(item.bytes_value) for item in values]
    elif kinds == _NUMBERS:
        return [float(item.int_value or item.double_value) for item in values]
    return json.dumps([_json_value(item) for item in values])


def _json_value(value: AnyValue) -> Any:
    """Return any value as JSON data. Numbers that JSON lacks become their OTLP/JSON names."""
    kind = value.WhichOneof("value")
    if kind == "double_value" and not math.isfinite(value.double_value):
        return "NaN" if math.isnan(value.double_value) else "Infinity" if value.double_value > 0 else "-Infinity"
    if kind in _SCALARS:
        return getattr(value, cast(str, kind))
    if kind == "bytes_value":
        return _base64(value.bytes_value)
    if kind == "array_value":
        return [_json_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return {pair.key: _json_value(pair.value) for pair in value.kvlist_value.values}
    return None


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def pairs_of(attributes: Mapping[str, AttributeValue]) -> list[KeyValue]:
    """Return attributes as key-value pairs."""
    return [KeyValue(key=key, value=any_value(value)) for key, value in attributes.items()]


def any_value(value: object) -> AnyValue:
    """Return a value in OTLP's form. Integers beyond 64 bits become text, values of other types JSON text."""
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value) if abs(value) <= _LARGEST_INT else AnyValue(string_value=str(value))
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, (list, tuple)):
        return AnyValue(array_value=ArrayValue(values=[any_value(item) for item in cast("list[Any]", value)]))
    return AnyValue(string_value=json.dumps(value, default=str))
