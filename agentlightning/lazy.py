"""Names of a package that are imported on first use, and what to say of names and modules that are not there.

A package that uses `attach_stub` lists its public names once, in the `__init__.pyi` beside its `__init__.py`: type
checkers and editors read it as any stub, and so does this module when the first name is asked for. The library
`lazy_loader` does the same without any help for names that are absent.

Imported with the package itself, so it needs nothing.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple


class _Home(NamedTuple):
    """Where a name of a package is found."""

    module: str
    attribute: str | None
    """None if the name is the module itself."""
    public: bool
    """Whether `from package import *` takes it."""


def attach_stub(
    package: str, removed: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package whose names are listed in its `__init__.pyi`.

    `from package.module import name as name` in the stub is a public name, `from package import module as module` a
    public module, and `from . import module as module` a module that `from package import *` leaves out. `removed` says
    of names of older releases what to use instead. `__getattr__` also answers `__all__`.

    Raises (`__getattr__`):
        AttributeError: the package has no such name; the text names what replaced it, or the nearest right one.
        ImportError: the same, for `from package import name`, which would throw away the text of the other.
    """

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            value: Any = [name for name, home in _homes(package).items() if home.public]
        elif name in _homes(package):
            module, attribute, _ = _homes(package)[name]
            value = _imported(module)
            value = getattr(value, attribute) if attribute else value
        elif removed and name in removed:
            import dis  # only for an error: it would make every import of the package slower

            frame = sys._getframe(1)
            asks = dis.opname[frame.f_code.co_code[frame.f_lasti]]  # the current instruction of who asked
            by_import = asks == "IMPORT_FROM" and name in frame.f_code.co_names
            text = f"{package}.{name} does not exist. {removed[name]}"
            raise (ImportError if by_import else AttributeError)(text, name=name)
        else:
            import difflib  # only for an error

            near = difflib.get_close_matches(name, _homes(package), n=1)
            hint = f"; did you mean {near[0]!r}?" if near and not name.startswith("__") else ""
            text = f"module {package!r} has no attribute {name!r}{hint}"
            raise AttributeError(text, name=name)  # set here, it keeps Python from a suggestion of its own
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *_homes(package)})

    return __getattr__, __dir__


def _imported(module: str) -> Any:
    """Import a module with Python's cycle collector paused: it would walk all that is loaded again and again, 6% of the
    time. Of several threads that import at once, the one that found it running starts it again."""
    running = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        if running:
            gc.enable()


@cache
def _homes(package: str) -> dict[str, _Home]:
    import ast  # only when the first name is asked for, by when most programs have it
    import pkgutil

    stub = pkgutil.get_data(package, "__init__.pyi")
    assert stub is not None, f"{package} has no __init__.pyi"
    homes: dict[str, _Home] = {}
    for statement in ast.parse(stub).body:
        if not isinstance(statement, ast.ImportFrom):
            continue
        module = statement.module or package  # `from . import` has none
        for name in statement.names:
            if module == package:
                home = _Home(f"{package}.{name.name}", None, public=statement.level == 0)
            else:
                home = _Home(module, name.name, public=True)
            homes[name.name] = home
    return homes


class AbsentModules:
    """A finder for `sys.meta_path` that knows why a module is not there. It finds nothing, and is asked last."""

    def __init__(self, instead: Mapping[str, str]) -> None:
        self.instead = instead

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Raise for the modules of the table; know nothing of any other.

        Raises:
            ModuleNotFoundError: with the text that belongs to the module.
        """
        if fullname in self.instead:
            raise ModuleNotFoundError(f"There is no module {fullname}. {self.instead[fullname]}", name=fullname)


def explain_absent_modules(instead: Mapping[str, str]) -> None:
    """Let an import of one of these modules fail with the text that belongs to it. A second call changes nothing."""
    finders: list[Any] = sys.meta_path
    if not any(isinstance(finder, AbsentModules) and finder.instead == instead for finder in finders):
        finders.append(AbsentModules(instead))
