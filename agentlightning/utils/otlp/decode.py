"""Spans from an OTLP trace request, in one pass. On the server's hot path: values are built without validation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from pydantic import BaseModel

from agentlightning.semconv import LightningResourceAttributes
from agentlightning.types import Attributes, Event, Link, OtelResource, Span, SpanContext, TraceStatus
from agentlightning.types.tracer import DroppedCounts
from agentlightning.utils.otlp.caps import MAX_PARTS, MAX_SHARED_BYTES, Rejections
from agentlightning.utils.otlp.unread import SpanGroup, UnreadSpan
from agentlightning.utils.otlp.values import attributes_of

ROLLOUT_ID = LightningResourceAttributes.ROLLOUT_ID.value
ATTEMPT_ID = LightningResourceAttributes.ATTEMPT_ID.value
SEQUENCE_ID = LightningResourceAttributes.SPAN_SEQUENCE_ID.value
KINDS = (None, "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")
"""Span kinds, indexed by OTLP's number."""
STATUS_CODES = ("UNSET", "OK", "ERROR")
IS_REMOTE = 0x300
"""Bits of `flags` for a known remote parent or linked span."""
_OWN_IDS = b"agentlightning."
_OWN_NAMES = frozenset((ROLLOUT_ID, ATTEMPT_ID, SEQUENCE_ID))
"""Attributes that give a span its own ids or number; `_OWN_IDS` is the prefix of their names."""
_NANOS = 10**9
_TRACE_ID_BYTES, _SPAN_ID_BYTES = 16, 8
_STEP_WORK = 8192
_SPAN_WORK = _STEP_WORK // 128
"""Minimum work of one span, so that a step has 128 spans, or fewer if they have more attributes, events and links."""
_SEQUENCE_DIGITS = 15
"""Maximum number of digits; a longer number is not a position in a rollout and would exhaust its counter."""
B = TypeVar("B", bound=BaseModel)
BulkIssuer = Callable[[Sequence[tuple[str, str]]], Awaitable[Sequence[int]]]
"""Returns one sequence id per (rollout id, attempt id)."""


def spans_of(request: ExportTraceServiceRequest, rejections: Rejections) -> Iterator[Span]:
    """Yield the spans of a request in order; `sequence_id` is -1 if the store has to assign it.

    Rollout, attempt and sequence id are read from attributes of the span, or of its resource, and are kept there. A
    span without rollout or attempt id, or with ids that are too long, is added to `rejections`. Spans of a resource
    share its object.
    """
    for step in unread_steps_of(request, rejections, read_all=True):
        yield from cast("list[Span]", step)


def unread_steps_of(
    request: ExportTraceServiceRequest, rejections: Rejections, *, read_all: bool = False
) -> Iterator[list[Span | UnreadSpan]]:
    """Yield the same spans in steps of about equal work, some of which are empty, so that other tasks can run between
    two steps. Spans without their own ids are not read, unless `read_all` is set."""
    step, work = list[Span | UnreadSpan](), 0
    for group in request.resource_spans:
        fields = {"attributes": attributes_of(group.resource.attributes), "schema_url": group.schema_url}
        resource = made(OtelResource, fields)
        for scoped in group.scope_spans:
            shared = (group.resource.ByteSize() + scoped.scope.ByteSize()) * len(scoped.spans)
            if shared > MAX_SHARED_BYTES:
                text = f"{len(scoped.spans)} spans share a resource and scope of {shared} bytes in total"
                rejections.add(f"{text}; at most {MAX_SHARED_BYTES} are allowed", len(scoped.spans))
                continue
            scope = _scope(scoped.scope, scoped.schema_url)
            together = SpanGroup(resource, scope, group.resource.ByteSize() + scoped.scope.ByteSize(), span_of)
            for message in scoped.spans:
                parts = len(message.attributes) + len(message.events) + len(message.links)
                if parts > MAX_PARTS:
                    text = f"span {message.name[:80]!r} has {parts} attributes, events and links; at most {MAX_PARTS}"
                    rejections.add(text)
                elif not read_all and (unread := _unread(message, together)) is not None:
                    step.append(unread)
                elif (span := _span(message, resource, scope, rejections)) is not None:
                    step.append(span)
                work += max(_SPAN_WORK, parts)
                if work >= _STEP_WORK:
                    yield step
                    step, work = [], 0
            work += 1
        work += len(group.resource.attributes)
        if work >= _STEP_WORK:
            yield step
            step, work = [], 0
    if step:
        yield step


