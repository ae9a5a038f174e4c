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
_for_good = False
"""Whether what was loaded stays frozen until the process ends."""


def freeze_for_good() -> None:
    """Take what is there now out of all later collections; blocks of `short_pauses` then change nothing.

    For a process that starts and ends many servers, such as one that runs tests. (`gc.get_freeze_count` cannot tell a
    block of this: it walks over all that is frozen.)
    """
    global _for_good
    _for_good = True
    gc.freeze()


@contextmanager
def short_pauses() -> Generator[None, None, None]:
    """Within the block the collector passes over the objects that were there at its begin.

    Of these, cycles that become garbage are collected when no such block is left. May be entered from any thread, also
    several times at once.
    """
    if _for_good:
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
