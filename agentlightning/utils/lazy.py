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
    """
    home = homes.get(name)
    if home is not None:
        path, renamed, other = home.partition(":")
        module = importlib.import_module(path)
        value = module if renamed and not other else getattr(module, other or name)
        setattr(sys.modules[package], name, value)
        return value
    if removed and name in removed:
        raise AttributeError(f"{package}.{name} does not exist. {removed[name]}")
    near = difflib.get_close_matches(name, homes, n=1)
    hint = f"; did you mean {near[0]!r}?" if near and not name.startswith("__") else ""
    raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
