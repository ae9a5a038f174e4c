"""Holds back Python's cycle collector while many values are made that live on and have no cycles."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Generator[None]:
    """Pause the cycle collector for the block; memory is still freed by reference counts.

    Reading 10,000 calls makes millions of references, and the collector walks all of them again and again: half of the
    time. Used side by side in several threads, the one that found it running starts it again.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()
