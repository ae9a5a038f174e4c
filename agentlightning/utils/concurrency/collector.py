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
_frozen_at_import: Final = gc.get_freeze_count()
"""Python 3.12 itself begins with some."""


@contextmanager
def short_pauses() -> Generator[None, None, None]:
    """Within the block the collector passes over the objects that were there at its begin.

    Of these, cycles that become garbage are collected when no such block is left. May be entered from any thread, also
    several times at once. A process that has frozen its objects itself (`gc.freeze`) keeps its own choice: they would
    else be given back at the end of the block.
    """
    if not _serving and gc.get_freeze_count() > _frozen_at_import:
        yield
        return
    block = object()
    _serving.add(block)
    gc.freeze()
    try:
        yield
    finally:
        _serving.discard(block)
        if not _serving:
            gc.unfreeze()
