"""`UNSET`: an argument that was not supplied, where None is a value."""

from __future__ import annotations

from typing import Any, Final


class Unset:
    """Class of `UNSET`, the one value that means "argument not supplied"; None can then clear a field."""

    _only: Unset | None = None

    def __new__(cls) -> Unset:
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    def __repr__(self) -> str:
        return "UNSET"

    def __reduce__(self) -> str:
        return "UNSET"

    def __copy__(self) -> Unset:
        return self

    def __deepcopy__(self, memo: Any) -> Unset:
        return self


UNSET: Final = Unset()
