"""Spans and their parts, and the conversion of OpenTelemetry spans.

Times of a span are `float` seconds since the Unix epoch; OpenTelemetry's integer nanoseconds are converted.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, Protocol, cast

from opentelemetry.sdk.trace import ReadableSpan
from pydantic import BeforeValidator, ConfigDict, Field

from agentlightning.base.field_help import Value
from agentlightning.semconv import AGL_VIRTUAL
from agentlightning.types.attributes import Attributes
from agentlightning.types.attributes import AttributeValue as AttributeValue
from agentlightning.types.core import COUNT, MOMENT

StatusCode = Literal["UNSET", "OK", "ERROR"]
"""Status code of an ended span."""
TraceState = dict[str, str]
"""OpenTelemetry's `tracestate` by key."""


def _seconds(value: object) -> object:
    if isinstance(value, datetime):
        return value.timestamp()
    return None if isinstance(value, (int, float)) and not MOMENT["ge"] <= value <= MOMENT["le"] else value


Seconds = Annotated[float | None, BeforeValidator(_seconds)]
"""Unix seconds. A `datetime` is converted; a time outside the range of the calendar becomes None."""


def normalize_time(value: float | None) -> float | None:
    """Return seconds from seconds or nanoseconds. None and 0 become None; values above 1e12 are nanoseconds."""
    if not value:
        return None
    return value / 1e9 if value > 1e12 else float(value)


class SpanContext(Value):
    """Identity of a span in its trace."""

    model_config = ConfigDict(extra="allow")

    trace_id: str
    """32 lower-case hexadecimal characters."""
    span_id: str
    """16 lower-case hexadecimal characters."""
    is_remote: bool
    """True if the context came from another process."""
    trace_state: TraceState
    """W3C trace state: vendor-specific data."""

    @classmethod
    def from_opentelemetry(cls, src: Any) -> SpanContext:
        return cls(
            trace_id=format(src.trace_id, "032x"),
            span_id=format(src.span_id, "016x"),
            is_remote=bool(src.is_remote),
            trace_state=dict(src.trace_state or {}),
        )


class TraceStatus(Value):
    """Status of a span."""

    model_config = ConfigDict(extra="allow")

    status_code: StatusCode
    """`ERROR` if the operation failed; `UNSET` if no status was set."""
    description: str | None = None
    """Description of the error; None if there was none."""

    @classmethod
    def from_opentelemetry(cls, src: Any) -> TraceStatus:
        return cls(status_code=src.status_code.name, description=src.description)


class Event(Value):
    """An event at one time within a span."""

    model_config = ConfigDict(extra="allow")

    name: str
    """Name of the event, such as `exception`."""
    attributes: Attributes
    """Attributes of the event."""
    timestamp: Seconds = None
    """Time of the event."""
    dropped_attributes: int = Field(default=0, **COUNT)
    """Number of attributes that were dropped when the event was created."""

    @classmethod
    def from_opentelemetry(cls, src: Any) -> Event:
        return cls(
            name=src.name,
            attributes=dict(src.attributes or {}),
            timestamp=normalize_time(src.timestamp),
            dropped_attributes=_count(src, "dropped_attributes"),
        )


class Link(Value):
    """A reference to another span."""

    model_config = ConfigDict(extra="allow")

    context: SpanContext
    """The linked span."""
    attributes: Attributes | None = None
    """Attributes of the link; None if there are none."""
    dropped_attributes: int = Field(default=0, **COUNT)
    """Number of attributes that were dropped when the link was created."""
    flags: int | None = Field(default=None, **COUNT)
    """Same as `Span.flags`, for the linked span."""

    @classmethod
    def from_opentelemetry(cls, src: Any) -> Link:
        return cls(
            context=SpanContext.from_opentelemetry(src.context),
            attributes=dict(src.attributes) if src.attributes else None,
            dropped_attributes=_count(src, "dropped_attributes"),
            flags=_flags(src.context, src.context),
        )


class OtelResource(Value):
    """Source of the span: service, SDK, rollout and attempt."""

    attributes: Attributes
    """Attributes of the resource, such as `service.name`."""
    schema_url: str = ""
    """URL of the semantic conventions of the attributes; empty if not set."""

    @classmethod
    def from_opentelemetry(cls, src: Any) -> OtelResource:
        return cls(attributes=dict(src.attributes or {}), schema_url=src.schema_url or "")


