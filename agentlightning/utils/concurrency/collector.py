"""Keeps the pauses of the garbage collector short in a process that serves.

A full collection walks over every object of the process, a quarter of a second with the training stack loaded, and all
threads wait for it. What was loaded before a server began is nearly all of that, and hardly ever garbage.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

_serving: Final = set[object]()
"""One for each block that is entered now."""


@contextmanager
def short_pauses() -> Generator[None, None, None]:
    """Within the block the collector passes over the objects that were there at its begin.

    Of these, cycles that become garbage are collected when no such block is left. May be entered from any thread, also
    several times at once.
    """
    block = object()
    _serving.add(block)
    gc.freeze()
    try:
        yield
    finally:
        _serving.discard(block)
        if not _serving:
            gc.unfreeze()
