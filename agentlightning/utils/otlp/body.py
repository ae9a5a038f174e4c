"""The body of an OTLP request to its message: content type, content encoding, and a bound on what it unpacks to."""

from __future__ import annotations

import zlib
from typing import Literal, TypeVar

from google.protobuf.message import DecodeError, Message

from agentlightning.errors import BadRequestError, TooLargeError
from agentlightning.utils.asgi import MAX_BODY_BYTES
from agentlightning.utils.otlp.json_form import message_from_json
from agentlightning.utils.otlp.rejections import Rejections

PROTOBUF_CT = "application/x-protobuf"
JSON_CT = "application/json"
Form = Literal["application/x-protobuf", "application/json"]
M = TypeVar("M", bound=Message)


class UnsupportedMediaError(BadRequestError):
    """The content type or content encoding is none that OTLP has (HTTP 415)."""

    http_status = 415


def form_of(content_type: str) -> Form:
    """Return the form that a `Content-Type` announces; its parameters do not matter.

    Raises:
        UnsupportedMediaError: neither protobuf nor JSON.
    """
    named = content_type.split(";", 1)[0].strip().lower()
    if named == PROTOBUF_CT:
        return PROTOBUF_CT
    if named == JSON_CT:
        return JSON_CT
    raise UnsupportedMediaError(f"Unsupported Content-Type {named[:80]!r}, expected {PROTOBUF_CT!r} or {JSON_CT!r}")


def unpacked(body: bytes, content_encoding: str, limit: int = MAX_BODY_BYTES) -> bytes:
    """Return the body without its content encoding; unpacking stops at `limit` bytes.

    Raises:
        UnsupportedMediaError: the encoding is neither `gzip` nor `identity`.
        BadRequestError: broken or truncated gzip.
        TooLargeError: more than `limit` bytes come out.
    """
    named = content_encoding.strip().lower()
    if named in ("", "identity"):
        return body
    if named != "gzip":
        raise UnsupportedMediaError(f"Unsupported Content-Encoding {named[:80]!r}, expected 'gzip' or 'identity'")
    parts: list[bytes] = []
    size = 0
    while body or not parts:
        member = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        try:
            part = member.decompress(body, limit - size + 1)
        except zlib.error as error:
            raise BadRequestError(f"Unable to unpack the gzip body: {error}") from error
        size += len(part)
        if size > limit:
            raise TooLargeError(f"The body unpacks to more than {limit} bytes; send it in smaller parts")
        if not member.eof:
            raise BadRequestError(f"Unable to unpack the gzip body: it ends early, after {size} bytes of content")
        parts.append(part)
        body = member.unused_data
    return b"".join(parts)


def parse_body(kind: type[M], body: bytes, form: Form, content_encoding: str, signal: str, rejections: Rejections) -> M:
    """Return the message that a request body holds; an empty body is an empty export.

    Raises:
        BadRequestError: it holds none. Malformed spans of a JSON body are no error but go to `rejections`.
        TooLargeError: it unpacks to more than the bound.
    """
    content = unpacked(body, content_encoding)
    if not content:
        return kind()
    try:
        return kind.FromString(content) if form == PROTOBUF_CT else message_from_json(kind, content, rejections)
    except (DecodeError, BadRequestError) as error:
        raise BadRequestError(f"Unable to parse OTLP {signal} payload: {error}") from error