async def spans_from_proto(request: ExportTraceServiceRequest, bulk_issuer: BulkIssuer) -> list[Span]:
    """Return the spans of a request, all with numbers: one call of `bulk_issuer` assigns missing sequence ids.

    Spans without rollout or attempt id are skipped.
    """
    spans = list(spans_of(request, Rejections()))
    missing = [span for span in spans if span.sequence_id < 0]
    numbers = await bulk_issuer([(span.rollout_id, span.attempt_id) for span in missing])
    for span, number in zip(missing, numbers, strict=True):
        span.sequence_id = number
    return spans


def span_of(body: bytes, group: SpanGroup) -> Span:
    """Return a span that `unread_steps_of` did not read."""
    span = _span(SpanMessage.FromString(body), group.resource, group.scope, Rejections())
    assert span is not None, "its ids were looked at"
    return span


def _unread(message: SpanMessage, group: SpanGroup) -> UnreadSpan | None:
    """Return the span as bytes; None if its ids are invalid, so that the caller must report it."""
    body, identity, ours = message.SerializeToString(), message.span_id, group.resource.attributes
    own: Attributes = {}
    if _OWN_IDS in body:
        own = attributes_of(pair for pair in message.attributes if pair.key in _OWN_NAMES)
    rollout_id, attempt_id = _id(own, ours, ROLLOUT_ID), _id(own, ours, ATTEMPT_ID)
    if not rollout_id or not attempt_id or len(identity) > _SPAN_ID_BYTES:
        return None
    if len(message.trace_id) > _TRACE_ID_BYTES or len(message.parent_span_id) > _SPAN_ID_BYTES:
        return None
    return UnreadSpan(body, group, rollout_id, attempt_id, _sequence_id(own, ours), identity.hex().zfill(16))


def _span(
    message: SpanMessage, resource: OtelResource, scope: dict[str, Any] | None, rejections: Rejections
) -> Span | None:
    attributes = attributes_of(message.attributes)
    ours = resource.attributes
    rollout_id, attempt_id = _id(attributes, ours, ROLLOUT_ID), _id(attributes, ours, ATTEMPT_ID)
    trace, identity, parent = message.trace_id, message.span_id, message.parent_span_id
    if not rollout_id or not attempt_id:
        missing = ROLLOUT_ID if not rollout_id else ATTEMPT_ID
        rejections.add(f"span {message.name[:80]!r} has no attribute {missing}, nor has its resource")
        return None
    if len(trace) > _TRACE_ID_BYTES or len(identity) > _SPAN_ID_BYTES or len(parent) > _SPAN_ID_BYTES:
        rejections.add(
            f"span {message.name[:80]!r} has ids of {len(trace)}, {len(identity)} and {len(parent)} bytes "
            f"(trace, span, parent); expected {_TRACE_ID_BYTES}, {_SPAN_ID_BYTES} and {_SPAN_ID_BYTES} or none"
        )
        return None
    trace_id, span_id = trace.hex().zfill(32), identity.hex().zfill(16)
    code, text, kind = message.status.code, message.status.message, message.kind
    dropped = {
        "attributes": message.dropped_attributes_count,
        "events": message.dropped_events_count,
        "links": message.dropped_links_count,
    }
    status = STATUS_CODES[code] if 0 <= code < len(STATUS_CODES) else "UNSET"
    return made(
        Span,
        {
            "rollout_id": rollout_id,
            "attempt_id": attempt_id,
            "sequence_id": _sequence_id(attributes, ours),
            "trace_id": trace_id,
            "span_id": span_id,
            "parent_id": parent.hex().zfill(16) if parent else None,
            "name": message.name,
            "status": made(TraceStatus, {"status_code": status, "description": text or None}),
            "attributes": attributes,
            "events": [_event(event) for event in events] if (events := message.events) else [],
            "links": [_link(link) for link in links] if (links := message.links) else [],
            "start_time": seconds(message.start_time_unix_nano),
            "end_time": seconds(message.end_time_unix_nano),
            "context": _context(trace_id, span_id, message.trace_state, is_remote=False),
            "parent": None,
            "resource": resource,
            "kind": KINDS[kind] if 0 <= kind < len(KINDS) else None,
            "scope": scope,
            "dropped": made(DroppedCounts, dropped) if any(dropped.values()) else None,
            "flags": message.flags or None,
        },
    )


