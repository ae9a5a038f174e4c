"""Patches of other packages: attributes that are replaced together, immediately or when the package is imported.

They are restored after the last use."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

from typing_extensions import override

logger = logging.getLogger(__name__)

Original = Callable[..., Any]
"""A vendor's function, or its replacement."""
Replacement = tuple[str, str, Callable[[Any], object]]
"""Module, dotted attribute in it, and a function from the current value to the new one."""
_INHERITED = object()


class Patch:
    """A set of replacements. The first `apply` applies it, the last `restore` undoes it. Any thread may call them."""

    def __init__(self, *replacements: Replacement) -> None:
        self._replacements = replacements
        self._lock = threading.RLock()
        self._users = 0
        self._undo: list[tuple[Any, str, Any, Any]] = []

    @property
    def in_use(self) -> bool:
        """True between an `apply` and the last `restore`."""
        return self._users > 0

    def apply(self) -> None:
        """Replace the attributes; nothing is replaced if one of them is missing.

        Raises:
            ImportError, AttributeError: the package lacks an attribute of the patch.
        """
        with self._lock:
            if self._users == 0:
                self._begin()
            self._users += 1

    def restore(self) -> None:
        """Release one use; do nothing without one. Attributes that were replaced again since then are unchanged."""
        with self._lock:
            self._users = max(0, self._users - 1)
            if self._users == 0:
                self._end()

    def _begin(self) -> None:
        targets = [(*_owner(module, path), make) for module, path, make in self._replacements]
        for owner, name, make in targets:
            before: Any = inspect.getattr_static(owner, name) if name in vars(owner) else _INHERITED
            setattr(owner, name, make(getattr(owner, name)))
            self._undo.append((owner, name, before, _own(owner, name)))

    def _end(self) -> None:
        while self._undo:
            owner, name, before, ours = self._undo.pop()
            if _own(owner, name) is not ours:
                continue
            if before is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


class OnImport(Patch):
    """A patch of a package that is applied when the program imports the package, if ever."""

    def __init__(self, module: str, *replacements: Replacement) -> None:
        super().__init__(*replacements)
        self._module = module
        self._finder = _Finder(module, self._imported)

    @override
    def _begin(self) -> None:
        if self._module not in sys.modules:
            sys.meta_path.insert(0, self._finder)
            return
        try:
            super()._begin()
        except (ImportError, AttributeError) as error:  # an unsupported version: the program works without the patch
            logger.warning("The calls of %s are not recorded: %s", self._module, error)

    @override
    def _end(self) -> None:
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        super()._end()

    def _imported(self) -> None:
        with self._lock:
            if self._finder in sys.meta_path:
                sys.meta_path.remove(self._finder)
            if self._users and not self._undo:
                self._begin()


class _Finder(MetaPathFinder):
    """Finds one module like the other finders, and reports when it has been loaded."""

    def __init__(self, module: str, loaded: Callable[[], None]) -> None:
        self._module, self._loaded = module, loaded
        self._asking = threading.local()

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if fullname != self._module or getattr(self._asking, "now", False):
            return None
        self._asking.now = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking.now = False
        loader: Any = None if spec is None else spec.loader
        if hasattr(loader, "exec_module"):
            load = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module
                load(module)
                self._loaded()

            loader.exec_module = exec_module
        return spec


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
