"""Importing the package of a framework, with a text that says what to install."""

from __future__ import annotations

import importlib
from typing import Any


def package_of(function: str, module: str, install: str) -> Any:
    """Return the module, imported.

    Raises:
        ImportError: its package is not installed; the text names `function` and what to give to `pip install`.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise  # it is there, and misses something of its own
        raise ImportError(
            f"agl.integrations.{function} needs the package {module!r}, which is not installed: "
            f"pip install {install}. See docs/how-to/frameworks.",
            name=error.name,
        ) from error
