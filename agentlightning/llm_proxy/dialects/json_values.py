"""JSON of agents and model servers: read within limits, written in a form that both accept, with typed field access.

The contents of a text are checked before it is decoded: seven megabytes of `{}` become 700 MB of objects. The count is
exact for JSON. It is made in slices of the text, so that other threads can run in between.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypeGuard

from pydantic_core import from_json, to_json

from agentlightning.llm_proxy.access.limits import (
    DEEPEST_JSON,
    LONGEST_NAME,
    MOST_CHOICES,
    MOST_FIELDS,
    MOST_ITEMS,
    REPLY_JSON,
    REQUEST_JSON,
    JsonBounds,
    shown,
)
from agentlightning.llm_proxy.replies import CallFailed

Json = dict[str, Any]

_CONTAINERS = frozenset((dict, list))
_NAMES = frozenset(("role", "name", "type"))
"""Fields of list entries that contain names."""
_OF_IDS = ("prompt", "input")
"""Fields that may be a list of token ids, as long as the prompt."""
_SLICE = 1 << 18
_VALUE, _CONTAINER, _TEXT = 40, 100, 60
"""Bytes of a number in a list, and further bytes of an object or list, and of a text."""


def read_model_request(
    raw: bytes, field: str, kind: type | tuple[type, ...], expected: str, model: str | None = None
) -> Json:
    """Return a request that has a model, and its prompt in `field`; the argument `model` replaces the request's model.

    Raises:
        CallFailed: 400, it is not a JSON object, or a field is missing, too large or of another type; names the field.
    """
    try:
        request = _decoded(raw, REQUEST_JSON)
    except TooMuchJsonError as error:
        raise CallFailed(400, f"The body is too large: {error}", code="too_many_values") from None
    except (ValueError, RecursionError) as error:
        raise CallFailed(400, f"The body is not JSON: {error}", code="invalid_json") from None
    if not is_object(request):
        raise CallFailed(400, "The body must be a JSON object", code="invalid_json")
    if model is not None:
        request["model"] = model
    check_shape(request)
    check_field(request, "model", str, "a string")
    check_field(request, field, kind, expected)
    return request


def check_shape(request: Json) -> None:
    """Check that a request's names and lists are within their limits; called before the request is processed.

    Raises:
        CallFailed: 400, a field is too large; names the field, its size and the limit.
    """
    if len(request) > MOST_FIELDS:
        raise _too_much("", "the request", f"{len(request)} fields", MOST_FIELDS)
    for name, value in request.items():
        if len(name) > LONGEST_NAME:
            raise _too_much(name, "the name of a field", f"{len(name)} characters", LONGEST_NAME)
        if not (is_list(value) or is_object(value)) or (name in _OF_IDS and set(map(type, value)) == {int}):
            continue
        if len(value) > MOST_ITEMS:
            raise _too_much(name, shown(name), f"{len(value)} entries", MOST_ITEMS)
        for index, entry in enumerate(entries_of(value)):
            for inner, field_value in fields_of(entry).items():
                if field_value.__class__ is str:
                    if inner in _NAMES and len(field_value) > LONGEST_NAME:
                        where = f"{name}[{index}].{inner}"
                        raise _too_much(where, shown(where), f"{len(field_value)} characters", LONGEST_NAME)
                elif field_value.__class__ in _CONTAINERS and len(field_value) > MOST_ITEMS:
                    where = f"{name}[{index}].{inner}"
                    raise _too_much(where, shown(where), f"{len(field_value)} entries", MOST_ITEMS)
    for name in ("model", "user"):
        if isinstance(value := request.get(name), str) and len(value) > LONGEST_NAME:
            raise _too_much(name, shown(name), f"{len(value)} characters", LONGEST_NAME)
    if isinstance(n := request.get("n"), (int, float)) and n > MOST_CHOICES:
        raise _too_much("n", "'n'", f"{shown(n)} choices", MOST_CHOICES)


def _too_much(param: str, what: str, holds: str, most: int) -> CallFailed:
    return CallFailed(400, f"{what} has {holds}; the limit is {most}", param=param, code="too_many_values")


def check_field(request: Json, field: str, kind: type | tuple[type, ...], expected: str) -> None:
    """Check that a request has a field of this type.

    Raises:
        CallFailed: 400, it is missing or of another type.
    """
    if not isinstance(request.get(field), kind):
        raise wrong_type(field, expected)


def wrong_type(field: str, expected: str) -> CallFailed:
    """Return the error for a field of the wrong type."""
    return CallFailed(400, f"{field!r} must be {expected}", param=field, code="invalid_type")


def read_json(raw: bytes | str) -> Json | None:
    """Decode a JSON object of a model server; None if the bytes are not one."""
    try:
        value = _decoded(raw, REPLY_JSON)
    except (ValueError, RecursionError):
        return None
    return value if is_object(value) else None


def _decoded(raw: bytes | str, bounds: JsonBounds) -> Any:
    """Return decoded JSON that is within the limits.

    Raises:
        ValueError, RecursionError: it is not JSON; the message is the standard library's.
        TooMuchJsonError: it exceeds the limits.
    """
    check_size(raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else raw, bounds)
    try:
        return from_json(raw, cache_strings="keys")  # two to three times as fast as the standard library
    except (ValueError, TypeError):  # not JSON, or what only that reads: half of a surrogate pair, deep nesting
        value = json.loads(raw.decode() if isinstance(raw, bytes) else raw)
        check_depth(value)
        return value


class TooMuchJsonError(ValueError):
    """A JSON text exceeds its limits."""


def check_size(raw: bytes, bounds: JsonBounds) -> None:
    """Check that a JSON text is within its limits.

    Raises:
        TooMuchJsonError: it exceeds a limit; names the limit.
    """
    if len(raw) <= bounds.surely:
        return
    containers = raw.count(b"{") + raw.count(b"[")
    if (  # even with the contents of its strings the text is within the bounds, as most are
        containers <= bounds.containers
        and containers + raw.count(b",") <= bounds.values
        and raw.count(b":") <= bounds.keys
        and raw.count(b'"') <= 2 * bounds.texts
    ):
        return
    counter = _Count()
    for _ in counter.slices(raw):
        for amount, bound, what in (
            (counter.containers, bounds.containers, "objects and lists"),
            (counter.keys, bounds.keys, "keys"),
            (counter.values, bounds.values, "values"),
            (counter.texts, bounds.texts, "keys and texts"),
        ):
            if amount > bound:
                raise TooMuchJsonError(f"it has more than {bound} {what}")


def expanded_bytes(raw: bytes) -> int:
    """Return the approximate size in bytes of a decoded JSON text, without the characters of its strings."""
    counter = _Count()
    for _ in counter.slices(raw):
        pass
    return counter.values * _VALUE + counter.containers * _CONTAINER + counter.texts * _TEXT


class _Count:
    """Counts values outside of strings."""

    def __init__(self) -> None:
        self.values = self.containers = self.keys = self.texts = 0

    def slices(self, raw: bytes) -> Iterator[None]:
        """Count slice by slice; yield after each."""
        begin = quotes = 0
        while begin < len(raw):
            part = raw[begin : begin + _SLICE]
            backslashes = len(part) - len(part.rstrip(b"\\"))
            part = raw[begin : begin + len(part) + backslashes % 2]  # no slice ends within an escape
            begin += len(part)
            pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
            outside = b" ".join(pieces[quotes % 2 :: 2])
            quotes += len(pieces) - 1
            containers = outside.count(b"{") + outside.count(b"[")
            self.containers += containers
            self.values += containers + outside.count(b",")
            self.keys += outside.count(b":")
            self.texts = quotes // 2
            yield


def check_depth(value: object) -> None:
    """Check that the objects and lists of a value are not nested too deeply.

    Raises:
        TooMuchJsonError: they do.
    """
    level = [value] if is_object(value) or is_list(value) else []
    for _ in range(DEEPEST_JSON + 2):
        entries = (entry for outer in level for entry in (outer.values() if is_object(outer) else outer))
        level = [entry for entry in entries if is_object(entry) or is_list(entry)]
        if not level:
            return
    raise TooMuchJsonError(f"its objects and lists are nested more than {DEEPEST_JSON} levels deep")


def json_bytes(value: object) -> bytes:
    """Return JSON as UTF-8. A lone surrogate, which UTF-8 cannot encode, stays an escape; NaN becomes null."""
    try:
        return to_json(value, inf_nan_mode="null")  # several times as fast as the standard library
    except ValueError:
        text = json.dumps(value)
        if "NaN" in text or "Infinity" in text:
            text = json.dumps(json.loads(text, parse_constant=lambda _: None))
        return text.encode()


def is_strict(raw: bytes) -> bool:
    """True if JSON has no NaN and no infinity outside of strings."""
    if b"NaN" not in raw and b"Infinity" not in raw:
        return True
    try:
        from_json(raw, allow_inf_nan=False)
    except ValueError:
        return False
    return True


def is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def is_object(value: object) -> TypeGuard[Json]:
    return isinstance(value, dict)


def entries_of(value: object) -> list[Any]:
    """Return a list unchanged; an empty list for any other value."""
    return value if is_list(value) else []


def fields_of(value: object) -> Json:
    """Return an object unchanged; an empty object for any other value."""
    return value if is_object(value) else {}


def objects(value: object) -> list[Json]:
    """Return the entries of a list that are objects; none if the value is not a list."""
    entries = entries_of(value)
    if set(map(type, entries)) <= {dict}:  # as nearly always; one look at each entry in C
        return entries[:]
    return [entry for entry in entries if is_object(entry)]


def object_in(fields: Json, name: str) -> Json:
    """Return the object in a field of another object; an empty object if the field has another type."""
    return fields_of(fields.get(name))


def text_of(value: object) -> str:
    """Return a text, or the joined texts of its parts; an empty string for any other value."""
    if isinstance(value, str):
        return value
    return "".join(part["text"] for part in objects(value) if isinstance(part.get("text"), str))