class DroppedCounts(Value):
    """Numbers of attributes, events and links that were dropped when the span was created, because of its limits."""

    attributes: int = Field(default=0, **COUNT)
    """Number of dropped attributes."""
    events: int = Field(default=0, **COUNT)
    """Number of dropped events."""
    links: int = Field(default=0, **COUNT)
    """Number of dropped links."""

    @classmethod
    def from_opentelemetry(cls, src: object) -> DroppedCounts | None:
        counts = {name: _count(src, f"dropped_{name}") for name in cls.model_fields}
        return cls(**counts) if any(counts.values()) else None


class SpanCoreFields(Value):
    """A span without ids. Emitters return it, and an agent can return it."""

    name: str
    """Name of the span; `agentlightning.semconv` defines the reserved names."""
    status: TraceStatus
    """Status of the span."""
    attributes: Attributes
    """Attributes of the span."""
    start_time: Seconds
    """Start time; None if unknown."""
    end_time: Seconds
    """Time of the end; None if unknown."""


class SpanRecordingContext(Protocol):
    """The handle that `Tracer.operation_context` yields. The context ends the span."""

    def record_exception(self, exception: BaseException) -> None: ...

    def record_attributes(self, attributes: dict[str, Any]) -> None: ...

    def record_status(self, status_code: StatusCode, description: str | None = None) -> None: ...

    def get_recorded_span(self) -> SpanCoreFields: ...


class Span(Value):
    """A record of one operation of an attempt. Unknown fields are kept."""

    model_config = ConfigDict(extra="allow", ser_json_inf_nan="constants")

    rollout_id: str
    """Rollout of the span."""
    attempt_id: str
    """Attempt of the span."""
    sequence_id: int
    """Number of the span within its rollout; assigned by the store."""
    trace_id: str
    """32 lower-case hexadecimal characters."""
    span_id: str
    """16 lower-case hexadecimal characters."""
    parent_id: str | None
    """Id of the parent span; None for a root."""
    name: str
    """Name of the span; `agentlightning.semconv` defines the reserved names."""
    status: TraceStatus
    """Status of the span."""
    attributes: Attributes
    """Attributes of the span; nested values are flattened to keys with dots."""
    events: list[Event]
    """Events within the span."""
    links: list[Link]
    """Links to other spans."""
    start_time: Seconds
    """Start time; None if unknown."""
    end_time: Seconds
    """Time of the end; None if unknown."""
    context: SpanContext | None
    """OpenTelemetry context of the span: its ids and trace state."""
    parent: SpanContext | None
    """OpenTelemetry context of the parent span; None for a root."""
    resource: OtelResource
    """Source of the span."""
    kind: str | None = None
    """OpenTelemetry span kind: INTERNAL, SERVER, CLIENT, PRODUCER or CONSUMER."""
    scope: dict[str, Any] | None = None
    """Instrumentation scope: name, version and, if set, attributes and schema_url."""
    dropped: DroppedCounts | None = None
    """Numbers of dropped attributes, events and links; None if nothing was dropped."""
    flags: int | None = Field(default=None, **COUNT)
    """OTLP flags. Low byte: W3C trace flags. 0x100: bit 0x200 is valid and set if the parent is remote."""

    @property
    def exception(self) -> Attributes | None:
        """Attributes of the last recorded exception (`exception.type`, `exception.message`); None without one."""
        return next((event.attributes for event in reversed(self.events) if event.name == "exception"), None)

    @classmethod
    def from_opentelemetry(cls, src: ReadableSpan, rollout_id: str, attempt_id: str, sequence_id: int) -> Span:
        """Convert an ended OpenTelemetry span or any object with the same attributes."""
        context = src.get_span_context()
        status = src.status
        scope = getattr(src, "instrumentation_scope", None)
        kind = getattr(getattr(src, "kind", None), "name", None)
        return cls(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=sequence_id,
            trace_id=format(context.trace_id, "032x") if context else "0" * 32,
            span_id=format(context.span_id, "016x") if context else "0" * 16,
            parent_id=format(src.parent.span_id, "016x") if src.parent else None,
            name=src.name,
            status=TraceStatus.from_opentelemetry(status),
            attributes=cast(
                Attributes, {k: list(v) if isinstance(v, tuple) else v for k, v in (src.attributes or {}).items()}
            ),
            events=[Event.from_opentelemetry(event) for event in src.events],
            links=[Link.from_opentelemetry(link) for link in src.links],
            start_time=normalize_time(src.start_time),
            end_time=normalize_time(src.end_time),
            context=SpanContext.from_opentelemetry(context) if context else None,
            parent=SpanContext.from_opentelemetry(src.parent) if src.parent else None,
            resource=OtelResource.from_opentelemetry(src.resource),
            kind=kind if isinstance(kind, str) else None,
            scope=_scope(scope),
            dropped=DroppedCounts.from_opentelemetry(src),
            flags=_flags(context, src.parent),
        )

    @classmethod
    def from_attributes(
        cls,
        *,
        attributes: Attributes,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        sequence_id: int | None = None,
        name: str | None = None,
        trace_id: str | None = None,
        span_id: str | None = None,
        parent_id: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        resource: OtelResource | None = None,
        status: TraceStatus | None = None,
    ) -> Span:
        """Create a span from attributes. Missing ids are random, a missing status is `OK`, other fields are empty."""
        trace_id = trace_id or secrets.token_hex(16)
        span_id = span_id or secrets.token_hex(8)
        parent = (
            SpanContext(trace_id=trace_id, span_id=parent_id, is_remote=False, trace_state={}) if parent_id else None
        )
        return cls(
            rollout_id=rollout_id or "",
            attempt_id=attempt_id or "",
            sequence_id=sequence_id or 0,
            trace_id=trace_id,
            span_id=span_id,
            parent_id=parent_id,
            name=name or AGL_VIRTUAL,
            status=status or TraceStatus(status_code="OK"),
            attributes=attributes,
            events=[],
            links=[],
            start_time=start_time,
            end_time=end_time,
            context=SpanContext(trace_id=trace_id, span_id=span_id, is_remote=False, trace_state={}),
            parent=parent,
            resource=resource or OtelResource(attributes={}, schema_url=""),
        )

    @classmethod
    def from_core_fields(
        cls,
        core: SpanCoreFields,
        *,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        sequence_id: int | None = None,
    ) -> Span:
        """Create a span from `core`. Missing ids are random; a missing start time becomes the current time."""
        return cls.from_attributes(
            attributes=core.attributes,
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=sequence_id,
            name=core.name,
            start_time=core.start_time or time.time(),
            end_time=core.end_time,
            status=core.status,
        )


