"""What a function agent asks for, read from its parameters once, when it is decorated.

A parameter is filled by name first (`llm`, `prompt_template`, `rollout`, `resources`, `tracer`), then by the type that
it is annotated with. A parameter that stands for a resource gets the resource of its own name, else the first of its
type.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeGuard, Union, cast

from agentlightning.tracer.base import Tracer
from agentlightning.types import LLM, AttemptedRollout, NamedResources, PromptTemplate, ProxyLLM, Resource, Rollout

logger = logging.getLogger(__name__)

Kind = Literal["resource", "rollout", "resources", "tracer"]
_RESOURCE_NAMES: dict[str, type[Resource]] = {"llm": LLM, "prompt_template": PromptTemplate}
_NAMES: dict[str, Kind] = {"rollout": "rollout", "resources": "resources", "tracer": "tracer"}
_TYPE_NAMES: dict[str, object] = {
    "LLM": LLM,
    "ProxyLLM": ProxyLLM,
    "PromptTemplate": PromptTemplate,
    "Rollout": Rollout,
    "AttemptedRollout": AttemptedRollout,
    "NamedResources": NamedResources,
    "Tracer": Tracer,
}
"""For annotations that cannot be evaluated, such as names imported for the type checker only."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One parameter of a function agent."""

    name: str
    kind: Kind
    resource: type[Resource] = Resource
    """The class wanted; for kind `resource`."""
    optional: bool = False
    """It has a default, or may be None: it is left out or None where there is nothing to give."""
    default_none: bool = False
    """It may be None and has no default."""

    def find(self, resources: NamedResources) -> Resource | None:
        """Return the resource of this name, else the first of the wanted class.

        Raises:
            ValueError: there is none and the parameter needs one.
        """
        named = resources.get(self.name)
        if isinstance(named, self.resource):
            return named
        fitting = [key for key, value in resources.items() if isinstance(value, self.resource)]
        if len(fitting) > 1:
            logger.warning(
                "Several resources fit the parameter '%s': %s; taking '%s'. Name the parameter after the one you want.",
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
    """Return what the function asks for beside the task.

    Raises:
        ValueError: its first parameter is not a positional `task`; a parameter asks for something unknown; or it
            cannot be called with keywords.
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
    wanted, may_be_none = _resolve(annotation)
    has_default = parameter.default is not inspect.Parameter.empty
    if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
        raise ValueError(f"The parameter '{parameter.name}' of {_name(func)} is positional-only; remove the '/'")
    optional = has_default or may_be_none
    none = may_be_none and not has_default
    if parameter.name in _NAMES:
        return Ask(parameter.name, _NAMES[parameter.name])
    if parameter.name in _RESOURCE_NAMES:
        fits = _is_class(wanted) and issubclass(wanted, _RESOURCE_NAMES[parameter.name])
        resource = cast(type[Resource], wanted) if fits else _RESOURCE_NAMES[parameter.name]
        return Ask(parameter.name, "resource", _plain(resource), optional, none)
    if wanted == NamedResources:
        return Ask(parameter.name, "resources")
    if _is_class(wanted):
        if issubclass(wanted, Resource):
            return Ask(parameter.name, "resource", _plain(wanted), optional, none)
        if wanted in (Rollout, AttemptedRollout):
            return Ask(parameter.name, "rollout")
        if issubclass(wanted, Tracer):
            return Ask(parameter.name, "tracer")
    if has_default:
        return None
    raise ValueError(
        f"The parameter '{parameter.name}' of {_name(func)} does not say what it wants. Call it llm, prompt_template, "
        f"rollout, resources or tracer; or annotate it with the type of a resource ({parameter.name}: agl.LLM); "
        "or give it a default."
    )


def _plain(resource: type[Resource]) -> type[Resource]:
    """`ProxyLLM` is asked for as `LLM`: behind the gateway the agent is given the plain form."""
    return LLM if resource is ProxyLLM else resource


def _resolve(annotation: object) -> tuple[object, bool]:
    """Return the type that an annotation means, and whether None is allowed."""
    if isinstance(annotation, str):
        parts = [part.strip().rsplit(".", 1)[-1] for part in annotation.split("|")]
        known = [part for part in parts if part != "None"]
        return (_TYPE_NAMES.get(known[0]) if len(known) == 1 else None), "None" in parts
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
    """True for a class; a subscripted one such as `dict[str, int]` says it is one, and is not."""
    return isinstance(value, type) and typing.get_origin(value) is None


def _hints(func: Callable[..., object]) -> dict[str, object]:
    if isinstance(func, functools.partial):
        return _hints(cast(Callable[..., Any], func.func))
    target = func if inspect.isroutine(func) else type(func).__call__
    try:
        return typing.get_type_hints(target, include_extras=True)
    except Exception:  # an annotation names something that is imported for the type checker only; read it as text
        return {}


def _name(func: Callable[..., object]) -> str:
    return getattr(func, "__qualname__", repr(func))
