"""Conversion of an OTLP request body to its message: content type, content encoding, limit of the unpacked size."""

from __future__ import annotations

from typing import Literal, TypeVar

from google.protobuf.message import DecodeError, Message

from agentlightning.errors import BadRequestError
from agentlightning.utils.http.byte_budget import MAX_BODY_BYTES, Hold, UnsupportedMediaError, unpacked_parts
from agentlightning.utils.otlp.caps import Rejections, check_json, check_protobuf
from agentlightning.utils.otlp.json_form import message_from_json

PROTOBUF_CT = "application/x-protobuf"
"""Content type of a body in protobuf."""
JSON_CT = "application/json"
"""Content type of a body in JSON."""
Form = Literal["application/x-protobuf", "application/json"]
M = TypeVar("M", bound=Message)


def form_of(content_type: str) -> Form:
    """Return the form that a `Content-Type` header (`content_type`) names; its parameters are ignored.

    Raises:
        UnsupportedMediaError: neither protobuf nor JSON.
    """
    named = content_type.split(";", 1)[0].strip().lower()
    if named == PROTOBUF_CT:
        return PROTOBUF_CT
    if named == JSON_CT:
        return JSON_CT
    raise UnsupportedMediaError(f"Unsupported Content-Type {named[:80]!r}, expected {PROTOBUF_CT!r} or {JSON_CT!r}")


def unpacked(body: bytes, content_encoding: str, limit: int = MAX_BODY_BYTES, hold: Hold | None = None) -> bytes:
    """Return the body without its content encoding; unpacking stops at `limit` bytes. They are counted in `hold`.

    Raises:
        BusyError: the unpacked body exceeds the byte budget.
        UnsupportedMediaError: the encoding is neither `gzip` nor `identity`.
        BadRequestError: broken or truncated gzip.
        TooLargeError: the unpacked body is larger than `limit` bytes.
    """
    encoding, content = content_encoding.strip().lower(), bytearray()
    if encoding in ("", "identity"):
        return body
    for part in unpacked_parts(body, encoding, limit, ("gzip",)):
        if hold is not None:
            hold.add(len(part))
        content += part
    return bytes(content)


def parse_body(
    kind: type[M],
    body: bytes,
    form: Form,
    content_encoding: str,
    signal: str,
    rejections: Rejections,
    hold: Hold | None = None,
) -> M:
    """Return the message in a request body; an empty body is an empty export.

    Raises:
        BadRequestError: the body is not a valid message. Malformed spans of a JSON body are not errors but are added to
            `rejections`.
        TooLargeError: the unpacked body exceeds the limit, or has too many records; see `caps.py`.
        BusyError: the unpacked body exceeds the byte budget.
    """
    content = unpacked(body, content_encoding, hold=hold)
    if not content:
        return kind()
    try:
        if form == PROTOBUF_CT:
            check_protobuf(kind, content)
            return kind.FromString(content)
        check_json(content)
        return message_from_json(kind, content, rejections)
    except (DecodeError, BadRequestError) as error:
        raise BadRequestError(f"Unable to parse OTLP {signal} payload: {error}") from error
