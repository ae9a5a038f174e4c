"""Each deprecated name says so once in a process, to whoever uses it first."""

from __future__ import annotations

import warnings

_told: set[str] = set()


def warn_once(name: str, instead: str, *, depth: int = 1) -> None:
    """Warn that `name` is deprecated, unless that was said before. `depth` is how many constructors of ours are between
    this function and the code of the user."""
    if name not in _told:
        _told.add(name)
        warnings.warn(
            f"{name} speaks the deprecated v0.1 protocol; {instead}", DeprecationWarning, stacklevel=2 + depth
        )
