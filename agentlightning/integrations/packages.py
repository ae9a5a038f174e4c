"""Import of a framework's package, with an error that names the package to install."""

from __future__ import annotations

import importlib
from typing import Any


def package_of(function: str, module: str, install: str) -> Any:
    """Import a module and return it.

    Raises:
        ImportError: its package is not installed; the message names `function` and the argument of `pip install`.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise  # it is installed, but one of its own imports is missing
        raise ImportError(
            f"agl.integrations.{function} requires the package {module!r}, which is not installed. "
            f"Run pip install {install}. See docs/how-to/frameworks.",
            name=error.name,
        ) from error
