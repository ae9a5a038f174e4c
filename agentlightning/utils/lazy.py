"""Names of a package that are imported on first use, so that importing the package stays cheap."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Mapping
from typing import Any


def lazy_attributes(package: str, homes: Mapping[str, str], name: str, removed: Mapping[str, str] | None = None) -> Any:
    """Import the module that holds `name`, remember the value in the package and return it.

    A home is a module, or `module:other_name` where it has another name there; `module:` is the module itself.

    Raises:
        AttributeError: the package has no such name; the text names what replaced it, or the nearest right one.
        ImportError: the same, for `from package import name`, which would throw away the text of the other.
    """
    home = homes.get(name)
    if home is not None:
        path, renamed, other = home.partition(":")
        module = importlib.import_module(path)
        value = module if renamed and not other else getattr(module, other or name)
        setattr(sys.modules[package], name, value)
        return value
    if removed and name in removed:
        kind = ImportError if _asked_by_import(name) else AttributeError
        raise kind(f"{package}.{name} does not exist. {removed[name]}")
    near = difflib.get_close_matches(name, homes, n=1)
    hint = f"; did you mean {near[0]!r}?" if near and not name.startswith("__") else ""
    raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")


def _asked_by_import(name: str) -> bool:
    """True if the package's `__getattr__` was called by `from package import name`: that is the instruction at which
    its caller stands."""
    import dis  # only for an error: it would make every import of the package slower

    frame = sys._getframe(3)  # beyond this function, lazy_attributes and __getattr__
    code = frame.f_code
    return dis.opname[code.co_code[frame.f_lasti]] == "IMPORT_FROM" and name in code.co_names
