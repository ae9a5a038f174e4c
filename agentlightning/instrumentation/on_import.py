"""Patches of a package that may not be imported yet, and may never be: they are applied when the program imports it."""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from typing_extensions import override

from agentlightning.instrumentation.patching import Patch

logger = logging.getLogger(__name__)


class OnImport:
    """Applies a patch once a module is there. Used as a `Patch` is: as many `restore` as `apply`, from any thread."""

    def __init__(self, module: str, patch: Patch) -> None:
        self._module, self._patch = module, patch
        self._lock = threading.RLock()
        self._users = 0
        self._applied = False
        self._finder = _Finder(module, self._imported)

    @property
    def in_use(self) -> bool:
        """True between an `apply` and the last `restore`."""
        return self._users > 0

    def apply(self) -> None:
        """Patch at once if the module is there, else when it comes. Never imports it."""
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            if self._module in sys.modules:
                self._patch_it()
            else:
                sys.meta_path.insert(0, self._finder)

    def restore(self) -> None:
        """Give up one use; the last one takes the patch back. Does nothing without one."""
        with self._lock:
            self._users = max(0, self._users - 1)
            if self._users == 0:
                if self._finder in sys.meta_path:
                    sys.meta_path.remove(self._finder)
                if self._applied:
                    self._applied = False
                    self._patch.restore()

    def _imported(self) -> None:
        with self._lock:
            if self._finder in sys.meta_path:
                sys.meta_path.remove(self._finder)
            if self._users and not self._applied:
                self._patch_it()

    def _patch_it(self) -> None:
        try:
            self._patch.apply()
            self._applied = True
        except (ImportError, AttributeError) as error:  # a version that is made otherwise: the program works as ever
            logger.warning("The calls of %s are not traced: %s", self._module, error)


class _Finder(MetaPathFinder):
    """Finds one module as everybody else would, and tells when it has been loaded."""

    def __init__(self, module: str, loaded: Any) -> None:
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
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _TellingLoader(spec.loader, self._loaded)
        return spec


class _TellingLoader(Loader):
    """A loader that tells when its module is there; else the loader that it stands for."""

    def __init__(self, loader: Any, loaded: Any) -> None:
        self._loader, self._loaded = loader, loaded

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    @override
    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._loaded()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
