"""Span attributes: conversion of nested values to flat dotted keys and back, and values that a span may hold.

A span holds strings, booleans, integers, floats and lists of one of these. Everything else is either converted
(`sanitize_*`) or rejected (`check_attributes_sanity`). Flattening loses empty containers, and keys that contain dots
become nested when they are read back. To get a value back exactly, store it as JSON text.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import datetime
import json
import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, cast

from pydantic import BaseModel

logger = logging.getLogger(__name__)

_PRIMITIVES = (bool, int, float, str)
MOST_ELEMENTS = 2**16
"""Maximum number of elements of an array to convert; larger arrays, such as images, take seconds per span."""


def flatten_attributes(data: object, *, expand_leaf_lists: bool = False) -> dict[str, Any]:
    """Return the leaves of nested dictionaries and lists under dotted keys: `{"a": {"b": 1}}` gives `{"a.b": 1}`.

    A list of one primitive type is a leaf and is kept, unless `expand_leaf_lists` is true or it is the root. Items of
    other lists are numbered (`a.0`, `a.1`). A scalar root has the key "".

    Raises:
        ValueError: a dictionary has a key that is not a string.
    """
    return dict(_leaves(data, "", expand_leaf_lists))


def _leaves(value: object, path: str, expand: bool) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, item in cast(Mapping[Any, Any], value).items():
            if not isinstance(key, str):
                raise ValueError(
                    f"Only string keys can be flattened; got {key!r} of type {type(key).__name__} "
                    f"at {path or 'the root'!r}. Convert it to a string first."
                )
            yield from _leaves(item, f"{path}.{key}" if path else key, expand)
        return
    if isinstance(value, list):
        items = cast(list[Any], value)
        kinds: set[type[Any]] = {type(item) for item in items} if path and not expand else set()
        primitive = kinds <= set(_PRIMITIVES)
        if len(kinds) > 1 and primitive:
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            logger.warning("List at %r mixes %s; its elements become separate attributes", path, names)
        if len(kinds) != 1 or not primitive:  # else it can be one attribute
            for index, item in enumerate(items):
                yield from _leaves(item, f"{path}.{index}" if path else str(index), expand)
            return
    yield path, value


class _Node(dict[str, Any]):
    """A branch while the tree is rebuilt; a dictionary that is a leaf is not a `_Node`."""


def unflatten_attributes(flat_data: Mapping[str, object]) -> Any:
    """Return the nested value with these leaves. A branch with exactly the keys 0..n-1 becomes a list.

    If two keys have the same position, the later one is used, but a path replaces a scalar that it continues.
    """
    root = _Node()
    for key, value in flat_data.items():
        node = root
        *parents, last = key.split(".")
        for part in parents:
            child = node.get(part)
            if not isinstance(child, _Node):
                child = node[part] = _Node()
            node = child
        node[last] = value
    return _rebuilt(root) if root else {}


def _rebuilt(node: object) -> Any:
    if not isinstance(node, _Node):
        return node
    if "0" in node and all(str(index) in node for index in range(len(node))):
        return [_rebuilt(node[str(index)]) for index in range(len(node))]
    return {key: _rebuilt(value) for key, value in node.items()}


def filter_attributes(attributes: Mapping[str, object], prefix: str) -> dict[str, Any]:
    """Return the entries with the key `prefix`, or with a key that continues it after a dot."""
    return {key: value for key, value in attributes.items() if key == prefix or key.startswith(prefix + ".")}


def filter_and_unflatten_attributes(attributes: Mapping[str, object], prefix: str) -> Any:
    """Return the nested value below `prefix`; `{}` if no key is below it.

    Raises:
        ValueError: `prefix` itself has a value.
    """
    below = filter_attributes(attributes, prefix)
    if prefix in below:
        raise ValueError(f"Attribute {prefix!r} has a value; expected only keys below it, such as {prefix}.0")
    return unflatten_attributes({key[len(prefix) + 1 :]: value for key, value in below.items()})


def sanitize_attribute_value(object: Any, force: bool = True) -> Any:
    """Return a value that a span may hold: primitives unchanged, lists with a common type, the rest as JSON text.

    `force` converts values that JSON cannot hold: pydantic models and dataclasses to objects, sets and arrays to lists,
    bytes to base64, enums to their values, dates and all others to text. So the text is always JSON. Fields that
    their class excludes from its `repr` (or a model from its dump) are omitted, and an array with more than
    `MOST_ELEMENTS` is replaced with its short `str`.

    Raises:
        ValueError: JSON cannot hold the value and `force` is false.
    """
    if isinstance(object, _PRIMITIVES):
        return cast(Any, object)
    if isinstance(object, list):
        try:
            return sanitize_list_attribute_sanity(cast(list[Any], object))
        except ValueError as error:
            logger.warning("%s It is stored as JSON text.", error)
    try:
        return json.dumps(cast(Any, object), allow_nan=False)
    except (TypeError, ValueError) as error:
        if not force:
            kind = type(cast(Any, object)).__name__
            raise ValueError(f"Object must be JSON serializable, got: {kind} ({error})") from error
    return _as_json_text(cast(Any, object))


def _as_json_text(value: object) -> Any:
    """Return a value as JSON: objects and lists as text, scalars in a form that a span may hold."""
    try:
        plain = _plain(value)
    except RecursionError:  # a cycle
        return str(value)
    if isinstance(plain, _PRIMITIVES):
        return plain
    with contextlib.suppress(ValueError):
        if isinstance(plain, list):
            return sanitize_list_attribute_sanity(cast(list[Any], plain))
    return json.dumps(plain)


def _plain(value: Any) -> Any:
    """Return JSON data; iterators are not consumed."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)  # JSON has no other numbers
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        hidden = {name for name, field in fields.items() if field.exclude or not field.repr}
        return {name: _plain(item) for name, item in value if name not in hidden}
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(item) for key, item in cast("Mapping[object, object]", value).items()}
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [_plain(item) for item in cast("list[object]", value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.repr}
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    array: Any = value
    if hasattr(array, "dtype") and hasattr(array, "tolist") and math.prod(array.shape) <= MOST_ELEMENTS:
        return _plain(array.tolist())  # of numpy or torch
    return str(value)


def sanitize_list_attribute_sanity(maybe_list: Sequence[Any]) -> list[Any]:
    """Return a list of one primitive type; booleans and integers are widened to integers, numbers to floats.

    Raises:
        ValueError: the elements have no common primitive type.
    """
    kinds = {next(kind for kind in (*_PRIMITIVES, object) if isinstance(value, kind)) for value in maybe_list}
    if kinds <= {str} or kinds <= {bool}:
        return list(maybe_list)
    if kinds <= {int, bool}:
        return [int(value) for value in maybe_list]
    if kinds <= {float, int, bool}:
        return [float(value) for value in maybe_list]
    names = ", ".join(sorted({type(value).__name__ for value in maybe_list}))
    raise ValueError(f"List must contain only one type of primitive values, got: {names}.")


def sanitize_attributes(attributes: Mapping[str, object], force: bool = True) -> dict[str, Any]:
    """Return the attributes with every value sanitised; see `sanitize_attribute_value`."""
    result: dict[str, Any] = {}
    for key, value in attributes.items():
        try:
            result[key] = sanitize_attribute_value(value, force)
        except ValueError as error:
            raise ValueError(f"Failed to sanitize attribute '{key}': {error}") from error
    return result


def check_attributes_sanity(attributes: Mapping[Any, object]) -> None:
    """Check that a span may hold the attributes unchanged.

    Raises:
        ValueError: an attribute is not allowed; the message names its key.
    """
    for key, value in attributes.items():
        if not isinstance(key, str):
            raise ValueError(f"Attribute key must be a string, got: {key!r} of type {type(key).__name__}")
        if isinstance(value, list):
            try:
                sanitize_list_attribute_sanity(cast(list[Any], value))
            except ValueError as error:
                raise ValueError(f"Failed to sanitize list attribute '{key}': {error}") from error
        elif not isinstance(value, _PRIMITIVES):
            raise ValueError(
                "Attribute value must be a string, int, float, bool, or list of these; "
                f"got {type(value).__name__} for key '{key}'"
            )
