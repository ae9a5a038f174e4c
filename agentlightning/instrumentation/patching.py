"""Patches of other packages: attributes that are replaced together and restored when the last user ends."""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable
from typing import Any, cast

Original = Callable[..., Any]
"""A function of a vendor, and what takes its place."""
Replacement = tuple[str, str, Callable[[Any], object]]
"""Module, dotted attribute in it, and what makes the new value out of the present one."""
_INHERITED = object()


class Patch:
    """A set of replacements. Applied by the first `apply`, taken back by as many `restore`; any thread may call."""

    def __init__(self, *replacements: Replacement) -> None:
        self._replacements = replacements
        self._lock = threading.Lock()
        self._users = 0
        self._undo: list[tuple[Any, str, Any, Any]] = []

    def apply(self) -> None:
        """Replace; nothing is replaced if one of the attributes is not there.

        Raises:
            ImportError, AttributeError: the package has not what it had when the patch was written.
        """
        with self._lock:
            if self._users == 0:
                found = [(*_owner(module, path), make) for module, path, make in self._replacements]
                for owner, name, make in found:
                    before: Any = inspect.getattr_static(owner, name) if name in vars(owner) else _INHERITED
                    setattr(owner, name, make(getattr(owner, name)))
                    self._undo.append((owner, name, before, _own(owner, name)))
            self._users += 1

    def restore(self) -> None:
        """Give up one use; does nothing without one. What somebody else has replaced since stays as it is."""
        with self._lock:
            self._users = max(0, self._users - 1)
            if self._users == 0:
                while self._undo:
                    owner, name, before, ours = self._undo.pop()
                    if _own(owner, name) is not ours:
                        continue
                    if before is _INHERITED:
                        delattr(owner, name)
                    else:
                        setattr(owner, name, before)


def _own(owner: Any, name: str) -> Any:
    return cast("dict[str, Any]", vars(owner)).get(name)


def _owner(module: str, path: str) -> tuple[Any, str]:
    """Return the object that holds an attribute, and the attribute's name."""
    *inner, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in inner:
        owner = getattr(owner, part)
    getattr(owner, name)
    return owner, name
