"""Changes of weights: the gate that stamps each call with its weight version, and the methods that control it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from agentlightning.llm_proxy.replies import CallFailed

T = TypeVar("T")


class WeightGate:
    """Counts the calls at model servers, and holds new ones while paused.

    Owned by the serving loop: call its methods there, or while nothing is served.
    """

    def __init__(self, waiting_calls: int) -> None:
        self.version = 0
        self.in_flight = 0
        self._limit = waiting_calls
        self._paused = False
        self._waiting: set[asyncio.Future[None]] = set()
        self._drained: set[asyncio.Future[None]] = set()

    @property
    def waiting(self) -> int:
        """Number of calls that wait for the gate to open."""
        return len(self._waiting)

    async def enter(self) -> int:
        """Wait until the gate is open and return the weight version that will serve the call. Requires a later `leave`.

        Raises:
            CallFailed: 503, too many calls wait already.
        """
        while self._paused:
            if len(self._waiting) >= self._limit:
                text = f"The model's weights are changing, and {self._limit} calls already wait (the limit)"
                raise CallFailed(503, text, code="weights_changing", retry_after=1.0)
            future = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                await future
            finally:
                self._waiting.discard(future)
        self.in_flight += 1
        return self.version

    def leave(self) -> None:
        """Count a call as done; wakes a drain that waits for the last one."""
        self.in_flight -= 1
        if not self.in_flight:
            _wake(self._drained)

    async def pause(self) -> None:
        """Hold all calls that arrive from now on; may be called twice."""
        self._paused = True

    async def drain(self, timeout: float) -> None:
        """Wait until no call is at a model server; `timeout` in seconds.

        Raises:
            TimeoutError: calls are still running; reports their number.
        """
        if not self.in_flight:
            return
        drained = asyncio.get_running_loop().create_future()
        self._drained.add(drained)
        try:
            await asyncio.wait_for(drained, timeout)
        except TimeoutError:
            raise TimeoutError(f"Draining: model calls still running after {timeout} s: {self.in_flight}") from None
        finally:
            self._drained.discard(drained)

    async def resume(self, version: int | None = None) -> None:
        """Release the waiting calls, under `version` if it is not None; may be called twice."""
        if version is not None:
            self.version = version
        self._paused = False
        _wake(self._waiting)


class WeightChanges:
    """The part of `LLMProxy` that changes weights. May be awaited from any loop."""

    def __init__(self, gate: WeightGate) -> None:
        self._gate = gate
        self._loop: asyncio.AbstractEventLoop | None = None
        """The serving loop, while there is one."""

    @property
    def weight_version(self) -> int:
        """The version with which calls are stamped; 0 before the first change."""
        return self._gate.version

    async def pause(self) -> None:
        """Hold all calls that arrive from now on, in a queue with a limit; calls in progress continue."""
        await self._on_gate_loop(self._gate.pause)

    async def drain(self, timeout: float = 60.0) -> None:
        """Wait until no call is at a model server.

        Raises:
            TimeoutError: calls are still running after `timeout` seconds; reports their number.
        """
        await self._on_gate_loop(lambda: self._gate.drain(timeout))

    async def resume(self) -> None:
        """Release the waiting calls."""
        await self._on_gate_loop(self._gate.resume)

    @asynccontextmanager
    async def weight_change(self, version: int, *, drain_timeout: float = 60.0) -> AsyncGenerator[None, None]:
        """Run the block while no call is at a model server; calls after it are stamped with `version`.

        If the block or the draining fails, the version is unchanged and the calls continue.

        Raises:
            TimeoutError: calls were still running after `drain_timeout` seconds; the block was not run.
        """
        await self.pause()
        changed: int | None = None
        try:
            await self.drain(drain_timeout)
            yield
            changed = version
        finally:
            await self._on_gate_loop(lambda: self._gate.resume(changed))

    async def _on_gate_loop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work` on the loop that owns the gate; on the current loop while nothing is served."""
        loop = self._loop
        if loop is None or loop is asyncio.get_running_loop():
            return await work()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), loop))


def _wake(waiters: set[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
