"""Modules that programs import and this package does not have: the error says what is there instead.

Imported with the package itself, so it needs nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


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
    """Let an import of one of these modules fail with the text that belongs to it. Again is harmless."""
    finders: list[Any] = sys.meta_path
    if not any(isinstance(finder, AbsentModules) and finder.instead == instead for finder in finders):
        finders.append(AbsentModules(instead))