def _id(attributes: Attributes, resource: Attributes, key: str) -> str | None:
    value = attributes.get(key) or resource.get(key)
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, (int, float)) else None


def _sequence_id(attributes: Attributes, resource: Attributes) -> int:
    value = attributes.get(SEQUENCE_ID)
    if value is None:
        value = resource.get(SEQUENCE_ID)
    digits = str(value) if isinstance(value, (int, str)) else ""
    if digits.isascii() and digits.isdecimal() and len(digits) <= _SEQUENCE_DIGITS:
        return int(digits)
    return -1


def _scope(scope: InstrumentationScope, schema_url: str) -> dict[str, object] | None:
    fields: dict[str, Any] = {"name": scope.name, "version": scope.version or None}
    if scope.attributes:
        fields["attributes"] = attributes_of(scope.attributes)
    if scope.dropped_attributes_count:
        fields["dropped_attributes"] = scope.dropped_attributes_count
    if schema_url:
        fields["schema_url"] = schema_url
    return fields if any(fields.values()) else None


def _event(event: SpanMessage.Event) -> Event:
    fields = {
        "name": event.name,
        "attributes": attributes_of(event.attributes),
        "timestamp": seconds(event.time_unix_nano),
        "dropped_attributes": event.dropped_attributes_count,
    }
    return made(Event, fields)


def _link(link: SpanMessage.Link) -> Link:
    remote = link.flags & IS_REMOTE == IS_REMOTE
    trace_id, span_id = link.trace_id.hex().zfill(32), link.span_id.hex().zfill(16)
    fields = {
        "context": _context(trace_id, span_id, link.trace_state, is_remote=remote),
        "attributes": attributes_of(link.attributes) or None,
        "dropped_attributes": link.dropped_attributes_count,
        "flags": link.flags or None,
    }
    return made(Link, fields)


def _context(trace_id: str, span_id: str, trace_state: str, *, is_remote: bool) -> SpanContext:
    # the members of a W3C `tracestate`; members other than `key=value` are skipped
    members = (member.strip().partition("=") for member in trace_state.split(","))
    state = {key: value for key, equals, value in members if key and equals} if trace_state else {}
    fields = {"trace_id": trace_id, "span_id": span_id, "is_remote": is_remote, "trace_state": state}
    return made(SpanContext, fields)


def seconds(nanos: int) -> float | None:
    """Return seconds since the epoch; 0 means no time. Division of integers rounds once, so that `nanos` is exact."""
    return nanos / _NANOS if nanos else None


def made(cls: type[B], fields: dict[str, Any]) -> B:
    """Return a span, or a part of one, from all its fields in order, without validation.

    Models of a class share the set of their field names, which saves work for the garbage collector.
    """
    names, extra = _SHAPES[cls]
    new = cls.__new__(cls)
    _set(new, "__dict__", fields)
    _set(new, "__pydantic_fields_set__", names)
    _set(new, "__pydantic_extra__", {} if extra else None)
    _set(new, "__pydantic_private__", None)
    return new


_set = object.__setattr__
_SHAPES: dict[type[BaseModel], tuple[set[str], bool]] = {
    cls: (set(cls.model_fields), cls.model_config.get("extra") == "allow")
    for cls in (Span, TraceStatus, SpanContext, OtelResource, Event, Link, DroppedCounts)
}
