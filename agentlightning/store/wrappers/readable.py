"""A stored span as OpenTelemetry's, for a user's store that overrides `add_otel_span`."""

from __future__ import annotations

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from agentlightning import types


def readable_span(span: types.Span) -> ReadableSpan:
    """Return the span as an ended one of OpenTelemetry's; what only a stored span has (extra fields) is left out."""
    context = span.context or types.SpanContext(
        trace_id=span.trace_id, span_id=span.span_id, is_remote=False, trace_state={}
    )
    scope = span.scope or {}
    return ReadableSpan(
        name=span.name,
        context=_context(context),
        parent=_context(span.parent) if span.parent else None,
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
