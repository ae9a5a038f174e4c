"""Conversion of OTLP/JSON to protobuf messages. It is protobuf's JSON form, but with hexadecimal ids, not base64.

https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding: camelCase keys, 64-bit integers as text or number,
enumerations as numbers, unknown fields ignored. The walk follows the messages' descriptors and works for any signal.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from pydantic_core import from_json

from agentlightning.base.terminal import cut
from agentlightning.errors import BadRequestError, TooLargeError
from agentlightning.utils.otlp.caps import Rejections, check_records

M = TypeVar("M", bound=Message)
Reader = Callable[[Any, Rejections], Any]
"""Converts the JSON of one field to an argument of the constructor of its message."""
_HEX_IDS = frozenset(("trace_id", "span_id", "parent_span_id"))


def message_from_json(kind: type[M], body: bytes, rejections: Rejections) -> M:
    """Return the message in a JSON body. A malformed span is skipped and added to `rejections`.

    Raises:
        BadRequestError: the body is not JSON, or malformed outside its spans.
        TooLargeError: the body holds too many spans.
    """
    try:
        return kind(**_fields(cast(Descriptor, kind.DESCRIPTOR), from_json(body), rejections))
    except TooLargeError:
        raise
    except (ValueError, TypeError) as error:
        raise BadRequestError(f"not the JSON form of {kind.DESCRIPTOR.name}: {error}") from error


def _fields(message: Descriptor, data: object, rejections: Rejections) -> dict[str, Any]:
    """Return the constructor's arguments for a message, without null and unknown fields."""
    if not isinstance(data, dict):
        raise TypeError(f"{message.name} must be an object; got {_brief(data)}")
    readers, fields = _readers(message), dict[str, Any]()
    for key, value in cast("dict[str, Any]", data).items():
        entry = readers.get(key)
        if entry is not None and value is not None:
            name, read = entry
            fields[name] = read(value, rejections)
    return fields


@lru_cache(maxsize=256)
def _readers(message: Descriptor) -> Mapping[str, tuple[str, Reader]]:
    """Return name and reader of each field, by both names that the JSON form of protobuf allows."""
    readers: dict[str, tuple[str, Reader]] = {}
    for field in message.fields:
        repeated = field.default_value == []  # said in this way by every version of protobuf
        read = _many(field, _reader(field)) if repeated else _reader(field)
        readers[field.json_name] = readers[field.name] = (field.name, read)
    return readers


def _many(field: FieldDescriptor, one: Reader) -> Reader:
    read_item = _span if field.message_type is SpanMessage.DESCRIPTOR else one

    def read(value: object, rejections: Rejections) -> list[object]:
        if not isinstance(value, list):
            raise TypeError(f"{field.json_name} must be a list; got {_brief(value)}")
        if read_item is _span:
            rejections.seen += len(cast("list[Any]", value))
            check_records(rejections.seen)
        items = [read_item(item, rejections) for item in cast("list[Any]", value) if item is not None]
        return [item for item in items if item is not None]

    return read


def _span(value: Any, rejections: Rejections) -> SpanMessage | None:
    try:
        return SpanMessage(**_fields(SpanMessage.DESCRIPTOR, value, rejections))
    except (ValueError, TypeError) as error:
        rejections.add(f"malformed span: {error}")
        return None


def _reader(field: FieldDescriptor) -> Reader:
    if field.message_type is not None:
        message = field.message_type
        return lambda value, rejections: _fields(message, value, rejections)
    is_hex = field.type == FieldDescriptor.TYPE_BYTES and field.name in _HEX_IDS
    read = _hex if is_hex else _SCALARS.get(field.type, _integer)

    def checked(value: object, rejections: Rejections) -> Any:
        try:
            return read(value)
        except (ValueError, TypeError, OverflowError):
            raise ValueError(f"{field.json_name} is {_brief(value)}; expected {_EXPECTED[read]}") from None

    return checked


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError
    number = int(value)
    if (isinstance(value, float) and number != value) or not -(2**63) <= number < 2**64:
        raise ValueError
    return number


def _float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError
    return float(value)


def _hex(value: object) -> bytes:
    return bytes.fromhex(_text(value))


def _base64(value: object) -> bytes:
    return base64.b64decode(_text(value), validate=True)


_SCALARS: Mapping[int, Callable[[object], object]] = {
    FieldDescriptor.TYPE_BYTES: _base64,
    FieldDescriptor.TYPE_STRING: _text,
    FieldDescriptor.TYPE_BOOL: _bool,
    FieldDescriptor.TYPE_DOUBLE: _float,
    FieldDescriptor.TYPE_FLOAT: _float,
}
"""Readers by the type of the field; a field of any other type is an integer."""
_EXPECTED: Mapping[Callable[[Any], Any], str] = {
    _text: "a string",
    _bool: "true or false",
    _integer: "a 64-bit integer, as number or string",
    _float: "a number",
    _hex: "hexadecimal text",
    _base64: "base64 text",
}


def _brief(value: object) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    return cut(repr(value[:60] if isinstance(value, str) else value), 70)
