"""Imported before everything that needs torch: where it is missing, the error is the command that installs it."""

from __future__ import annotations

import importlib.util

from agentlightning.errors import MissingExtraError


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:  # whoever keeps a package from being imported may say so in this way
        return False


for _package in ("torch", "transformers"):
    if not _is_there(_package):
        raise MissingExtraError("agl.GRPO", "grpo", _package)
