"""A custom tracer: it writes the spans of each attempt to the store, and as lines to a file."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.tracer.base import with_active_tracer_context
from agentlightning.types import SpanCoreFields, SpanRecordingContext


@dataclass
class Trace:
    """One attempt and its spans."""

    rollout_id: str | None = None
    attempt_id: str | None = None
    spans: list[agl.Span] = field(default_factory=list[agl.Span])

    def add(self, values: SpanCoreFields) -> None:
        span = agl.Span.from_attributes(
            **dict(values),
            rollout_id=self.rollout_id,
            attempt_id=self.attempt_id,
            sequence_id=-1,  # the store numbers it
        )
        self.spans.append(span)


class FileTracer(agl.DummyTracer):
    """Collects the spans of an attempt; stores them when it ends, and appends them to `path`.

    `DummyTracer` makes the values of spans and stores none; this class handles them. A context variable, which threads
    and tasks of an agent inherit, separates concurrent attempts.
    """

    def __init__(self, path: str | Path = "spans.jsonl") -> None:
        super().__init__()
        self._path = Path(path)
        self._trace: ContextVar[Trace] = ContextVar("trace")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._path,)  # a runner in another process makes its own tracer

    @with_active_tracer_context  # inside, `emit_reward`, `operation` and others use this tracer
    @asynccontextmanager
    async def trace_context(
        self,
        name: str | None = None,
        *,
        store: agl.LightningStore | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> AsyncGenerator[Trace]:
        trace = Trace(rollout_id, attempt_id)
        self._trace.set(trace)  # stays set: `get_last_trace` is also called after the end
        try:
            yield trace
        finally:
            if self._store is not None and rollout_id is not None and trace.spans:
                trace.spans = await self._store.add_many_spans(trace.spans)
            with self._path.open("a") as file:
                file.writelines(json.dumps({"span": each.name, **each.attributes}) + "\n" for each in trace.spans)

    def create_span(self, name: str, *args: Any, **kwargs: Any) -> SpanCoreFields:
        values = super().create_span(name, *args, **kwargs)
        self._trace.get(Trace()).add(values)
        return values

    @contextmanager
    def operation_context(self, name: str, *args: Any, **kwargs: Any) -> Generator[SpanRecordingContext]:
        recording: SpanRecordingContext | None = None
        try:
            with super().operation_context(name, *args, **kwargs) as recording:
                yield recording
        finally:
            if recording is not None:
                self._trace.get(Trace()).add(recording.get_recorded_span())

    def get_last_trace(self) -> list[agl.Span]:
        return list(self._trace.get(Trace()).spans)
