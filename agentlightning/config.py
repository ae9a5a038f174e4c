"""`lightning_cli`: command-line options from the constructors of classes, based on jsonargparse.

In addition to YAML it accepts `none` and `nil` for None, `yes` and `t` for true, lists as separate words, and enums by
value. Components of a Trainer are names, import paths or dicts, as in Python.
"""

from __future__ import annotations

import argparse
import builtins
import collections.abc
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

_NONE_WORDS = frozenset(("none", "null", "~", "nil"))
_TRUE_WORDS, _FALSE_WORDS = frozenset(("yes", "true", "t", "y", "1")), frozenset(("no", "false", "f", "n", "0"))
_OPTION = re.compile(r"^--(?P<name>[A-Za-z_][\w.-]*)(?:=(?P<value>.*))?$", re.DOTALL)
_DEPRECATED = re.compile(r"^\s*([a-z_]+(?:, [a-z_]+)*): deprecated", re.MULTILINE)
_SCALARS = (str, int, float)


def nullable_str(value: str) -> str | None:
    """Return the text, or None for `none`, `null`, `~` and `nil` in any case."""
    return None if value.strip().lower() in _NONE_WORDS else value


def lightning_cli(*classes: type[Any], argv: Sequence[str] | None = None) -> Any:
    """Create objects of the classes from command-line options in `argv` (default: those of the process).

    The options of a class are `--<class name in lower case>.<parameter>`, with dashes or underscores. `--config FILE`
    reads them from YAML or JSON. Returns `()` without classes, the object for one class, otherwise a tuple in the
    order of the classes. Options marked as deprecated in the docstring of a class are accepted but hidden in `--help`.
    """
    if not classes:
        return ()
    from jsonargparse import ArgumentParser

    parser: Any = ArgumentParser(description=f"Options of {', '.join(cls.__name__ for cls in classes)}")
    parser.add_argument("--config", action="config", help="YAML or JSON file with any of the options")
    options: dict[str, _Option] = {}
    for cls in classes:
        options |= _add_class(parser, cls)
    arguments = list(_as_yaml(sys.argv[1:] if argv is None else argv, options))
    made = parser.instantiate(parser.parse_args(arguments))
    objects = tuple(made[cls.__name__.lower()] for cls in classes)
    return objects[0] if len(objects) == 1 else objects


# --- options ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Option:
    """The kinds of values of a parameter that determine how its words are read."""

    may_be_none: bool
    nullable: bool
    """A scalar, or None."""
    is_bool: bool
    is_list: bool
    of_numbers: bool
    """A list of numbers."""
    of_nullable: bool
    """A list that may contain None."""
    is_spec: bool
    enum: type[Enum] | None

    @classmethod
    def of(cls, annotation: object) -> _Option:
        members = list(_members(annotation))
        plain = [member for member in members if member is not type(None)]
        origins = [typing.get_origin(member) or member for member in plain]
        items: list[object] = [
            item for member in plain for argument in typing.get_args(member) for item in _members(argument)
        ]
        item_types = [item for item in items if item is not type(None)]
        enums = [member for member in plain if isinstance(member, type) and issubclass(member, Enum)]
        may_be_none = len(plain) < len(members)
        return cls(
            may_be_none=may_be_none,
            nullable=may_be_none and any(origin in _SCALARS for origin in origins),
            is_bool=plain == [bool],
            is_list=any(origin in (list, collections.abc.Sequence) for origin in origins) and str not in plain,
            of_numbers=bool(item_types) and all(item is int or item is float for item in item_types),
            of_nullable=len(item_types) < len(items),
            is_spec=str in plain and dict in origins and collections.abc.Callable in origins,
            enum=enums[0] if enums else None,
        )


def _members(annotation: object) -> Iterator[object]:
    """Yield the members of a union in either notation; an annotation that is not a union yields itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for member in typing.get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


class _Known(dict[str, Any]):
    """Names for annotations. A name that only the type checker imports is `Any`."""

    def __init__(self, module: dict[str, Any]) -> None:
        self._module = module

    def __missing__(self, name: str) -> Any:
        if name in self._module or hasattr(builtins, name):
            raise KeyError(name)  # the lookup continues there
        return Any


def _add_class(parser: Any, cls: type[Any]) -> dict[str, _Option]:
    """Add the options of a class and return them by name."""
    key = cls.__name__.lower()
    parameters = inspect.signature(cls).parameters
    constructor: Any = inspect.unwrap(cls.__init__)
    try:
        hints: dict[str, object] = typing.get_type_hints(constructor, localns=_Known(constructor.__globals__))
    except Exception:  # not a type; jsonargparse reads these in its own way
        hints = dict(getattr(constructor, "__annotations__", {}))
    options = {name: _Option.of(annotation) for name, annotation in hints.items() if name in parameters}
    specs = [name for name, option in options.items() if option.is_spec]
    parser.add_class_arguments(cls, key, fail_untyped=False, skip=set(specs))
    for name in specs:
        default = parameters[name].default
        required = default is inspect.Parameter.empty
        text = "a short name, an import path, or a dict with `type` and settings"
        parser.add_argument(
            f"--{key}.{name}", type=Any, default=None if required else default, required=required, help=text
        )
    hidden = {name for names in _DEPRECATED.findall(inspect.getdoc(cls) or "") for name in names.split(", ")}
    for action in parser._actions:
        if action.dest in {f"{key}.{name}" for name in hidden}:
            action.help = argparse.SUPPRESS
    return {f"{key}.{name}": option for name, option in options.items()}


# --- words -----------------------------------------------------------------------------------------------------------


def _as_yaml(arguments: Sequence[str], options: dict[str, _Option]) -> Iterator[str]:
    """Yield arguments with underscores in option names and with each value as YAML."""
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        match = _OPTION.match(argument)
        if match is None:
            yield argument
            continue
        name = match["name"].replace("-", "_")
        option = options.get(name)
        if option is None or (match["value"] is None and (not rest or _OPTION.match(rest[0]))):
            yield f"--{name}" if match["value"] is None else f"--{name}={match['value']}"
            continue
        words = [match["value"]] if match["value"] is not None else [rest.pop(0)]
        while option.is_list and match["value"] is None and rest and not _OPTION.match(rest[0]):
            words.append(rest.pop(0))
        yield f"--{name}={_value(option, words)}"


def _value(option: _Option, words: list[str]) -> str:
    word = words[0]
    lower = word.strip().lower()
    is_whole = word.startswith("[") or (lower in _NONE_WORDS and option.may_be_none)
    if option.is_list and (len(words) > 1 or not is_whole):
        return f"[{', '.join(_item(option, word) for word in words)}]"
    if option.nullable and lower in _NONE_WORDS:
        return "null"
    if option.is_bool and lower in _TRUE_WORDS | _FALSE_WORDS:
        return "true" if lower in _TRUE_WORDS else "false"
    if option.enum is not None and word not in option.enum.__members__:
        names = [member.name for member in option.enum if str(member.value) == word]
        return names[0] if names else word
    return word


def _item(option: _Option, word: str) -> str:
    if option.of_nullable and word.strip().lower() in _NONE_WORDS:
        return "null"
    return word if option.of_numbers else json.dumps(word)
