"""A stored span as OpenTelemetry's, for a user's store that overrides `add_otel_span`."""

from __future__ import annotations

import re

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from agentlightning import types

_IDS = re.compile(r"[0-9a-f]{32} [0-9a-f]{16}(?: [0-9a-f]{16})?")


def is_readable(span: types.Span) -> bool:
    """True if the ids of the span are ones of OpenTelemetry's; a program that makes spans itself may use any words."""
    return _IDS.fullmatch(" ".join(filter(None, (span.trace_id, span.span_id, span.parent_id)))) is not None


def readable_span(span: types.Span) -> ReadableSpan:
    """Return the span as an ended one of OpenTelemetry's; what only a stored span has (extra fields) is left out.

    Raises:
        ValueError: an id is not hexadecimal; see `is_readable`.
    """
    context = span.context or _local(span.trace_id, span.span_id)
    parent = span.parent or (_local(span.trace_id, span.parent_id) if span.parent_id else None)
    scope = span.scope or {}
    return ReadableSpan(
        name=span.name,
        context=_context(context),
        parent=_context(parent) if parent else None,
        resource=Resource(span.resource.attributes, span.resource.schema_url),
        attributes=dict(span.attributes),
        events=[Event(event.name, dict(event.attributes), _nanoseconds(event.timestamp)) for event in span.events],
        links=[Link(_context(link.context), link.attributes and dict(link.attributes)) for link in span.links],
        kind=SpanKind.__members__.get(span.kind or "", SpanKind.INTERNAL),
        status=Status(StatusCode[span.status.status_code], span.status.description),
        start_time=_nanoseconds(span.start_time),
        end_time=_nanoseconds(span.end_time),
        instrumentation_scope=InstrumentationScope(
            scope["name"], scope.get("version"), scope.get("schema_url"), scope.get("attributes")
        )
        if scope.get("name")
        else None,
    )


def _local(trace_id: str, span_id: str) -> types.SpanContext:
    return types.SpanContext(trace_id=trace_id, span_id=span_id, is_remote=False, trace_state={})


def _context(context: types.SpanContext) -> SpanContext:
    return SpanContext(
        int(context.trace_id, 16),
        int(context.span_id, 16),
        context.is_remote,
        TraceFlags(TraceFlags.SAMPLED),
        TraceState(list(context.trace_state.items())),
    )


def _nanoseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e9)
