"""A time limit for one coroutine that never swallows a cancellation, as `asyncio.wait_for` may before Python 3.12."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` gives; when time is up, or the caller is cancelled, cancel it and wait for its end.

    Raises:
        asyncio.TimeoutError: it did not end within `seconds`.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        in_time = task.done()
        if not in_time:
            task.cancel()
            await asyncio.wait({task})
    if not in_time:
        raise asyncio.TimeoutError(f"no end within {seconds:g} s")
    return task.result()
