"""DummyTracer: creates span values without sending them. Used by all emitters with `propagate=False`."""

from __future__ import annotations

import time
from typing import Any

from typing_extensions import override

from agentlightning.tracer.base import Tracer
from agentlightning.types import Attributes, SpanCoreFields, StatusCode, TraceStatus
from agentlightning.utils.exceptions import message_of, readable
from agentlightning.utils.otel import format_exception_attributes


class DummySpanRecordingContext:
    """A span that is being recorded, in memory."""

    def __init__(self, name: str, attributes: Attributes, start_time: float) -> None:
        self._name = name
        self._attributes = attributes
        self._status = TraceStatus(status_code="OK")
        self._start_time = start_time
        self._end_time: float | None = None

    def record_exception(self, exception: BaseException) -> None:
        """Record the exception; the status becomes `ERROR`."""
        self._attributes.update(format_exception_attributes(exception))
        self.record_status("ERROR", message_of(readable(exception)))

    def record_attributes(self, attributes: Attributes) -> None:
        """Add attributes."""
        self._attributes.update(attributes)

    def record_status(self, status_code: StatusCode, description: str | None = None) -> None:
        """Set the status."""
        self._status = TraceStatus(status_code=status_code, description=description)

    def finalize(self, end_time: float | None = None) -> None:
        """Set the end time; None is now."""
        self._end_time = time.time() if end_time is None else end_time

    def get_recorded_span(self) -> SpanCoreFields:
        """Return the recorded fields.

        Raises:
            ValueError: the operation has not ended.
        """
        if self._end_time is None:
            raise ValueError("End time is not set. Call finalize() first.")
        return SpanCoreFields(
            name=self._name,
            status=self._status,
            attributes=self._attributes,
            start_time=self._start_time,
            end_time=self._end_time,
        )


class DummyTracer(Tracer):
    """A tracer without backend and `trace_context`; a runner needs a tracer with both."""

    @override
    def create_span(
        self,
        name: str,
        attributes: Attributes | None = None,
        timestamp: float | None = None,
        status: TraceStatus | None = None,
    ) -> SpanCoreFields:
        moment = timestamp if timestamp is not None else time.time()
        return SpanCoreFields(
            name=name,
            status=status or TraceStatus(status_code="OK"),
            attributes=dict(attributes or {}),
            start_time=moment,
            end_time=moment,
        )

    @override
    def _begin(
        self, name: str, attributes: dict[str, Any] | None, start_time: float | None
    ) -> DummySpanRecordingContext:
        start = start_time if start_time is not None else time.time()
        return DummySpanRecordingContext(name, dict(attributes or {}), start)
