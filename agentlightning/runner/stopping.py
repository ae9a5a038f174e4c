"""The stop event of a runner, as something that coroutines can wait on; and the common end of its lanes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from agentlightning.runner.base import StopEvent

LOOK_SECONDS = 0.1
"""The event may belong to another thread or process, which cannot wake this loop; it is looked at this often."""


class Stopping:
    """Watches an event from construction to `close`; needs a running event loop. Without an event it is never set."""

    def __init__(self, event: StopEvent | None) -> None:
        self._event = event
        self.noticed = asyncio.ensure_future(self._watch())
        """Done soon after the event is set."""

    def is_set(self) -> bool:
        """True from the moment at which the event is set."""
        return self._event is not None and self._event.is_set()

    async def pause(self, seconds: float) -> None:
        """Sleep, but no longer than until the event is noticed."""
        await asyncio.wait({self.noticed}, timeout=seconds)

    async def until_set(self, work: Coroutine[object, object, None]) -> bool:
        """Do some work, unless the event is noticed before its end; True if it was done."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task, self.noticed}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            return task.done()
        finally:
            await cancel_all([task])

    async def close(self) -> None:
        """End the watch."""
        self.noticed.cancel()
        await asyncio.wait({self.noticed})

    async def _watch(self) -> None:
        if self._event is None:
            await asyncio.get_running_loop().create_future()
        while not self.is_set():  # noqa: ASYNC110 -- see LOOK_SECONDS
            await asyncio.sleep(LOOK_SECONDS)


async def all_or_first_failure(tasks: list[asyncio.Task[None]]) -> None:
    """Wait for all; when one fails, or the waiter is cancelled, cancel the others and wait for their ends."""
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel and wait until all have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
