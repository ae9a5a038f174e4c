"""Tracer: the interface of all tracers, and the active tracer of a context."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Callable, Generator
from contextlib import (
    AbstractAsyncContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from contextvars import copy_context
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from typing_extensions import ParamSpec, override

from agentlightning.store.wrappers import complete
from agentlightning.tracer.scope import TraceScope, current_scope
from agentlightning.types import Attributes, ParallelWorkerBase, Span, SpanCoreFields, SpanRecordingContext, TraceStatus
from agentlightning.utils.backoff import OUTAGE_SECONDS

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class TraceAdapter:
    """An observer of traces. Add it to a tracer with `add_observer`; override `on_trace_end`.

    `agl.TraceAdapter` is another class: it converts spans to training data.
    """

    store: LightningStore
    """The store of the trace."""

    def on_trace_end(self, span: Span) -> None:
        """Process a span of a trace that has ended. Called once per span, in the order of their ends. Must not block.

        Its exceptions are logged.
        """

    def __getstate__(self) -> dict[str, object]:
        """Exclude the store, which belongs to a process."""
        return {name: value for name, value in self.__dict__.items() if name != "store"}


class OpenRecording(SpanRecordingContext, Protocol):
    """A span that is being recorded, for its tracer."""

    def finalize(self, end_time: float | None = None) -> None:
        """End the span at a time in seconds; None is now."""


class Tracer(ParallelWorkerBase):
    """Records the code inside `trace_context` as spans.

    One object serves one worker; several rollouts may be open at once in different tasks or threads. Nothing is started
    before `init_worker`, so a tracer may be pickled, or created before a fork.
    """

    _store: LightningStore | None = None
    _observers: tuple[TraceAdapter, ...] = ()
    store_unreachable_timeout: float = OUTAGE_SECONDS
    """Seconds for which the spans of an attempt are kept while the store is unreachable; runners set it."""

    @override
    def init_worker(self, worker_id: int, store: LightningStore | None = None) -> None:
        """Set the worker id and its store; subclasses install their backend here."""
        super().init_worker(worker_id)
        self._store = None if store is None else complete(store)

    def add_observer(self, observer: TraceAdapter) -> None:
        """Add an observer that gets the spans of each ended trace after they are stored."""
        self._observers = (*self._observers, observer)

    def trace_context(
        self,
        name: str | None = None,
        *,
        store: LightningStore | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> AbstractAsyncContextManager[Any]:
        """Return an async context manager around one attempt; its spans are in the store when it has ended.

        Without ids the spans are kept only for `get_last_trace`. `store` is deprecated: pass it to `init_worker`.

        Raises:
            ValueError: one id without the other, ids without a store, or a context is open here already.
            TraceDeliveryError: at the end, if the body succeeded and the store did not accept the spans.
        """
        raise NotImplementedError(f"{type(self).__name__} has no trace_context; use OtelTracer")

    def get_last_trace(self) -> list[Span]:
        """Return a copy of the spans of the open context, else of the last one, in the order in which they ended."""
        raise NotImplementedError(f"{type(self).__name__} does not store traces; use OtelTracer")

    def create_span(
        self,
        name: str,
        attributes: Attributes | None = None,
        timestamp: float | None = None,
        status: TraceStatus | None = None,
    ) -> SpanCoreFields:
        """Record a span that begins and ends at `timestamp` (seconds; now by default) and return its fields."""
        raise NotImplementedError(f"{type(self).__name__} cannot create spans")

    @contextmanager
    def operation_context(
        self,
        name: str,
        attributes: dict[str, Any] | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
    ) -> Generator[SpanRecordingContext]:
        """Return a context manager that records its body as one span; times are in seconds, by default the body's."""
        recording = self._begin(name, attributes, start_time)
        try:
            yield recording
        except BaseException as error:  # also records cancellation and interrupts
            recording.record_exception(error)
            raise
        finally:
            recording.finalize(end_time)

    def _begin(self, name: str, attributes: dict[str, Any] | None, start_time: float | None) -> OpenRecording:
        """Begin the span of an operation."""
        raise NotImplementedError(f"{type(self).__name__} cannot trace operations")

    def get_langchain_handler(self) -> Any:
        """Return a LangChain callback handler; None if the tracer has none."""
        logger.warning("%s has no LangChain handler: only model calls through the gateway are recorded", type(self))
        return None

    async def trace_run_async(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Deprecated: run a coroutine function inside `trace_context`."""
        warnings.warn("trace_run_async is deprecated; use trace_context", DeprecationWarning, stacklevel=2)
        async with self.trace_context(func.__name__):
            return await func(*args, **kwargs)

    def trace_run(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Deprecated: run a function inside `trace_context`, on this thread.

        Raises:
            RuntimeError: an event loop is running on this thread.
        """
        warnings.warn("trace_run is deprecated; use trace_context", DeprecationWarning, stacklevel=2)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise RuntimeError("An event loop is running here. Await trace_run_async(...), or use trace_context")
        context, scope = copy_context(), self.trace_context(func.__name__)

        async def enter() -> None:
            await scope.__aenter__()

        async def leave(*details: Any) -> bool | None:
            return await scope.__aexit__(*details)

        with asyncio.Runner() as runner, ExitStack() as stack:
            runner.run(enter(), context=context)

            def end(*details: Any) -> bool | None:
                return runner.run(leave(*details), context=context)

            stack.push(end)
            return context.run(func, *args, **kwargs)

    @contextmanager
    def lifespan(self, store: LightningStore | None = None) -> Generator[None]:
        """Initialise the tracer as worker 0 for the body; at the end, undo the steps that succeeded."""
        self.init()
        try:
            self.init_worker(0, store)
            try:
                yield
            finally:
                self.teardown_worker(0)
        finally:
            self.teardown()


# --- the active tracer -------------------------------------------------------------------------------------------


def get_active_tracer() -> Tracer | None:
    """Return the tracer of the open context; None outside of one."""
    scope = current_scope()
    return cast("Tracer | None", scope.tracer) if scope is not None else None


def set_active_tracer(tracer: Tracer) -> None:
    """Make `tracer` the active one of this context. For tracers that do not open a scope themselves.

    Raises:
        ValueError: a tracer is already active here.
    """
    TraceScope(tracer).open()


def clear_active_tracer() -> None:
    """Deactivate the tracer of `set_active_tracer` or of an open context; do nothing if there is none."""
    scope = current_scope()
    if scope is not None:
        scope.close()


def with_active_tracer_context(
    trace_context: Callable[P, AbstractAsyncContextManager[T]],
) -> Callable[P, AbstractAsyncContextManager[T]]:
    """Decorate a tracer's `trace_context` so that the tracer is active inside and inactive afterwards."""

    @wraps(trace_context)
    @asynccontextmanager
    async def wrapper(*args: P.args, **kwargs: P.kwargs):
        scope = TraceScope(args[0])  # self of a Tracer method
        scope.open()
        try:
            async with trace_context(*args, **kwargs) as value:
                yield value
        finally:
            scope.close()

    return wrapper
