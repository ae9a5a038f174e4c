"""OtelTracer: plain OpenTelemetry spans, collected per attempt. `provider.py` has their providers."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, ClassVar, cast

from opentelemetry import context as otel_context
from opentelemetry import trace as trace_api
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan
from typing_extensions import override

from agentlightning.instrumentation.clients import instrument_clients, uninstrument_clients
from agentlightning.store.wrappers import complete
from agentlightning.tracer.conversion import span_of
from agentlightning.tracer.delivery import TraceDeliveryError, deliver
from agentlightning.tracer.manual import ManualTracing, last_scope
from agentlightning.tracer.mirror import close_mirror, open_mirror
from agentlightning.tracer.provider import LightningSpanProcessor, own_provider, watch_global_provider
from agentlightning.tracer.scope import TraceScope, current_scope, entered
from agentlightning.tracer.sequence_ids import SequenceIds
from agentlightning.types import Attributes, Span, SpanCoreFields, StatusCode, TraceStatus
from agentlightning.utils.exceptions import message_of, readable
from agentlightning.utils.otel import INSTRUMENTATION_NAME, sanitize_attributes

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore

__all__ = ["LightningSpanProcessor", "OtelSpanRecordingContext", "OtelTracer"]

logger = logging.getLogger(__name__)

CANCELLED_DELIVERY_SECONDS = 1.0
"""Seconds to deliver the spans of a cancelled attempt."""

_resumed: ContextVar[OtelSpanRecordingContext | None] = ContextVar("agentlightning_resumed", default=None)


class OtelSpanRecordingContext:
    """An OpenTelemetry span that is being recorded. Current from `resume` to `suspend`; one context at a time."""

    def __init__(self, span: trace_api.Span, success: StatusCode = "UNSET") -> None:
        """`success` is the status of a span that ends without an exception."""
        self._span = span
        self._success: StatusCode = success
        self._resumed: tuple[Token[OtelSpanRecordingContext | None], Token[Context]] | None = None

    def resume(self) -> None:
        """Make the span the current one of this context: spans that begin in it are its children."""
        attached = otel_context.attach(trace_api.set_span_in_context(self._span))
        self._resumed = (_resumed.set(self), attached)

    def suspend(self) -> None:
        """Undo `resume`. Does nothing in another context, where a generator may be closed by the collector."""
        if self._resumed is None:
            return
        (here, attached), self._resumed = self._resumed, None
        try:
            _resumed.reset(here)
        except ValueError:  # made in another context
            return
        otel_context.detach(attached)

    def record_exception(self, exception: BaseException) -> None:
        """Add an `exception` event; the status becomes `ERROR`."""
        exception, self._success = readable(exception), "UNSET"
        self._span.record_exception(exception, {"exception.message": message_of(exception)})
        self.record_status("ERROR", f"{type(exception).__name__}: {message_of(exception)}")

    def record_attributes(self, attributes: Attributes) -> None:
        """Add attributes; values that a span cannot contain become text."""
        self._span.set_attributes(sanitize_attributes(attributes))

    def record_status(self, status_code: StatusCode, description: str | None = None) -> None:
        """Set the status."""
        _set_status(self._span, TraceStatus(status_code=status_code, description=description))

    def finalize(self, end_time: float | None = None) -> None:
        """Suspend the span, and end it at a time in seconds; None is now."""
        self.record_status(self._success)
        self.suspend()
        self._span.end(_nanoseconds(end_time))

    def get_otel_span(self) -> trace_api.Span:
        """Return the OpenTelemetry span."""
        return self._span

    def get_recorded_span(self) -> SpanCoreFields:
        """Return the fields recorded so far.

        Raises:
            ValueError: OpenTelemetry is disabled (`OTEL_SDK_DISABLED`).
        """
        if not isinstance(self._span, ReadableSpan):
            raise ValueError(f"Span of type {type(self._span).__name__} was not recorded (is OTEL_SDK_DISABLED set?)")
        span = span_of(self._span, "", "", 0)
        return SpanCoreFields(
            name=span.name,
            status=span.status,
            attributes=span.attributes,
            start_time=span.start_time,
            end_time=span.end_time,
        )


class OtelTracer(ManualTracing):
    """The default tracer.

    Args:
        store: the store for `lifespan` and `init_worker` without one; also `store_client`.
        rollout_id: the rollout of traces that are opened without ids; other ids are refused.
        attempt_id: the attempt of such traces.
    """

    tracer_name: ClassVar[str | None] = None
    """Name on the resource of the spans, for tracers with other spans than plain OpenTelemetry."""
    success: ClassVar[StatusCode] = "UNSET"
    """Status of an operation that did not raise."""
    traces_clients: ClassVar[bool] = True
    """True to create spans of the calls of the package `openai`; False if another instrumentation does that."""

    def __init__(
        self,
        store: LightningStore | None = None,
        *,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        store_client: LightningStore | None = None,
    ) -> None:
        super().__init__()
        if store is not None and store_client is not None and store is not store_client:
            raise TypeError("store and store_client are the same setting; pass only one of them")
        self._default_store = store if store is not None else store_client
        self.rollout_id = rollout_id
        self.attempt_id = attempt_id
        self._ids: SequenceIds | None = None
        self._mirrors = False
        self._clients_traced = False

    def __getstate__(self) -> dict[str, object]:
        """Exclude the state of this process; the copy needs its own `init_worker`."""
        mine = {"_otel_tracer": None, "_last": None, "_ids": None, "_opened": None}
        return {**self.__dict__, **mine, "_mirrors": False, "_clients_traced": False}

    def __deepcopy__(self, memo: dict[int, object]) -> OtelTracer:
        """Return a copy for another worker; it shares the default store, which is not a part of the tracer."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__getstate__())
        return twin

    @override
    def init_worker(self, worker_id: int, store: LightningStore | None = None) -> None:
        """Attach to the current tracer provider. May be repeated.

        Raises:
            ValueError, MissingExtraError: `AGENT_LIGHTNING_OTLP_ENDPOINT` is invalid, or its exporter is not installed.
        """
        super().init_worker(worker_id, store if store is not None else self._default_store)
        watch_global_provider()
        self._otel_tracer = own_provider(self.tracer_name).get_tracer(INSTRUMENTATION_NAME)
        self._ids = self._ids or SequenceIds()
        self._mirrors = self._mirrors or open_mirror()
        if self.traces_clients and not self._clients_traced:
            self._clients_traced = True
            instrument_clients()

    @override
    def teardown_worker(self, worker_id: int, *args: object, **kwargs: object) -> None:
        """End the thread that requests numbers, and send the remaining spans to the collector. May be used again."""
        if self._ids is not None:
            self._ids.close()
        mirrors, self._mirrors = self._mirrors, False
        if mirrors:
            close_mirror()
        if self._clients_traced:
            self._clients_traced = False
            uninstrument_clients()

    @override
    @asynccontextmanager
    async def trace_context(
        self,
        name: str | None = None,
        *,
        store: LightningStore | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> AsyncGenerator[Any]:
        """Open a trace; see `Tracer.trace_context`. Yields the OpenTelemetry tracer; creates no span itself."""
        scope = self._new_scope(store, rollout_id, attempt_id)
        outside = otel_context.get_current()
        scope.open()
        self._opened_scope(scope)
        failed, seconds = False, None
        try:
            with self._root(name or rollout_id or "") as value:
                yield value
        except BaseException as error:  # a cancelled attempt has little time left
            failed = True
            seconds = None if isinstance(error, Exception) else CANCELLED_DELIVERY_SECONDS
            raise
        finally:
            scope.close()
            if otel_context.get_current() is not outside:  # a library left its span here: not for the next rollout
                otel_context.attach(outside)
            try:
                await deliver(scope, self.store_unreachable_timeout if seconds is None else seconds)
            except TraceDeliveryError as error:
                if not failed:
                    raise
                logger.error("%s", error)  # the body's own exception is raised

    @override
    def get_last_trace(self) -> list[Span]:
        self._tracer("LightningSpanProcessor")
        last = last_scope.get()
        scope = last if last is not None and last.tracer is self else self._last
        return scope.spans() if scope is not None else []

    @override
    def create_span(
        self,
        name: str,
        attributes: Attributes | None = None,
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
            if not self._emit(fields):  # OpenTelemetry is switched off; spans are still collected
                scope.append(scope.span_from(fields), emitted=True)
        return fields

    @override
    def _begin(
        self, name: str, attributes: dict[str, Any] | None, start_time: float | None
    ) -> OtelSpanRecordingContext:
        span = self._tracer().start_span(name, attributes=attributes, start_time=_nanoseconds(start_time))
        recording = OtelSpanRecordingContext(span, self.success)
        recording.resume()
        return recording

    @contextmanager
    def _root(self, name: str) -> Generator[object]:
        """Wrap the body of a trace context; its value is the value of the context."""
        yield self._tracer()

    def _emit(self, fields: SpanCoreFields) -> bool:
        """Send a finished span through OpenTelemetry; False if OpenTelemetry is disabled."""
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
        watch_global_provider()
        return self._otel_tracer

    def _new_scope(self, store: LightningStore | None, rollout_id: str | None, attempt_id: str | None) -> TraceScope:
        self._tracer("LightningSpanProcessor")
        if store is not None:
            warnings.warn(
                "trace_context(store=...) is deprecated; pass the store to init_worker",
                DeprecationWarning,
                stacklevel=4,
            )
        has_ids = rollout_id is not None or attempt_id is not None
        rollout_id = self._agreed("rollout_id", self.rollout_id, rollout_id)
        attempt_id = self._agreed("attempt_id", self.attempt_id, attempt_id)
        if (rollout_id is None) != (attempt_id is None):
            raise ValueError("rollout_id and attempt_id must be either all provided or all None")
        bound = self._store if store is None else complete(store)
        if rollout_id is None:
            return TraceScope(self)
        if bound is None and not has_ids:  # the ids of the tracer whose spans are kept here
            return TraceScope(self, None, rollout_id, attempt_id)
        if bound is None:
            raise ValueError("store is required to be initialized when rollout_id and attempt_id are provided")
        return TraceScope(self, bound, rollout_id, attempt_id, self._ids)


def _nanoseconds(seconds: float | None) -> int | None:
    return int(seconds * 1e9) if seconds else None


def _set_status(span: trace_api.Span, status: TraceStatus) -> None:
    if status.status_code != "UNSET":
        span.set_status(trace_api.StatusCode[status.status_code], status.description)
