"""Runs that another system trains: TRL, VERL, Tinker. The package of each is an extra."""

from __future__ import annotations

import importlib.metadata


def installed_version(package: str, algorithm: str) -> str:
    """Return the installed version of the package that an algorithm needs.

    Raises:
        ImportError: it is not installed. The message names the package to install.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            f"agl.{algorithm} needs the package {package}: pip install 'agl-framework[{package}]'"
        ) from None
