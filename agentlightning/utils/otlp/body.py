"""Conversion of an OTLP request body to its message: content type, content encoding, bound on the unpacked size."""

from __future__ import annotations

import zlib
from typing import Literal, TypeVar

from google.protobuf.message import DecodeError, Message

from agentlightning.errors import BadRequestError, TooLargeError
from agentlightning.utils.http.byte_budget import MAX_BODY_BYTES, Hold
from agentlightning.utils.otlp.caps import Rejections, check_json, check_protobuf
from agentlightning.utils.otlp.json_form import message_from_json

PROTOBUF_CT = "application/x-protobuf"
"""Content type of a body in protobuf."""
JSON_CT = "application/json"
"""Content type of a body in JSON."""
Form = Literal["application/x-protobuf", "application/json"]
M = TypeVar("M", bound=Message)
_STEP_BYTES = 1024 * 1024
_MEMBERS = 1024
"""Largest number of members of a gzip body, which usually has one."""


class UnsupportedMediaError(BadRequestError):
    """Raised when OTLP does not have the content type or content encoding (HTTP 415)."""

    http_status = 415


def form_of(content_type: str) -> Form:
    """Return the form in a `Content-Type` (`content_type`); its parameters do not matter.

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
        BusyError: the byte budget has no room for the unpacked body.
        UnsupportedMediaError: the encoding is neither `gzip` nor `identity`.
        BadRequestError: broken or truncated gzip.
        TooLargeError: the unpacked body is larger than `limit` bytes.
    """
    named = content_encoding.strip().lower()
    if named in ("", "identity"):
        return body
    if named != "gzip":
        raise UnsupportedMediaError(f"Unsupported Content-Encoding {named[:80]!r}, expected 'gzip' or 'identity'")
    parts, members = bytearray(), 0
    while body or not members:
        member = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        while not member.eof:
            try:
                part = member.decompress(body, min(_STEP_BYTES, limit - len(parts) + 1))
            except zlib.error as error:
                raise BadRequestError(f"Unable to unpack the gzip body: {error}") from error
            if len(parts) + len(part) > limit:
                raise TooLargeError(f"The body unpacks to more than {limit} bytes; send it in smaller parts")
            if hold is not None:
                hold.add(len(part))
            parts += part
            body = member.unconsumed_tail
            if not member.eof and not body and not part:
                text = f"Unable to unpack the gzip body: it ends early, after {len(parts)} bytes of content"
                raise BadRequestError(text)
        body = member.unused_data
        members += 1
        if members > _MEMBERS:
            raise BadRequestError(f"The gzip body has more than {_MEMBERS} members; send one")
    return bytes(parts)


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
        BadRequestError: it has no valid message. Malformed spans of a JSON body are no error but go to `rejections`.
        TooLargeError: the unpacked body exceeds the bound, or has too many records; see `caps.py`.
        BusyError: the byte budget has no room for the unpacked body.
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
