"""OtelTracer: spans of plain OpenTelemetry, collected per attempt.

A processor is attached to the provider that the program already uses, which goes on exporting as before; a program
without one gets a provider of ours, installed as the global one so that instrumented libraries find it. The processor
does nothing but note in which scope a span begins, and keep it there when it ends.
"""

from __future__ import annotations

import logging
import time
import warnings
import weakref
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast

from opentelemetry import trace as trace_api
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from typing_extensions import override

from agentlightning.tracer.base import Tracer
from agentlightning.tracer.delivery import TraceDeliveryError, deliver
from agentlightning.tracer.numbers import NumberDesk
from agentlightning.tracer.scope import TraceScope, current_scope, entered, scope_of
from agentlightning.types import Span, SpanCoreFields, SpanRecordingContext, StatusCode, TraceStatus
from agentlightning.utils.otel import INSTRUMENTATION_NAME, sanitize_attributes

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore

logger = logging.getLogger(__name__)

CANCELLED_DELIVERY_SECONDS = 1.0
"""Time to deliver what there is when the attempt is cancelled."""

_processors: weakref.WeakKeyDictionary[TracerProvider, LightningSpanProcessor] = weakref.WeakKeyDictionary()
_last_scope: ContextVar[TraceScope | None] = ContextVar("agentlightning_last_scope", default=None)


