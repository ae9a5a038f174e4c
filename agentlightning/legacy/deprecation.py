"""Warns of each deprecated name once in a process."""

from __future__ import annotations

import warnings

_warned: set[str] = set()


def warn_once(name: str, instead: str, *, depth: int = 1) -> None:
    """Warn that `name` is deprecated, unless a warning was given before.

    `depth` is how many constructors of ours are between this function and the code of the user.
    """
    if name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"{name} speaks the deprecated v0.1 protocol; {instead}", DeprecationWarning, stacklevel=2 + depth
        )
