"""The version of this package, and the compatibility of two versions."""

from __future__ import annotations

VERSION = "0.4.0"
__version__ = VERSION


def same_major(left: str, right: str) -> bool:
    """Return True if both versions have the same first number, so that their wire formats agree."""
    return left.split(".")[0] == right.split(".")[0]
