"""`@rollout`, `@llm_rollout`, `@prompt_rollout`: convert a function into an agent. Its parameters are read once, when
it is decorated.

The argument for a parameter is selected by the parameter's name (`llm`, `prompt_template`, `rollout`, `resources`,
`tracer`), then by its annotated type. A parameter for a resource gets the resource with the same name, or the first of
its type.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, SupportsIndex, TypeGuard, TypeVar, Union, cast, overload

from typing_extensions import override

from agentlightning.litagent.litagent import LitAgent
from agentlightning.tracer.base import Tracer
from agentlightning.types import (
    LLM,
    AttemptedRollout,
    CustomResource,
    NamedResources,
    PromptTemplate,
    ProxyLLM,
    Resource,
    Rollout,
    RolloutMode,
    RolloutRawResult,
    SamplingParameters,
    SystemPrompt,
)
from agentlightning.types.resources import agents_form

logger = logging.getLogger(__name__)

T = TypeVar("T")
Func = Callable[..., Any]
Kind = Literal["resource", "rollout", "resources", "tracer"]
_RESOURCE_NAMES: dict[str, type[Resource]] = {"llm": LLM, "prompt_template": PromptTemplate}
_NAMES: dict[str, Kind] = {"rollout": "rollout", "resources": "resources", "tracer": "tracer"}
_TYPE_NAMES: dict[str, object] = {
    "LLM": LLM,
    "ProxyLLM": ProxyLLM,
    "PromptTemplate": PromptTemplate,
    "SamplingParameters": SamplingParameters,
    "SystemPrompt": SystemPrompt,
    "Rollout": Rollout,
    "AttemptedRollout": AttemptedRollout,
    "NamedResources": NamedResources,
    "Tracer": Tracer,
}
"""Types by name, for annotations that cannot be evaluated, such as names imported for the type checker only."""


class PickledByName:
    """The object that a decorator returns for a function; pickled by name if its module has it under that name."""

    @override
    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        name = getattr(self, "__qualname__", "")
        value: object = sys.modules.get(getattr(self, "__module__", ""))
        for part in name.split("."):
            value = getattr(value, part, None)
        return name if value is self and name else super().__reduce_ex__(protocol)


class FunctionalLitAgent(PickledByName, LitAgent[T]):
    """A function as an agent. It has the function's name, and calling it calls the function.

    With `strip_proxy` (the default), the function gets a plain `LLM` with the address of the attempt instead of a
    `ProxyLLM`. The agent is pickled by name if its module has the decorated name, else with the function.

    Raises:
        ValueError: a parameter is unknown.
        TypeError: the object is not a function, or is a generator.
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

    @property
    def example_resources(self) -> str:
        """Python code of the resources that the function requires, for error messages."""
        needed = [(ask.name, ask.resource) for ask in self._asks if ask.kind == "resource" and not ask.optional]
        pairs = needed or [("main_llm", LLM)]  # none if the function takes the dictionary of all resources
        return "{" + ", ".join(f"{name!r}: {_class_text(resource)}(...)" for name, resource in pairs) + "}"

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
        """Call the function with arguments for its parameters.

        Raises:
            RuntimeError: the function is asynchronous.
        """
        if self._is_async:
            raise RuntimeError(f"{self._func} is asynchronous; call rollout_async")
        return self._func(task, **self._arguments(resources, rollout))

    @override
    async def rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Call the coroutine function with arguments for its parameters.

        Raises:
            RuntimeError: the function is synchronous.
        """
        if not self._is_async:
            raise RuntimeError(f"{self._func} is synchronous; call rollout")
        return await self._func(task, **self._arguments(resources, rollout))

    def _arguments(self, resources: NamedResources, rollout: Rollout) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        for ask in self._asks:
            match ask.kind:
                case "rollout":
                    value = rollout
                case "tracer":
                    value = self.get_tracer()
                case "resources":
                    value = {name: self._stripped(each, rollout) for name, each in resources.items()}
                case "resource":
                    value = self._stripped(ask.find(resources), rollout)
                    if ask.as_dict and isinstance(value, CustomResource):
                        value = dict(value.values)
            if value is not None or not ask.optional or ask.default_none:
                arguments[ask.name] = value
        return arguments

    def _stripped(self, resource: object, rollout: Rollout) -> Any:
        if not (self._strip_proxy and isinstance(resource, ProxyLLM)):
            return resource
        if not isinstance(rollout, AttemptedRollout):
            raise ValueError(
                f"A ProxyLLM has an address only within an attempt; got a {type(rollout).__name__} without an attempt. "
                "Use strip_proxy=False to get the ProxyLLM itself."
            )
        return resource.with_attempted_rollout(rollout)


@overload
def rollout(func: Func, *, strip_proxy: bool = True) -> FunctionalLitAgent[Any]: ...
@overload
def rollout(func: None = None, *, strip_proxy: bool = True) -> Callable[[Func], FunctionalLitAgent[Any]]: ...
def rollout(func: Func | None = None, *, strip_proxy: bool = True) -> Any:
    """Convert a function `(task, ...)` into an agent. It may have the parameters `llm`, `prompt_template`, `rollout`,
    `resources`, `tracer`, or resources by their type. They are checked here, not at the first rollout.

    Raises:
        NotImplementedError: a parameter is invalid.
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
    """Convert a function `(task, llm, ...)` into an agent.

    Raises:
        ValueError: a parameter is missing or invalid.
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
    """Convert a function `(task, prompt_template, ...)` into an agent.

    Raises:
        ValueError: a parameter is missing or invalid.
    """
    if func is None:
        return prompt_rollout
    _require(func, "prompt_template")
    return FunctionalLitAgent[Any](func)


def as_agent(agent: object) -> LitAgent[Any]:
    """Return an agent: a `LitAgent` unchanged; a function, or an object's `run(task, ...)`, is converted by `rollout`.

    Raises:
        TypeError: the object is none of these.
        NotImplementedError: a parameter of the function is invalid.
    """
    if isinstance(agent, LitAgent):
        return cast(LitAgent[Any], agent)
    if callable(agent) and not isinstance(agent, type):
        return rollout(agent)
    if not isinstance(agent, type) and _runs_tasks(run := getattr(agent, "run", None)):
        return cast("LitAgent[Any]", rollout(cast("Func", run)))
    form = f"the class {agent.__name__}; pass an instance of it" if isinstance(agent, type) else f"{agent!r}"
    raise TypeError(
        "An agent must be a LitAgent, a function (task, ...) as for @agl.rollout, or an object with run(task, ...); "
        f"got {form}"
    )


def _runs_tasks(run: object) -> bool:
    """Return whether the `run` of an object belongs to an agent, and not to the base class `Runner`."""
    if not inspect.ismethod(run):
        return False
    return next(iter(inspect.signature(run).parameters), None) == "task"


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
            f"{func} is a generator; an agent must return its reward. To report rewards earlier, call emit_reward."
        )


def is_coroutine_function(func: Any) -> bool:
    """Return whether this is a coroutine function, or an object with a `__call__` that is one."""
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(type(func).__call__)


# --- the parameters of a function ------------------------------------------------------------------------------------


class Ask(NamedTuple):
    """One parameter of a function agent."""

    name: str
    kind: Kind
    resource: type[Resource] = Resource
    """The class of the resource; for kind `resource`."""
    optional: bool = False
    """True if it has a default or may be None: it is omitted or None if no such resource is published."""
    default_none: bool = False
    """True if it may be None and has no default."""
    as_dict: bool = False
    """True if it takes a dictionary: the contents of the custom resource with this name."""

    def find(self, resources: Mapping[str, Resource]) -> Resource | None:
        """Return the resource with this name, or the first of the class.

        Raises:
            ValueError: no such resource is published and the parameter requires one.
        """
        resources = {name: agents_form(each, self.resource) for name, each in resources.items()}
        named = resources.get(self.name)
        if isinstance(named, self.resource):
            return named
        fitting = [key for key, value in resources.items() if isinstance(value, self.resource) and not self.as_dict]
        if self.resource is PromptTemplate:  # any other prompt takes precedence over the system prompt
            fitting = [key for key in fitting if not isinstance(resources[key], SystemPrompt)] or fitting
        if len(fitting) > 1:
            logger.warning(
                "Several resources match the parameter '%s': %s. Using '%s'; to use another one, name the parameter "
                "after it.",
                self.name,
                ", ".join(fitting),
                fitting[0],
            )
        if fitting:
            return resources[fitting[0]]
        if self.optional:
            return None
        what = "prompt template" if self.resource is PromptTemplate else self.resource.__name__
        published = ", ".join(f"{key} ({value.resource_type})" for key, value in resources.items()) or "nothing"
        raise ValueError(f"No {what} resource found for the parameter '{self.name}'; published: {published}")


def asks_of(func: Callable[..., object]) -> list[Ask]:
    """Return the parameters of the function other than the task.

    Raises:
        ValueError: its first parameter is not a positional `task`; a parameter is unknown or positional-only.
    """
    parameters = list(inspect.signature(func).parameters.values())
    first = parameters[0] if parameters else None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if first is None or first.name != "task" or first.kind not in positional:
        raise ValueError(
            f"The first parameter of {_name(func)} must be a positional parameter called 'task'; "
            f"its parameters are ({', '.join(p.name for p in parameters)})"
        )
    hints = _hints(func)
    rest = [p for p in parameters[1:] if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    asks = [_ask(func, parameter, hints.get(parameter.name, parameter.annotation)) for parameter in rest]
    return [ask for ask in asks if ask is not None]


def _ask(func: Callable[..., object], parameter: inspect.Parameter, annotation: object) -> Ask | None:
    hint, may_be_none = _resolve(annotation)
    has_default = parameter.default is not inspect.Parameter.empty
    if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
        raise ValueError(f"The parameter '{parameter.name}' of {_name(func)} is positional-only; remove the '/'")
    optional = has_default or may_be_none
    none = may_be_none and not has_default
    if parameter.name in _NAMES:
        return Ask(parameter.name, _NAMES[parameter.name])
    if parameter.name in _RESOURCE_NAMES:
        fits = _is_class(hint) and issubclass(hint, _RESOURCE_NAMES[parameter.name])
        resource = cast(type[Resource], hint) if fits else _RESOURCE_NAMES[parameter.name]
        return Ask(parameter.name, "resource", _plain(resource), optional, none)
    if hint == NamedResources:
        return Ask(parameter.name, "resources")
    if _is_class(hint):
        if issubclass(hint, Resource):
            return Ask(parameter.name, "resource", _plain(hint), optional, none)
        if hint in (Rollout, AttemptedRollout):
            return Ask(parameter.name, "rollout")
        if issubclass(hint, Tracer):
            return Ask(parameter.name, "tracer")
    if hint is dict or typing.get_origin(hint) is dict:
        return Ask(parameter.name, "resource", CustomResource, optional, none, as_dict=True)
    if has_default:
        return None
    raise ValueError(
        f"Cannot determine what to pass for parameter '{parameter.name}' of {_name(func)}. Name it llm, "
        "prompt_template, rollout, resources or tracer, annotate it with the type of a resource "
        f"({parameter.name}: agl.LLM), or set a default."
    )


def _plain(resource: type[Resource]) -> type[Resource]:
    """Return `LLM` for `ProxyLLM`: behind the gateway the agent gets the plain form."""
    return LLM if resource is ProxyLLM else resource


def _resolve(annotation: object) -> tuple[object, bool]:
    """Return the type of an annotation, and whether None is allowed."""
    if isinstance(annotation, str):
        parts = [part.strip().rsplit(".", 1)[-1] for part in annotation.split("|")]
        names = [part for part in parts if part != "None"]
        return (_TYPE_NAMES.get(names[0]) if len(names) == 1 else None), "None" in parts
    if typing.get_origin(annotation) is Annotated:
        return _resolve(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (Union, types.UnionType):
        arguments = [item for item in typing.get_args(annotation) if item is not type(None)]
        none = len(arguments) < len(typing.get_args(annotation))
        if len(arguments) == 1:
            return arguments[0], none
        llms = all(_is_class(item) and issubclass(item, LLM) for item in arguments)
        return (LLM if llms else None), none
    return annotation, False


def _is_class(value: object) -> TypeGuard[type[Any]]:
    """Return whether this is a class. A subscripted class such as `dict[str, int]` does not count as one."""
    return isinstance(value, type) and typing.get_origin(value) is None


def _hints(func: Callable[..., object]) -> dict[str, object]:
    if isinstance(func, functools.partial):
        return _hints(cast(Callable[..., Any], func.func))
    target = func if inspect.isroutine(func) else type(func).__call__
    try:
        return typing.get_type_hints(target, include_extras=True)
    except Exception:  # a name that is imported for the type checker only; read the annotation as text
        return {}


def _class_text(resource: type[Resource]) -> str:
    return f"agl.{resource.__name__}" if resource.__module__ == Resource.__module__ else resource.__name__


def _name(func: Callable[..., object]) -> str:
    return getattr(func, "__qualname__", repr(func))