class LightningSpanProcessor(SpanProcessor):
    """Keeps spans in the scope in which they began. Touches no store and holds no state of its own."""

    @override
    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:
        scope = current_scope()
        context = span.get_span_context()
        if scope is not None and context is not None:
            scope.begin(context.span_id)

    @override
    def on_end(self, span: ReadableSpan) -> None:
        scope = scope_of(span)
        if scope is not None:
            scope.end(span)

    @override
    def shutdown(self) -> None:
        """Nothing to release."""

    @override
    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Spans wait for the end of their scope, never here."""
        return True


def attach_processor() -> TracerProvider:
    """Return the SDK provider in use, with our processor on it; makes a global one if the program has none."""
    provider = trace_api.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        foreign = not isinstance(provider, trace_api.ProxyTracerProvider)
        provider = TracerProvider(span_limits=SpanLimits(max_span_attributes=SpanLimits.UNSET), shutdown_on_exit=False)
        if foreign:
            logger.warning(
                "The global tracer provider is no SDK provider: spans of instrumented libraries are not seen"
            )
        else:
            trace_api.set_tracer_provider(provider)
    if provider not in _processors:
        _processors[provider] = LightningSpanProcessor()
        provider.add_span_processor(_processors[provider])
    return provider


class OtelSpanRecordingContext:
    """An OpenTelemetry span that is being recorded."""

    def __init__(self, span: trace_api.Span) -> None:
        self._span = span

    def record_exception(self, exception: BaseException) -> None:
        """Add an `exception` event; the status becomes `ERROR`."""
        self._span.record_exception(exception)
        self.record_status("ERROR", f"{type(exception).__name__}: {exception}")

    def record_attributes(self, attributes: dict[str, Any]) -> None:
        """Add attributes; values that a span cannot hold become text."""
        self._span.set_attributes(sanitize_attributes(attributes))

    def record_status(self, status_code: StatusCode, description: str | None = None) -> None:
        """Set the status."""
        _set_status(self._span, TraceStatus(status_code=status_code, description=description))

    def get_otel_span(self) -> trace_api.Span:
        """Return the OpenTelemetry span."""
        return self._span

    def get_recorded_span(self) -> SpanCoreFields:
        """Return what was recorded so far.

        Raises:
            ValueError: the sampler dropped the span.
        """
        if not isinstance(self._span, ReadableSpan):
            raise ValueError(f"Span of type {type(self._span).__name__} was not recorded (dropped by the sampler?)")
        span = Span.from_opentelemetry(self._span, "", "", 0)
        return SpanCoreFields(
            name=span.name,
            status=span.status,
            attributes=span.attributes,
            start_time=span.start_time,
            end_time=span.end_time,
        )


class OtelTracer(Tracer):
    """The default tracer. `store` is the store to use where `lifespan` and `init_worker` are given none."""

    def __init__(self, store: LightningStore | None = None) -> None:
        super().__init__()
        self._default_store = store
        self._provider: TracerProvider | None = None
        self._otel_tracer: trace_api.Tracer | None = None
        self._last: TraceScope | None = None
        self._desk: NumberDesk | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process; the copy needs its own `init_worker`."""
        return {**self.__dict__, "_provider": None, "_otel_tracer": None, "_last": None, "_desk": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> OtelTracer:
        """A copy for another worker; it shares the default store, which is the store and not a part of the tracer."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__getstate__())
        return twin

    @override
    def init_worker(self, worker_id: int, store: LightningStore | None = None) -> None:
        """Find the provider and attach to it. Safe to repeat."""
        super().init_worker(worker_id, store if store is not None else self._default_store)
        self._provider = attach_processor()
        self._otel_tracer = self._provider.get_tracer(INSTRUMENTATION_NAME)
        self._desk = self._desk or NumberDesk()

    @override
    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """End the thread that draws numbers; the tracer may still be used."""
        if self._desk is not None:
            self._desk.close()

    @override
    @asynccontextmanager
    async def trace_context(
        self,
        name: str | None = None,
        *,
        store: LightningStore | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> AsyncGenerator[trace_api.Tracer]:
        """See `Tracer.trace_context`. Makes no span of its own; gives the OpenTelemetry tracer."""
        scope = self._new_scope(store, rollout_id, attempt_id)
        scope.open()
        self._remember(scope)
        failed, seconds = False, None
        try:
            yield self._tracer()
        except BaseException as error:
            failed = True
            seconds = None if isinstance(error, Exception) else CANCELLED_DELIVERY_SECONDS
            raise
        finally:
            scope.close()
            await self._deliver(scope, failed, seconds)

    @override
    def get_last_trace(self) -> list[Span]:
        self._tracer("LightningSpanProcessor")
        last = _last_scope.get()
        scope = last if last is not None and last.tracer is self else self._last
        return scope.spans() if scope is not None else []

    @override
    def create_span(
        self,
        name: str,
        attributes: dict[str, Any] | None = None,
        timestamp: float | None = None,
        status: TraceStatus | None = None,
    ) -> SpanCoreFields:
        moment = timestamp or time.time()
        fields = SpanCoreFields(
            name=name,
            status=status or TraceStatus(status_code="UNSET"),
            attributes=attributes or {},
            start_time=moment,
            end_time=moment,
        )
        scope = current_scope()
        if scope is None:
            self._emit(fields)
            return fields
        with entered(scope):
            if not self._emit(fields):  # the sampler of the program dropped it; evidence is not sampled
                scope.append(scope.span_from(fields), emitted=True)
        return fields

    @override
    @contextmanager
    def operation_context(
        self,
        name: str,
        attributes: dict[str, Any] | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
    ) -> Generator[SpanRecordingContext]:
        span = self._tracer().start_span(name, attributes=attributes, start_time=_nanoseconds(start_time))
        recording = OtelSpanRecordingContext(span)
        try:
            with trace_api.use_span(span, record_exception=False, set_status_on_exception=False):
                yield recording
        except BaseException as error:  # cancellation and interrupts are part of what happened
            recording.record_exception(error)
            raise
        finally:
            span.end(_nanoseconds(end_time))

    def _emit(self, fields: SpanCoreFields) -> bool:
        """Send a finished span through OpenTelemetry; False if it was dropped."""
        moment = _nanoseconds(fields.start_time)
        span = self._tracer().start_span(
            fields.name, attributes=cast(Mapping[str, Any], fields.attributes), start_time=moment
        )
        if not span.is_recording():
            return False
        _set_status(span, fields.status)
        span.end(moment)
        return True

    def _tracer(self, missing: str = "TracerProvider") -> trace_api.Tracer:
        if self._otel_tracer is None:
            raise RuntimeError(f"{missing} is not initialized. Call init_worker() first.")
        return self._otel_tracer

    def _new_scope(self, store: LightningStore | None, rollout_id: str | None, attempt_id: str | None) -> TraceScope:
        self._tracer("LightningSpanProcessor")
        if store is not None:
            warnings.warn(
                "trace_context(store=...) is deprecated; give the store to init_worker",
                DeprecationWarning,
                stacklevel=4,
            )
        if (rollout_id is None) != (attempt_id is None):
            raise ValueError("rollout_id and attempt_id must be either all provided or all None")
        bound = store if store is not None else self._store
        if rollout_id is None:
            return TraceScope(self)
        if bound is None:
            raise ValueError("store is required to be initialized when rollout_id and attempt_id are provided")
        return TraceScope(self, bound, rollout_id, attempt_id, self._desk)

    def _remember(self, scope: TraceScope) -> None:
        self._last = scope
        _last_scope.set(scope)

    @staticmethod
    async def _deliver(scope: TraceScope, failed: bool, seconds: float | None) -> None:
        try:
            await (deliver(scope) if seconds is None else deliver(scope, seconds))
        except TraceDeliveryError as error:
            if not failed:
                raise
            logger.error("%s", error)  # the body's own exception goes on


def _nanoseconds(seconds: float | None) -> int | None:
    return int(seconds * 1e9) if seconds else None


def _set_status(span: trace_api.Span, status: TraceStatus) -> None:
    if status.status_code != "UNSET":
        span.set_status(trace_api.StatusCode[status.status_code], status.description)
