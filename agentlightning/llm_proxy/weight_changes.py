"""A change of weights as the owner of the gateway makes it: hold calls back, wait for those in hand, change, go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from agentlightning.llm_proxy.weights import WeightGate

T = TypeVar("T")


class WeightChanges:
    """The part of `LLMProxy` that changes weights. May be awaited from any loop."""

    def __init__(self, gate: WeightGate) -> None:
        self._gate = gate
        self._loop: asyncio.AbstractEventLoop | None = None
        """The one that serves, while it does."""

    @property
    def weight_version(self) -> int:
        """The version with which calls are stamped; 0 before the first change."""
        return self._gate.version

    async def pause(self) -> None:
        """Hold back calls that arrive from here on, in a bounded queue; those in progress go on."""
        await self._there(self._gate.pause)

    async def drain(self, timeout: float = 60.0) -> None:
        """Wait until no model server has a call in hand.

        Raises:
            TimeoutError: calls still run after `timeout` seconds; says how many.
        """
        await self._there(lambda: self._gate.drain(timeout))

    async def resume(self) -> None:
        """Let the waiting calls pass."""
        await self._there(self._gate.resume)

    @asynccontextmanager
    async def weight_change(self, version: int, *, drain_timeout: float = 60.0) -> AsyncGenerator[None, None]:
        """Run the block while no model server has a call in hand; calls after it are stamped with `version`.

        If the block or the draining fails, the version stays and the calls go on.

        Raises:
            TimeoutError: calls still ran after `drain_timeout` seconds; the block was not run.
        """
        await self.pause()
        changed: int | None = None
        try:
            await self.drain(drain_timeout)
            yield
            changed = version
        finally:
            await self._there(lambda: self._gate.resume(changed))

    async def _there(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work` on the loop that owns the gate; right here while nothing serves."""
        loop = self._loop
        if loop is None or loop is asyncio.get_running_loop():
            return await work()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), loop))
