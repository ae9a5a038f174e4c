"""Import the names of a package on first use (PEP 562), and report the replacements of removed names.

A package that uses `attach_stub` lists its public names once, in the `__init__.pyi` next to its `__init__.py`. Type
checkers and editors read it like any stub, and this module reads it on the first access to a name. This module is
imported together with the package, so it imports only small modules.
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
    """Return `__getattr__` and `__dir__` for a package that lists its names in its `__init__.pyi`.

    In the stub, `from package.module import name as name` is a public name, `from package import module as module` is a
    public module, and `from . import module as module` is a module that `from package import *` excludes. `removed`
    maps names of older releases to their replacements. `__getattr__` also returns `__all__`.

    Raises (`__getattr__`):
        AttributeError: the name does not exist; the message has its replacement or the most similar name.
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
    """Return the module and attribute of each name (None for a module), and the public names."""
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
    """A finder on `sys.meta_path` that finds no modules, but raises an error with an explanation for some names.

    `from package import name` also searches a module with that name, and would discard the message of an
    AttributeError.
    """

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname in self.texts:
            raise ModuleNotFoundError(self.texts[fullname])  # without `name=`, which would make Python ignore it


_explanations = _Explanations()


def explain_imports(texts: Mapping[str, str]) -> None:
    """Make the import of each of these names fail with its message."""
    _explanations.texts.update(texts)
    if _explanations not in sys.meta_path:
        sys.meta_path.append(_explanations)
