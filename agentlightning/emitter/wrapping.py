"""What `operation` needs to wrap a function: spans around all kinds of calls, and arguments as attributes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from agentlightning.utils.otel import flatten_attributes, sanitize_attributes

if TYPE_CHECKING:
    from agentlightning.emitter.annotation import OperationContext

Begin = Callable[[tuple[Any, ...], dict[str, Any]], "OperationContext | None"]
"""Opens nothing yet: returns the operation of one call, None when it is not traced."""


def traced(fn: Callable[..., Any], begin: Begin) -> Any:
    """Wrap a function, coroutine function, generator or async generator; the span lasts as long as what it does."""
    if inspect.iscoroutinefunction(fn):

        async def call_async(*args: Any, **kwargs: Any) -> Any:
            op = begin(args, kwargs)
            if op is None:
                return await fn(*args, **kwargs)
            with op:
                result = await fn(*args, **kwargs)
                op.set_output(result)
                return result

        wrapper: Callable[..., Any] = call_async
    elif inspect.isasyncgenfunction(fn):

        async def iterate_async(*args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
            with _Iteration(begin(args, kwargs)):
                async for item in fn(*args, **kwargs):
                    yield item

        wrapper = iterate_async
    elif inspect.isgeneratorfunction(fn):

        def iterate(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            with _Iteration(begin(args, kwargs)):
                return (yield from fn(*args, **kwargs))  # pyright: ignore[reportUnknownVariableType] -- the user's

        wrapper = iterate
    else:

        def call(*args: Any, **kwargs: Any) -> Any:
            op = begin(args, kwargs)
            if op is None:
                return fn(*args, **kwargs)
            with op:
                result = fn(*args, **kwargs)
                op.set_output(result)
                return result

        wrapper = call
    return functools.update_wrapper(wrapper, fn)


class _Iteration:
    """The span of a generator: from its first item to its end. Closing it early is no error."""

    def __init__(self, op: OperationContext | None) -> None:
        self._op = op

    def __enter__(self) -> None:
        if self._op is not None:
            self._op.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._op is not None:
            closed = isinstance(error, GeneratorExit)
            self._op.__exit__(*((None, None, None) if closed else (kind, error, trace)))


def signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):  # some builtins have none
        return None


def bound_arguments(
    signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
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


def lenient_attributes(values: dict[str, Any]) -> dict[str, Any]:
    """Flatten and sanitise what users pass around; what cannot be flattened is kept as text. Never raises."""
    try:
        return sanitize_attributes(flatten_attributes(values))
    except Exception:  # keys that are no strings, cycles, a broken __str__: the user's program goes on
        return {key: _text(value) for key, value in values.items()}


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:  # a broken __str__ of the user's must not end the user's program
        return f"<{type(value).__name__}: {type(error).__name__} in __str__>"
