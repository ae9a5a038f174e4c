"""Names of a package that are imported on first use (PEP 562), and errors that name the replacement of a removed name.

A package that uses `attach_stub` lists its public names once, in the `__init__.pyi` beside its `__init__.py`: type
checkers and editors read it like any stub, and this module reads it on the first access to a name. This module is
imported with the package itself, so it imports nothing heavy.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any


def attach_stub(
    package: str, removed: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package whose names are listed in its `__init__.pyi`.

    `from package.module import name as name` in the stub is a public name, `from package import module as module` a
    public module, and `from . import module as module` a module that `from package import *` excludes. `removed` maps
    names of older releases to what to use instead. `__getattr__` also answers `__all__`.

    Raises (`__getattr__`):
        AttributeError: the package has no such name; the text names its replacement, or the closest valid name.
    """
    removed_texts = {name: f"{package}.{name} does not exist. {text}" for name, text in (removed or {}).items()}
    explain_imports({f"{package}.{name}": text for name, text in removed_texts.items()})

    def __getattr__(name: str) -> Any:
        names, public = _names(package)
        if name == "__all__":
            value: Any = public
        elif name in names:
            module, attribute = names[name]
            value = importlib.import_module(module)
            value = getattr(value, attribute) if attribute else value
        else:
            import difflib  # only for an error

            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near and not name.startswith("__") else ""
            text = removed_texts.get(name, f"module {package!r} has no attribute {name!r}{hint}")
            raise AttributeError(text, name=name)  # `name=` keeps Python from adding its own suggestion
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        special = (name for name in vars(sys.modules[package]) if name.startswith("_"))
        return sorted({*special, *_names(package)[0]})  # without the modules and helpers that happen to be loaded

    return __getattr__, __dir__


@cache
def _names(package: str) -> tuple[dict[str, tuple[str, str | None]], list[str]]:
    """Return module and attribute of each name, None for a module itself, and the names that are public."""
    import ast  # on first access only, when most programs have loaded it
    import pkgutil

    stub = pkgutil.get_data(package, "__init__.pyi")
    assert stub is not None, f"{package} has no __init__.pyi"
    names: dict[str, tuple[str, str | None]] = {}
    public: list[str] = []
    for statement in ast.parse(stub).body:
        if not isinstance(statement, ast.ImportFrom):
            continue
        for name in (alias.name for alias in statement.names):
            is_module = statement.module in (None, package)  # `from . import` has none
            names[name] = (f"{package}.{name}", None) if is_module else (str(statement.module), name)
            if not statement.level:
                public.append(name)
    return names, public


class _Explanations:
    """A finder on `sys.meta_path` that finds nothing and, for some names, explains why they do not exist.

    `from package import name` also calls it for a module of that name, and would drop an AttributeError's text.
    """

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname in self.texts:
            raise ModuleNotFoundError(self.texts[fullname])  # without `name=`, which would make Python ignore it


_explanations = _Explanations()


def explain_imports(texts: Mapping[str, str]) -> None:
    """Make an import of one of these names fail with its text."""
    _explanations.texts.update(texts)
    if _explanations not in sys.meta_path:
        sys.meta_path.append(_explanations)
