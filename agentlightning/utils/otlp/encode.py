"""Conversion of spans to an OTLP trace request, the reverse of `decode.py`. Rollout and attempt id become attributes of
the resource, the sequence id an attribute of the span."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Status
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage

from agentlightning.errors import BadRequestError
from agentlightning.types import Event, Link, Span
from agentlightning.utils.otlp.decode import ATTEMPT_ID, IS_REMOTE, KINDS, ROLLOUT_ID, SEQUENCE_ID, STATUS_CODES
from agentlightning.utils.otlp.values import pairs_of

_NANOS = 10**9
_LARGEST_TIME = 2**64 - 1


def encode_spans(spans: Iterable[Span]) -> bytes:
    """Return the protobuf body of a request that exports these spans; see `request_of`."""
    return request_of(spans).SerializeToString()


def request_of(spans: Iterable[Span]) -> ExportTraceServiceRequest:
    """Return the request that exports these spans, grouped by rollout, attempt, resource and scope, in order within a
    group. A span with a sequence id below 0 is sent without it.

    Raises:
        BadRequestError: a span has ids that are not hexadecimal, or text that is not Unicode.
    """
    request = ExportTraceServiceRequest()
    resources: dict[tuple[str, str, str], ResourceSpans] = {}
    scopes: dict[tuple[tuple[str, str, str], str], ScopeSpans] = {}
    for span in spans:
        by_resource = (span.rollout_id, span.attempt_id, repr(span.resource))
        by_scope = (by_resource, repr(span.scope))
        try:
            if by_resource not in resources:
                ids = {ROLLOUT_ID: span.rollout_id, ATTEMPT_ID: span.attempt_id}
                resource = Resource(attributes=pairs_of({**span.resource.attributes, **ids}))
                resources[by_resource] = request.resource_spans.add(
                    resource=resource, schema_url=span.resource.schema_url
                )
            if by_scope not in scopes:
                written: Mapping[str, Any] = span.scope or {}
                scope = InstrumentationScope(
                    name=written.get("name") or "",
                    version=written.get("version") or "",
                    attributes=pairs_of(cast("Mapping[str, Any]", written.get("attributes") or {})),
                    dropped_attributes_count=written.get("dropped_attributes") or 0,
                )
                scopes[by_scope] = resources[by_resource].scope_spans.add(
                    scope=scope if written else None, schema_url=written.get("schema_url") or ""
                )
            scopes[by_scope].spans.append(_span(span))
        except (ValueError, TypeError) as error:
            raise BadRequestError(f"span {span.name!r} ({span.span_id!r}) cannot be exported: {error}") from error
    return request


def _span(span: Span) -> SpanMessage:
    attributes = dict(span.attributes)
    if span.sequence_id >= 0:
        attributes[SEQUENCE_ID] = span.sequence_id
    dropped = span.dropped
    return SpanMessage(
        trace_id=bytes.fromhex(span.trace_id),
        span_id=bytes.fromhex(span.span_id),
        trace_state=_trace_state(span.context.trace_state) if span.context else "",
        parent_span_id=bytes.fromhex(span.parent_id or ""),
        flags=span.flags or 0,
        name=span.name,
        kind=cast(Any, KINDS.index(span.kind) if span.kind in KINDS else 0),
        start_time_unix_nano=nanos(span.start_time),
        end_time_unix_nano=nanos(span.end_time),
        attributes=pairs_of(attributes),
        dropped_attributes_count=dropped.attributes if dropped else 0,
        events=[_event(event) for event in span.events],
        dropped_events_count=dropped.events if dropped else 0,
        links=[_link(link) for link in span.links],
        dropped_links_count=dropped.links if dropped else 0,
        status=Status(
            code=cast(Any, STATUS_CODES.index(span.status.status_code)), message=span.status.description or ""
        ),
    )


def _event(event: Event) -> SpanMessage.Event:
    return SpanMessage.Event(
        name=event.name,
        time_unix_nano=nanos(event.timestamp),
        attributes=pairs_of(event.attributes),
        dropped_attributes_count=event.dropped_attributes,
    )


def _link(link: Link) -> SpanMessage.Link:
    return SpanMessage.Link(
        trace_id=bytes.fromhex(link.context.trace_id),
        span_id=bytes.fromhex(link.context.span_id),
        trace_state=_trace_state(link.context.trace_state),
        attributes=pairs_of(link.attributes or {}),
        dropped_attributes_count=link.dropped_attributes,
        flags=link.flags or (IS_REMOTE if link.context.is_remote else 0),
    )


def _trace_state(members: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in members.items())


def nanos(seconds: float | None) -> int:
    """Return the nearest nanosecond since the epoch; 0, which means no time in OTLP, for None or a time before it."""
    if seconds is None or not math.isfinite(seconds) or seconds <= 0:
        return 0
    numerator, denominator = seconds.as_integer_ratio()
    return min((2 * numerator * _NANOS + denominator) // (2 * denominator), _LARGEST_TIME)
