"""Limits of one OTLP request, checked in its bytes before they are parsed to a message, and its rejected spans.

A span may take only two bytes of protobuf, and a few kilobytes of gzip may hold millions of spans: the size of a body
does not limit the memory of its message. The walk follows the messages' descriptors, so it works for any signal; it
does not inspect values of attributes, because their memory is close to their size.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agentlightning.base.terminal import cut
from agentlightning.errors import TooLargeError

MAX_RECORDS = 65_536
"""Largest number of spans, metrics or log records of one request (413); exporters send 512."""
MAX_MESSAGES = 1_000_000
"""Maximum number of messages in one request: records, their attributes, events, links (413). In JSON: objects and
lists."""
MAX_PARTS = 8_192
"""Maximum number of attributes, events and links of a span; beyond it the span is rejected."""
MAX_SHARED_BYTES = 64 * 1024 * 1024
"""Maximum size of resource and scope, multiplied by the number of their spans; beyond it these spans are rejected."""
MAX_REASONS = 5
MAX_REASON_CHARS = 300
"""Maximum number of characters of a reason in the response to a request; `MAX_REASONS` is the number of reasons."""
_DEEP_BYTES = 1024 * 1024
"""Body size below which the contents of records are not counted, because the size limits them."""
_RECORDS = frozenset((Span.DESCRIPTOR, Metric.DESCRIPTOR, LogRecord.DESCRIPTOR))
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5


def check_protobuf(kind: type[Message], body: bytes) -> None:
    """Check the counts of a body; the parser reports malformed data.

    Raises:
        TooLargeError: the body holds too many records or messages.
    """
    counts = _Counts()
    try:
        _walk(body, 0, len(body), cast(Descriptor, kind.DESCRIPTOR), counts, deep=len(body) > _DEEP_BYTES)
    except (IndexError, DecodeError):
        return


def check_json(body: bytes) -> None:
    """Check the counts of a JSON body.

    Raises:
        TooLargeError: the body holds too many objects and lists.
    """
    if body.count(b"{") + body.count(b"[") > MAX_MESSAGES:
        raise _too_many("objects and lists", MAX_MESSAGES)


def check_records(count: int) -> None:
    """Check the number of records.

    Raises:
        TooLargeError: the request has too many records.
    """
    if count > MAX_RECORDS:
        raise _too_many("records", MAX_RECORDS)


class _Counts:
    __slots__ = ("messages", "records")

    def __init__(self) -> None:
        self.messages = self.records = 0


def _walk(body: bytes, at: int, end: int, message: Descriptor, counts: _Counts, *, deep: bool) -> None:
    inside = _messages_in(message)
    while at < end:
        tag, at = _varint(body, at)
        wire = tag & 7
        if wire == _BYTES:
            size, at = _varint(body, at)
            part = inside.get(tag >> 3)
            if part is not None:
                counts.messages += 1
                if part in _RECORDS:
                    counts.records += 1
                    check_records(counts.records)
                if counts.messages > MAX_MESSAGES:
                    raise _too_many("messages", MAX_MESSAGES)
                if size and part is not KeyValue.DESCRIPTOR and (deep or part not in _RECORDS):
                    _walk(body, at, min(end, at + size), part, counts, deep=deep)
            at += size
        elif wire == _VARINT:
            _, at = _varint(body, at)
        elif wire in (_FIXED_64, _FIXED_32):
            at += 8 if wire == _FIXED_64 else 4
        else:
            raise DecodeError  # a group: the parser refuses it, or skips it without making anything


def _varint(body: bytes, at: int) -> tuple[int, int]:
    byte = body[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while True:
        at += 1
        byte = body[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
        if shift > 63:
            raise DecodeError


@lru_cache(maxsize=256)
def _messages_in(message: Descriptor) -> Mapping[int, Descriptor]:
    fields = cast("list[Any]", message.fields)
    return {field.number: field.message_type for field in fields if field.message_type is not None}


def _too_many(what: str, bound: int) -> TooLargeError:
    return TooLargeError(f"The request holds more than {bound} {what}; send it in smaller parts")


class Rejections:
    """The rejected spans of a request: their number and the first few different reasons."""

    __slots__ = ("_reasons", "seen", "spans")

    def __init__(self) -> None:
        self.spans = 0
        self.seen = 0
        """Number of spans of the request that have been read, if its form is read span by span."""
        self._reasons: dict[str, int] = {}

    def add(self, reason: str, spans: int = 1) -> None:
        """Count spans that are rejected for a reason."""
        self.spans += spans
        reason = cut(reason, MAX_REASON_CHARS)
        if reason in self._reasons or len(self._reasons) < MAX_REASONS:
            self._reasons[reason] = self._reasons.get(reason, 0) + spans

    @property
    def message(self) -> str:
        """The reasons as one text, each with its number of spans; empty if nothing was rejected."""
        if not self.spans:
            return ""
        reasons = [reason if count == 1 else f"{reason} ({count} spans)" for reason, count in self._reasons.items()]
        rest = self.spans - sum(self._reasons.values())
        return "; ".join([*reasons, f"other reasons ({rest})"] if rest else reasons)
