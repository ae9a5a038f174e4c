"""Parts of `operation` for functions: the span of one call, spans around all kinds of calls, and arguments as
attributes."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from agentlightning.semconv import AGL_OPERATION
from agentlightning.tracer.base import Tracer
from agentlightning.tracer.conversion import any_attributes
from agentlightning.tracer.dummy import DummyTracer
from agentlightning.types import Attributes, SpanCoreFields, SpanRecordingContext
from agentlightning.utils.otel import emitter_debug, tell_emitted

logger = logging.getLogger(__name__)


class OpenOperation:
    """The span of one call or block, from `__enter__` to `__exit__`."""

    __slots__ = ("_attributes", "_manager", "_recording", "_tracer")

    def __init__(self, tracer: Tracer, attributes: Attributes) -> None:
        self._tracer = tracer
        self._attributes = attributes
        self._manager: AbstractContextManager[SpanRecordingContext] | None = None
        self._recording: SpanRecordingContext | None = None

    def __enter__(self) -> OpenOperation:
        self._manager = self._tracer.operation_context(AGL_OPERATION, attributes=self._attributes)
        self._recording = self._manager.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._manager is not None
        try:
            self._manager.__exit__(kind, error, trace)
        finally:
            if emitter_debug() and not isinstance(self._tracer, DummyTracer):
                tell_emitted(logger, AGL_OPERATION, self.span().attributes)

    def record(self, values: dict[str, object]) -> None:
        """Add values of any type to the span."""
        assert self._recording is not None
        self._recording.record_attributes(any_attributes(values))

    def suspend(self) -> None:
        """Suspend the span as the current one, if its tracer supports that."""
        getattr(self._recording, "suspend", _nothing)()

    def resume(self) -> None:
        """Make it the current one again."""
        getattr(self._recording, "resume", _nothing)()

    def span(self) -> SpanCoreFields:
        assert self._recording is not None
        return self._recording.get_recorded_span()


def _nothing() -> None:
    """Do nothing: recordings of a custom tracer cannot be suspended."""


Begin = Callable[[tuple[object, ...], dict[str, object]], OpenOperation | None]
"""Returns the operation of one call, which is not open yet; None if the call is not recorded."""


def traced(fn: Callable[..., Any], begin: Begin, output: str) -> Any:
    """Wrap a function, coroutine function, generator or async generator; the span lasts as long as its execution.

    The result of a function is added to the span under the key `output`; yielded values are not.
    """
    if _is(inspect.iscoroutinefunction, fn):

        async def call_async(*args: object, **kwargs: object) -> object:
            op = begin(args, kwargs)
            if op is None:
                return await fn(*args, **kwargs)
            with op:
                result = await fn(*args, **kwargs)
                op.record({output: result})
                return result

        wrapper: Callable[..., Any] = call_async
    elif _is(inspect.isasyncgenfunction, fn):

        async def iterate_async(*args: object, **kwargs: object) -> AsyncGenerator[object, object]:
            op, source = begin(args, kwargs), fn(*args, **kwargs)
            with _Pieces(op) as pieces:
                step: Callable[[], Awaitable[Any]] = source.__anext__
                while True:
                    try:
                        with pieces:
                            item = await step()
                    except StopAsyncIteration:
                        return
                    try:
                        step = functools.partial(source.asend, (yield item))
                    except GeneratorExit:
                        with pieces:
                            await source.aclose()
                        raise
                    except BaseException as error:  # thrown in by the caller, for the generator to answer
                        step = functools.partial(source.athrow, error)

        wrapper = iterate_async
    elif _is(inspect.isgeneratorfunction, fn):

        def iterate(*args: object, **kwargs: object) -> Generator[object, object, object]:
            op, source = begin(args, kwargs), fn(*args, **kwargs)
            with _Pieces(op) as pieces:
                step: Callable[[], Any] = source.__next__
                while True:
                    try:
                        with pieces:
                            item = step()
                    except StopIteration as end:
                        return end.value
                    try:
                        step = functools.partial(source.send, (yield item))
                    except GeneratorExit:
                        with pieces:
                            source.close()
                        raise
                    except BaseException as error:  # thrown in by the caller, for the generator to answer
                        step = functools.partial(source.throw, error)

        wrapper = iterate
    else:

        def call(*args: object, **kwargs: object) -> object:
            op = begin(args, kwargs)
            if op is None:
                return fn(*args, **kwargs)
            with op:
                result = fn(*args, **kwargs)
                op.record({output: result})
                return result

        wrapper = call
    return functools.update_wrapper(wrapper, fn)


def _is(kind: Callable[[Any], bool], fn: object) -> bool:
    """True if a function, or the `__call__` of a callable object, is of this kind."""
    return kind(fn) or (not inspect.isroutine(fn) and kind(inspect.getattr_static(fn, "__call__", None)))


class _Pieces:
    """The span of a generator, entered twice: for its complete life, and again for each piece of its work.

    The span is the current one only within a piece, because other code runs between two items. Closing early is not an
    error.
    """

    def __init__(self, op: OpenOperation | None) -> None:
        self._op = op
        self._begun = self._inside = False

    def __enter__(self) -> _Pieces:
        if self._op is not None:
            if self._begun:
                self._op.resume()
                self._inside = True
            else:
                self._op.__enter__()
                self._op.suspend()
        self._begun = True
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._op is None:
            return
        if self._inside:
            self._op.suspend()
            self._inside = False
        else:
            closed = isinstance(raised[1], GeneratorExit)
            self._op.__exit__(*((None, None, None) if closed else raised))


def signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):  # some builtins have none
        return None


def bound_arguments(
    signature: inspect.Signature | None, args: tuple[object, ...], kwargs: dict[str, object]
) -> dict[str, object]:
    """Return the arguments by parameter name, defaults included; keyword collections are spread."""
    try:
        if signature is None:
            raise TypeError("no signature")
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return {"args": list(args), "kwargs": kwargs}
    bound.apply_defaults()
    variadic = {p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_POSITIONAL}
    return {key: list(value) if key in variadic else value for key, value in bound.arguments.items()}