def _scope(scope: object) -> dict[str, object] | None:
    name = getattr(scope, "name", None)
    if not isinstance(name, str):
        return None
    version = getattr(scope, "version", None)
    fields: dict[str, object] = {"name": name, "version": version if isinstance(version, str) else None}
    attributes, schema_url = getattr(scope, "attributes", None), getattr(scope, "schema_url", None)
    if isinstance(attributes, Mapping) and attributes:
        fields["attributes"] = dict(cast(Mapping[str, object], attributes))
    if isinstance(schema_url, str) and schema_url:
        fields["schema_url"] = schema_url
    return fields


def _count(src: object, name: str) -> int:
    """Return a counter of an OpenTelemetry object; 0 if it has none."""
    count = getattr(src, name, 0)
    return count if isinstance(count, int) else 0


def _flags(context: object, parent: object) -> int | None:
    trace_flags = getattr(context, "trace_flags", None)
    if not isinstance(trace_flags, int):
        return None
    return int(trace_flags) | 0x100 | (0x200 if getattr(parent, "is_remote", False) is True else 0)


SpanLike = ReadableSpan | Span
"""A span of the OpenTelemetry SDK or of this package."""


class SpanNames(StrEnum):
    """Deprecated: use the constants of `agentlightning.semconv`."""

    REWARD = "agentlightning.reward"
    MESSAGE = "agentlightning.message"
    OBJECT = "agentlightning.object"
    EXCEPTION = "agentlightning.exception"
    VIRTUAL = "agentlightning.virtual"
    ROLLOUT_ID = "agentlightning.rollout_id"
    ATTEMPT_ID = "agentlightning.attempt_id"
    SPAN_SEQUENCE_ID = "agentlightning.span_sequence_id"


class SpanAttributeNames(StrEnum):
    """Deprecated: use `agentlightning.semconv.LightningSpanAttributes`."""

    MESSAGE = "message"
    OBJECT = "object"
