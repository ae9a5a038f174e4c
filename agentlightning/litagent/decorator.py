"""`@rollout`, `@llm_rollout`, `@prompt_rollout`: a function as an agent."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, SupportsIndex, TypeVar, cast, overload

from typing_extensions import override

from agentlightning.litagent.injection import Ask, asks_of
from agentlightning.litagent.litagent import LitAgent
from agentlightning.types import AttemptedRollout, NamedResources, ProxyLLM, Rollout, RolloutMode, RolloutRawResult

T = TypeVar("T")
Func = Callable[..., Any]


class PickledByName:
    """What a decorator makes of a function; pickles by name where the name is found in its module."""

    @override
    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        name = getattr(self, "__qualname__", "")
        found: object = sys.modules.get(getattr(self, "__module__", ""))
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self and name else super().__reduce_ex__(protocol)


class FunctionalLitAgent(PickledByName, LitAgent[T]):
    """A function as an agent. It keeps the function's name, and calling it calls the function.

    With `strip_proxy` (the default) a `ProxyLLM` reaches the function as a plain `LLM` whose address belongs to the
    attempt. Pickles by name where the decorated name is found in its module, else with the function.

    Raises:
        ValueError: the parameters ask for something unknown; see `injection.py`.
        TypeError: it is no function, or a generator.
    """

    def __init__(self, rollout_func: Func, *, strip_proxy: bool = True) -> None:
        super().__init__()
        _check_callable(rollout_func)
        self._asks = asks_of(rollout_func)
        self._func = rollout_func
        self._is_async = is_coroutine_function(rollout_func)
        self._strip_proxy = strip_proxy
        self.needs_resources = any(ask.kind in ("resource", "resources") and not ask.optional for ask in self._asks)
        functools.update_wrapper(cast(Any, self), rollout_func)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the function itself."""
        return self._func(*args, **kwargs)

    @override
    def is_async(self) -> bool:
        return self._is_async

    @override
    def method_for(self, mode: RolloutMode | None) -> Func:
        return self.rollout_async if self._is_async else self.rollout

    @override
    def rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Call the function with what it asks for.

        Raises:
            RuntimeError: it is asynchronous.
        """
        if self._is_async:
            raise RuntimeError(f"{self._func} is asynchronous; call rollout_async")
        return self._func(task, **self._arguments(resources, rollout))

    @override
    async def rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Call the coroutine function with what it asks for.

        Raises:
            RuntimeError: it is synchronous.
        """
        if not self._is_async:
            raise RuntimeError(f"{self._func} is synchronous; call rollout")
        return await self._func(task, **self._arguments(resources, rollout))

    def _arguments(self, resources: NamedResources, rollout: Rollout) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        for ask in self._asks:
            value = self._value(ask, resources, rollout)
            if value is not None or not ask.optional or ask.default_none:
                arguments[ask.name] = value
        return arguments

    def _value(self, ask: Ask, resources: NamedResources, rollout: Rollout) -> Any:
        if ask.kind == "rollout":
            return rollout
        if ask.kind == "tracer":
            return self.get_tracer()
        if ask.kind == "resources":
            return {name: self._stripped(value, rollout) for name, value in resources.items()}
        return self._stripped(ask.find(resources), rollout)

    def _stripped(self, resource: object, rollout: Rollout) -> Any:
        if not (self._strip_proxy and isinstance(resource, ProxyLLM)):
            return resource
        if not isinstance(rollout, AttemptedRollout):
            raise ValueError(
                "A ProxyLLM can be given its address only within an attempt; "
                f"got a {type(rollout).__name__} without one. Use strip_proxy=False to get the ProxyLLM itself."
            )
        return resource.with_attempted_rollout(rollout)


@overload
def rollout(func: Func, *, strip_proxy: bool = True) -> FunctionalLitAgent[Any]: ...
@overload
def rollout(func: None = None, *, strip_proxy: bool = True) -> Callable[[Func], FunctionalLitAgent[Any]]: ...
def rollout(func: Func | None = None, *, strip_proxy: bool = True) -> Any:
    """Make an agent of a function `(task, ...)`. It may ask for `llm`, `prompt_template`, `rollout`, `resources`,
    `tracer`, or for resources by their type; it is checked here, not at the first rollout.

    Raises:
        NotImplementedError: the parameters do not fit.
    """
    if func is None:
        return functools.partial(rollout, strip_proxy=strip_proxy)
    try:
        return FunctionalLitAgent[Any](func, strip_proxy=strip_proxy)
    except ValueError as error:
        raise NotImplementedError(f"The function does not match any known agent patterns. {error}") from error


@overload
def llm_rollout(func: Func, *, strip_proxy: bool = True) -> FunctionalLitAgent[Any]: ...
@overload
def llm_rollout(func: None = None, *, strip_proxy: bool = True) -> Callable[[Func], FunctionalLitAgent[Any]]: ...
def llm_rollout(func: Func | None = None, *, strip_proxy: bool = True) -> Any:
    """Make an agent of a function `(task, llm, ...)`.

    Raises:
        ValueError: the parameters do not fit.
    """
    if func is None:
        return functools.partial(llm_rollout, strip_proxy=strip_proxy)
    _require(func, "llm")
    return FunctionalLitAgent[Any](func, strip_proxy=strip_proxy)


@overload
def prompt_rollout(func: Func) -> FunctionalLitAgent[Any]: ...
@overload
def prompt_rollout(func: None = None) -> Callable[[Func], FunctionalLitAgent[Any]]: ...
def prompt_rollout(func: Func | None = None) -> Any:
    """Make an agent of a function `(task, prompt_template, ...)`.

    Raises:
        ValueError: the parameters do not fit.
    """
    if func is None:
        return prompt_rollout
    _require(func, "prompt_template")
    return FunctionalLitAgent[Any](func)


def as_agent(agent: object) -> LitAgent[Any]:
    """Return an agent: one as it is, a plain function as `rollout` makes it.

    Raises:
        TypeError: it is neither.
        NotImplementedError: the function's parameters do not fit.
    """
    if isinstance(agent, LitAgent):
        return cast(LitAgent[Any], agent)
    if callable(agent) and not isinstance(agent, type):
        return rollout(agent)
    form = f"the class {agent.__name__}; give an object of it" if isinstance(agent, type) else f"{agent!r}"
    raise TypeError(f"An agent is a LitAgent, or a function (task, ...) such as @agl.rollout takes; got {form}")


def _require(func: Func, name: str) -> None:
    _check_callable(func)
    parameters = list(inspect.signature(func).parameters)
    if len(parameters) < 2:
        raise ValueError(f"{func} must have at least 2 parameters: task and {name}")
    if parameters[0] != "task":
        raise ValueError(f"The first parameter of {func} must be a positional parameter called 'task'")
    if name not in parameters:
        raise ValueError(f"{func} must have a positional parameter called '{name}'")


def _check_callable(func: object) -> None:
    if not callable(func):
        raise TypeError(f"An agent function must be callable; got {func!r}")
    if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
        raise TypeError(
            f"{func} is a generator; an agent returns its reward. Emit rewards on the way with emit_reward."
        )


def is_coroutine_function(func: Any) -> bool:
    """True for coroutine functions, and for objects whose `__call__` is one."""
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(type(func).__call__)
