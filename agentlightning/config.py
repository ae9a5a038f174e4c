"""`lightning_cli`: the constructors of classes as options of a command line, on jsonargparse."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

_NONE_WORDS = frozenset(("none", "null", "~", "nil"))
_OPTION = re.compile(r"^--(?P<name>[A-Za-z_][\w.-]*)(?P<rest>=.*)?$", re.DOTALL)


def nullable_str(value: str) -> str | None:
    """Return the text, or None for `none`, `null`, `~` and `nil` in any case."""
    return None if value.strip().lower() in _NONE_WORDS else value


def lightning_cli(*classes: type[Any], argv: Sequence[str] | None = None) -> Any:
    """Build one parser from the constructors of the classes, read `argv` (the process's own by default), and make them.

    The options of a class are `--<class name in lower case>.<parameter>`, dashes and underscores alike; `--config FILE`
    reads them from YAML or JSON. Returns `()` without classes, the object for one class, else a tuple in order.
    """
    if not classes:
        return ()
    from jsonargparse import ArgumentParser

    parser: Any = ArgumentParser(description=f"Options of {', '.join(cls.__name__ for cls in classes)}")
    parser.add_argument("--config", action="config", help="A YAML or JSON file with any of the options.")
    keys = [cls.__name__.lower() for cls in classes]
    for cls, key in zip(classes, keys, strict=True):
        parser.add_class_arguments(cls, key, fail_untyped=False)
    arguments = [_with_underscores(argument) for argument in (sys.argv[1:] if argv is None else argv)]
    made = parser.instantiate(parser.parse_args(arguments))
    objects = tuple(made[key] for key in keys)
    return objects[0] if len(objects) == 1 else objects


def _with_underscores(argument: str) -> str:
    match = _OPTION.match(argument)
    return f"--{match['name'].replace('-', '_')}{match['rest'] or ''}" if match else argument
