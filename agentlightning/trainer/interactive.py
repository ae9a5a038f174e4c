"""Runs out of a notebook: inside an event loop that runs already, with agents that are defined in cells."""

from __future__ import annotations

import contextlib
import pickle
import sys
from io import BytesIO
from types import FunctionType
from typing import Any

from typing_extensions import override


def check_children_can_import(method: str | None, *parts: object) -> None:
    """Check that nothing which is sent to a spawned child is defined where the child cannot import it: in a cell.

    Raises:
        TypeError: something is; names it and the ways out.
    """
    if method in (None, "fork") or getattr(sys.modules["__main__"], "__file__", None) is not None:
        return
    for part in parts:
        pickler = _NamesOfMain()
        with contextlib.suppress(Exception):  # what cannot be pickled is told of by the strategy, which names the part
            pickler.dump(part)
        if pickler.found:
            names = ", ".join(pickler.found)
            raise TypeError(
                f"start_method={method!r} begins child processes that import what they need, and {names} "
                "is defined in a cell of this session, where they cannot find it. Ways out: put it into a module and "
                "import it; strategy='shm', which has no child processes; or start_method='fork' on Linux."
            )


class _NamesOfMain(pickle.Pickler):
    """Notes what it would pickle by its name in `__main__`."""

    def __init__(self) -> None:
        super().__init__(BytesIO())
        self.found: dict[str, None] = {}

    @override
    def reducer_override(self, obj: Any) -> Any:
        named = isinstance(obj, type | FunctionType) or "__qualname__" in getattr(obj, "__dict__", {})
        if named and obj.__module__ == "__main__":
            self.found[obj.__qualname__] = None
        return NotImplemented
