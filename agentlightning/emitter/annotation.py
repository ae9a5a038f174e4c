"""Annotations: spans with attributes of a rollout; and `operation`, which records a function call, a
generator or a block as one span."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TypeVar, cast, overload

from typing_extensions import ParamSpec

from agentlightning.emitter.wrapping import OpenOperation, bound_arguments, signature_of, traced
from agentlightning.semconv import AGL_ANNOTATION, LightningSpanAttributes
from agentlightning.tracer.base import Tracer, get_active_tracer
from agentlightning.tracer.conversion import any_attributes
from agentlightning.tracer.dummy import DummyTracer
from agentlightning.tracer.scope import ended_scope
from agentlightning.types import Attributes, SpanCoreFields, TraceStatus
from agentlightning.utils.otel import check_attributes_sanity, flatten_attributes, sanitize_attributes, tell_emitted

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

NAME = LightningSpanAttributes.OPERATION_NAME.value
INPUT = LightningSpanAttributes.OPERATION_INPUT.value
OUTPUT = LightningSpanAttributes.OPERATION_OUTPUT.value
OK = TraceStatus(status_code="OK")
_DUMMY = DummyTracer()
_open: ContextVar[tuple[tuple[OperationContext, OpenOperation], ...]] = ContextVar(
    "agentlightning_operations", default=()
)
"""The blocks that are open in this context, the innermost last."""


def send(
    active: Tracer | None, name: str, attributes: Attributes, status: TraceStatus | None, propagate: bool
) -> SpanCoreFields:
    """Create the span with the active tracer, or with one that sends nothing; `AGL_EMITTER_DEBUG` logs it.

    Raises:
        RuntimeError: no tracer is active to send the span, or the task or thread has outlived its rollout.
    """
    what = name.rpartition(".")[2]
    tracer = active if propagate else _DUMMY
    if tracer is None and (ended := ended_scope()) is not None:
        ended.refuse()
        raise RuntimeError(
            f"No active tracer found: rollout {ended.rollout_id} has ended, and this {what} span was emitted by a "
            "task or thread that was started inside it. Wait for your tasks and threads before the agent returns."
        )
    if tracer is None:
        raise RuntimeError(
            f"No active tracer found. Cannot emit {what} span. Emit inside a rollout, or inside "
            "`async with tracer.trace_context(...)`. In your own thread, run the function with "
            "contextvars.copy_context().run(...). To create the span without storing it, pass propagate=False."
        )
    tell_emitted(logger, name, attributes)
    return tracer.create_span(name, attributes=attributes, status=status)


def emit_annotation(annotation: Mapping[str, object], propagate: bool = True) -> SpanCoreFields:
    """Attach attributes to the rollout, as a separate span. Nested values are flattened.

    Raises:
        ValueError: a leaf is not a string, number, boolean or list of one of these.
        RuntimeError: no tracer is active and `propagate` is true.
    """
    attributes = flatten_attributes(annotation)
    check_attributes_sanity(attributes)
    return send(get_active_tracer() if propagate else None, AGL_ANNOTATION, attributes, OK, propagate)


class OperationContext:
    """A block (`with operation(...) as op`), or a decorator if it is called with a function.

    The tracer is looked up when the block or function starts; without one, nothing is recorded. One object may be used
    for any number of blocks, also concurrently in several tasks and threads. With `propagate=False` nothing is stored.
    """

    def __init__(
        self, name: str | None, attributes: Mapping[str, object] | None = None, propagate: bool = True
    ) -> None:
        self._attributes = sanitize_attributes(flatten_attributes(attributes or {}))
        if name is not None:
            if NAME in self._attributes:
                raise ValueError(f"Cannot specify both name= and the attribute {NAME}; pass only one of them")
            self._attributes[NAME] = name
        self._propagate = propagate
        self._running: list[OpenOperation] = []
        self._ended: OpenOperation | None = None

    def __enter__(self) -> OperationContext:
        tracer = get_active_tracer() if self._propagate else None
        operation = OpenOperation(tracer or _DUMMY, dict(self._attributes)).__enter__()
        self._running.append(operation)
        _open.set((*_open.get(), (self, operation)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # the collector closes generators in contexts of its own
        operation = self._in_this_context() or self._running[-1]
        self._running.remove(operation)
        _open.set(tuple(entry for entry in _open.get() if entry[1] is not operation))
        try:
            operation.__exit__(kind, error, trace)
        finally:
            self._ended = operation

    def set_input(self, *args: object, **kwargs: object) -> None:
        """Record the input of the operation.

        Raises:
            RuntimeError: outside of the block.
        """
        self._record({f"{INPUT}.args": list(args), **{f"{INPUT}.{key}": value for key, value in kwargs.items()}})

    def set_output(self, output: object) -> None:
        """Record the output of the operation.

        Raises:
            RuntimeError: outside of the block.
        """
        self._record({OUTPUT: output})

    def span(self) -> SpanCoreFields:
        """Return the span of the last ended block.

        Raises:
            RuntimeError: the block has not ended.
            ValueError: OpenTelemetry is disabled.
        """
        if self._ended is None or self._in_this_context() is not None:
            raise RuntimeError("Span is not ready yet. Call span() after the operation has ended.")
        return self._ended.span()

    def _in_this_context(self) -> OpenOperation | None:
        """Return the innermost block of this object that is open in this context."""
        return next((operation for owner, operation in reversed(_open.get()) if owner is self), None)

    def _record(self, values: dict[str, object]) -> None:
        operation = self._in_this_context()
        if operation is None and len(self._running) == 1:  # a plain thread, which has no context
            operation = self._running[0]
        if operation is None:
            raise RuntimeError("The operation is not open; set inputs and outputs inside its `with` block")
        operation.record(values)

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Return a wrapper of `fn` that records each call as one span, with its arguments and result."""
        if isinstance(fn, (staticmethod, classmethod)):
            inner = cast(Any, fn)
            return cast(Callable[P, R], type(inner)(self(inner.__func__)))
        attributes = {NAME: getattr(fn, "__name__", type(fn).__name__), **self._attributes}
        signature = signature_of(fn)

        def begin(args: tuple[object, ...], kwargs: dict[str, object]) -> OpenOperation | None:
            tracer = get_active_tracer() if self._propagate else _DUMMY
            if tracer is None:
                return None
            input_attributes = any_attributes({INPUT: bound_arguments(signature, args, kwargs)})
            return OpenOperation(tracer, {**attributes, **input_attributes})

        return cast(Callable[P, R], traced(fn, begin, OUTPUT))


@overload
def operation(fn: Callable[P, R], *, propagate: bool = True, name: str | None = None) -> Callable[P, R]: ...
@overload
def operation(
    fn: None = None, *, propagate: bool = True, name: str | None = None, **attributes: Any
) -> OperationContext: ...
def operation(
    fn: Callable[..., Any] | None = None, *, propagate: bool = True, name: str | None = None, **attributes: Any
) -> Any:
    """Record a function or a block as a span: `@operation`, `@operation(name=...)`, `with operation(...) as op`.

    All spans are called `agentlightning.operation`; `name` (by default the function's) is an attribute. Without an
    active tracer the function runs unchanged. `propagate=False` creates the span without storing it.

    Raises:
        ValueError: the positional argument is not a function, or the name is set twice.
    """
    if fn is not None and not callable(fn) and not isinstance(fn, (staticmethod, classmethod)):
        raise ValueError(
            "Custom span names are intentionally not supported. Use operation(name=...) to name the operation; "
            f"got the positional argument {fn!r}"
        )
    context = OperationContext(name, attributes, propagate)
    return context if fn is None else context(fn)
