"""Builds components from specs: an instance, a class, a factory, an import string, a short name or a dict."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

from agentlightning.errors import closest_name, did_you_mean
from agentlightning.trainer.registry import NEEDED_BY, Registry, known_names, registered
from agentlightning.utils.texts import is_file_name

T = TypeVar("T")

ComponentSpec: TypeAlias = T | type[T] | Callable[[], T] | str | dict[str, Any] | None
"""A component, or a spec from which one is built."""
OptionalDefaults: TypeAlias = Mapping[str, Any]
"""Values, or functions without arguments that make them, for unset parameters that a constructor names."""

_MISTAKEN = {
    "algorithm": "to use a function as the algorithm, decorate it with @agl.algo",
    "runner": "pass the agent to fit(agent, train_dataset=...)",
}
"""Settings that often get the wrong argument, each with a hint."""


def build_component(
    spec: Any,
    *,
    expected_type: type[T],
    spec_name: str,
    default_factory: Callable[[], T] | None = None,
    allow_none: bool = False,
    optional_defaults: OptionalDefaults | None = None,
    dict_requires_type: bool = True,
    dict_default_cls: type[T] | None = None,
    type_error_fmt: str | None = None,
    invalid_spec_error_fmt: str | None = None,
    registry: Registry | None = None,
) -> T | None:
    """Return the component that `spec` describes.

    An instance is returned unchanged. A class, a string or a dict is instantiated; `optional_defaults` fill parameters
    that its constructor names. A factory is called without arguments.

    Args:
        spec_name: name of the component in error messages.
        default_factory: makes the component for `None`.
        allow_none: return None for `None`.
        dict_requires_type: a dict must have `type`; if false, a dict without it holds settings of `dict_default_cls`.
        type_error_fmt: text of the `TypeError`, instead of the default text.
        invalid_spec_error_fmt: text of the `ValueError`, instead of the default text.
        registry: short names.

    Raises:
        ValueError: the spec has no known form, or a name in it is unknown; the message lists known and similar names.
        TypeError: the component is not an `expected_type`, or a constructor does not accept the settings that the
            message names.
    """
    if isinstance(spec, expected_type):
        return spec
    if spec is None:
        if default_factory is None and not allow_none:
            raise ValueError(f"{spec_name} cannot be None")
        return (
            None if default_factory is None else _checked(default_factory(), expected_type, spec_name, type_error_fmt)
        )
    if isinstance(spec, str | dict):
        made: Any = instantiate_from_spec(
            cast("str | dict[str, Any]", spec),
            spec_name=spec_name,
            optional_defaults=optional_defaults,
            dict_requires_type=dict_requires_type,
            dict_default_cls=dict_default_cls,
            registry=registry,
            expected_type=expected_type,
        )
    elif isinstance(spec, type):
        if not issubclass(spec, expected_type):
            raise _invalid(spec, expected_type, spec_name, invalid_spec_error_fmt)
        made = _make(cast("type[Any]", spec), {}, optional_defaults, spec_name)
    elif callable(spec):
        made = _call_factory(cast("Callable[..., Any]", spec), spec_name)
    else:
        raise _invalid(spec, expected_type, spec_name, invalid_spec_error_fmt)
    return _checked(made, expected_type, spec_name, type_error_fmt)


def instantiate_from_spec(
    spec: str | dict[str, Any],
    *,
    spec_name: str = "component",
    optional_defaults: OptionalDefaults | None = None,
    dict_requires_type: bool = True,
    dict_default_cls: type[Any] | None = None,
    registry: Registry | None = None,
    expected_type: type[Any] | None = None,
) -> Any:
    """Make a component from a name or import string, or from a dict with such a `type` (or a registered `name`).

    An import string may also name an existing instance of `expected_type`.

    Raises:
        TypeError: the spec has another type, or the constructor does not accept the settings.
        ValueError: a name is unknown, or the dict has no type.
    """
    if isinstance(spec, str):
        path = registered(spec, registry)
        if isinstance(path, str) and path in NEEDED_BY:
            raise TypeError(f"{spec_name}: {_missing(path.rpartition('.')[2], NEEDED_BY[path])}")
        component = _resolve(spec, registry, spec_name)
        ready = expected_type is not None and isinstance(component, expected_type)
        return component if ready else _make(component, {}, optional_defaults, spec_name)
    if not isinstance(spec, dict):
        raise TypeError(f"{spec_name} spec must be a string or dict; got {type(spec).__name__}")
    settings = dict(spec)
    for key in cast("dict[Any, Any]", settings):
        if not isinstance(key, str):
            raise TypeError(f"{spec_name} dict must have setting names (strings) as keys; got the key {key!r}")
    if "type" in settings:
        target = _resolve(settings.pop("type"), registry, spec_name)
    elif registry is not None and "name" in settings:
        target = _resolve(settings.pop("name"), registry, spec_name, registered_only=True)
    elif not dict_requires_type and dict_default_cls is not None:
        target = dict_default_cls
    else:
        raise ValueError(
            f"{spec_name} dict must have a 'type' key: a class, an import path{known_names(registry)}; its keys are "
            f"{', '.join(map(repr, settings)) or 'none'}"
        )
    return _make(target, settings, optional_defaults, spec_name)


def instantiate_component(
    cls: Callable[..., T],
    provided_kwargs: Mapping[str, Any] | None = None,
    optional_defaults: OptionalDefaults | None = None,
) -> T:
    """Call a class (or function) with its settings, and with the optional defaults that its signature names.

    Raises:
        TypeError: a setting is unknown (the message names the nearest one), or a required one is missing.
    """
    return cls(**_complete(cls, provided_kwargs or {}, optional_defaults))


def load_class(path: str) -> Any:
    """Return the object at an import path such as `package.module.Name`.

    Raises:
        ValueError: the path is malformed or names a file, or the module or object does not exist.
    """
    module_path, _, name = path.rpartition(".")
    if is_file_name(path):  # importing `agent.py` would run the file
        hint = f"; did you mean {Path(path).stem + '.NAME'!r}, with a name from that file?" if name == "py" else ""
        raise ValueError(f"{path!r} names a file, not an import path such as 'package.module.Name'{hint}")
    if not all(part.isidentifier() for part in path.split(".")) or not module_path:
        raise ValueError(f"{path!r} is not an import path such as 'package.module.Name'")
    try:
        module = importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_path}.".startswith(f"{error.name}."):
            raise  # the module exists, but one of its imports does not
        raise ValueError(f"{path!r} cannot be imported: there is no module {error.name!r}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path!r} is not an import path such as 'package.module.Name': {error}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        hint = did_you_mean(name, dir(module))
        raise ValueError(f"{path!r} cannot be imported: module {module_path!r} has no {name!r}{hint}") from None


def _make(target: Any, settings: dict[str, Any], optional_defaults: OptionalDefaults | None, spec_name: str) -> Any:
    """Call a class or function with its settings; errors that it raises name the component and its settings."""
    if not callable(target):
        raise TypeError(f"{spec_name}: expected a class or another callable; got {target!r}")
    try:
        complete = _complete(target, settings, optional_defaults)
    except TypeError as error:
        raise TypeError(f"{spec_name}: {error}") from None
    try:
        return target(**complete)
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        arguments = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        called = f"{getattr(target, '__name__', repr(target))}({arguments})"
        raise TypeError(f"{spec_name}: {called} failed: {error or type(error).__name__}") from error


def _complete(
    target: Callable[..., Any], provided: Mapping[str, Any], optional_defaults: OptionalDefaults | None
) -> dict[str, Any]:
    """Return the settings with the optional defaults that the target's signature names, checked against it."""
    settings, parameters = dict(provided), _parameters(target)
    for name, value in (optional_defaults or {}).items():
        if name in parameters and name not in settings:
            settings[name] = value() if callable(value) else value
    if not parameters and settings and not isinstance(target, type):  # its parameters are unknown
        return settings
    named = [n for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    name = getattr(target, "__name__", repr(target))
    if all(p.kind != p.VAR_KEYWORD for p in parameters.values()):
        for setting in settings:
            if setting not in named:
                raise TypeError(f"{name} has no setting {setting!r}{nearest(setting, named)}")
    required = [n for n in named if parameters[n].default is inspect.Parameter.empty and n not in settings]
    if required:
        raise _missing(name, required)
    return settings


def _missing(name: str, required: Sequence[str]) -> TypeError:
    example = ", ".join(f"{n!r}: ..." for n in required)
    return TypeError(
        f"{name} is missing required settings: {', '.join(required)}. "
        f"Pass them in a dict: {{'type': {name!r}, {example}}}"
    )


def _resolve(name: Any, registry: Registry | None, spec_name: str, *, registered_only: bool = False) -> Any:
    """Return the class of a registered name, an import path, or a class."""
    if not isinstance(name, str):
        if callable(name) and not registered_only:
            return name
        raise ValueError(f"{spec_name}: 'type' must be a class, an import path{known_names(registry)}; got {name!r}")
    entry = registered(name, registry)
    if entry is None and "." in name and not registered_only:
        entry = name
    if entry is not None:
        return load_class(entry) if isinstance(entry, str) else entry
    near = closest_name(name.lower(), registry or ())
    hint = f" (did you mean {near!r}?)" if near else ""
    raise ValueError(f"{spec_name}: unknown name {name!r}{hint}; expected an import path{known_names(registry)}")


def _parameters(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters by name; none for a callable without a readable signature."""
    try:
        return dict(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return {}


def nearest(name: str, known: list[str]) -> str:
    """Return the end of an error message about an unknown setting: the nearest valid name, or all valid names."""
    return did_you_mean(name, known) or (f"; it has: {', '.join(known)}" if known else "; it has none")


def _call_factory(factory: Callable[..., Any], spec_name: str) -> Any:
    required = [
        p.name
        for p in _parameters(factory).values()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    if required:
        name = getattr(factory, "__name__", repr(factory))
        hint = f" ({_MISTAKEN[spec_name]})" if spec_name in _MISTAKEN else ""
        raise ValueError(
            f"Invalid {spec_name}: a factory must take no arguments, but {name} requires {', '.join(required)}{hint}"
        )
    return factory()


def _checked(made: Any, expected_type: type[T], spec_name: str, type_error_fmt: str | None) -> T:
    if isinstance(made, expected_type):
        return made
    names = {"type_name": type(made).__name__, "expected_type": expected_type.__name__}
    text = type_error_fmt or spec_name + " factory returned {type_name}, which is not a {expected_type} subclass"
    raise TypeError(text.format(**names))


def _invalid(spec: Any, expected_type: type[Any], spec_name: str, error_fmt: str | None) -> ValueError:
    actual = f"class {spec.__name__}" if isinstance(spec, type) else type(spec).__name__
    if error_fmt is not None:
        return ValueError(error_fmt.format(actual_type=actual, expected_type=expected_type.__name__))
    hint = f" ({_MISTAKEN[spec_name]})" if spec_name in _MISTAKEN else ""
    return ValueError(
        f"Invalid {spec_name} type: {actual}. Expected {expected_type.__name__}: an instance, a class, a factory, "
        f"an import string, a dict with 'type', or None{hint}"
    )
