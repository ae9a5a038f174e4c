"""The shape of every adapter: one call that turns what was recorded into what an algorithm learns from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from opentelemetry.sdk.trace import ReadableSpan

from agentlightning.types import Span

From = TypeVar("From")
To = TypeVar("To")


class Adapter(Generic[From, To]):
    """Turns one kind of value into another; subclasses implement `adapt`."""

    def __call__(self, source: From, /) -> To:
        """The same as `adapt`."""
        return self.adapt(source)

    def adapt(self, source: From, /) -> To:
        """Return the converted value."""
        raise NotImplementedError(f"{type(self).__name__} has no adapt(source)")


class TraceAdapter(Adapter[Sequence[Span], To]):
    """An adapter over the stored spans of one attempt."""


class OtelTraceAdapter(Adapter[Sequence[ReadableSpan], To]):
    """An adapter over OpenTelemetry's own spans."""
