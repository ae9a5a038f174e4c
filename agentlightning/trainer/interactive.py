"""Runs out of a notebook: inside an event loop that runs already, with agents that are defined in cells."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import sys
from collections.abc import Generator
from io import BytesIO
from types import FunctionType
from typing import Any

from typing_extensions import override


@contextlib.contextmanager
def outside_of_running_loop() -> Generator[None]:
    """Let the body run event loops of its own on this thread although one runs already, as it does in a notebook.

    The loop that runs stands still until the body ends, as for any other call that takes its time. The body is on the
    same thread, so that Ctrl+C (in a notebook: interrupt) reaches it.
    """
    loop = asyncio._get_running_loop()
    if loop is None:
        yield
        return
    task = asyncio.current_task(loop)
    if task is not None:
        asyncio.tasks._leave_task(loop, task)
    asyncio.events._set_running_loop(None)
    try:
        yield
    finally:
        asyncio.events._set_running_loop(loop)
        asyncio.set_event_loop(loop)  # the body's loops were entered there, and have taken it with them
        if task is not None:
            asyncio.tasks._enter_task(loop, task)


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
