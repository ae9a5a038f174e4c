"""Base classes of adapters, which convert recorded spans into the input of an algorithm."""

from __future__ import annotations

import gc
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from opentelemetry.sdk.trace import ReadableSpan

from agentlightning.types import Span

From = TypeVar("From")
To = TypeVar("To")


class Adapter(Generic[From, To]):
    """Converts one kind of value into another; subclasses implement `adapt`."""

    def __call__(self, source: From, /) -> To:
        """Return the result of `adapt`."""
        return self.adapt(source)

    def adapt(self, source: From, /) -> To:
        """Return the converted value."""
        raise NotImplementedError(f"{type(self).__name__} has no adapt(source)")


class TraceAdapter(Adapter[Sequence[Span], To]):
    """An adapter over the stored spans of one attempt."""


class OtelTraceAdapter(Adapter[Sequence[ReadableSpan], To]):
    """An adapter for OpenTelemetry's own spans."""


@contextmanager
def garbage_collection_paused() -> Generator[None]:
    """Pause Python's cycle collector for the block; memory is still freed by reference counts.

    Reading 10,000 calls creates millions of references without cycles, which the collector scans many times: half of
    the time. If several threads use this concurrently, the thread that paused the collector restarts it.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()
