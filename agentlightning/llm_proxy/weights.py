"""The gate before the model servers: calls pass with the weight version of the moment, or wait while it changes."""

from __future__ import annotations

import asyncio

from agentlightning.llm_proxy.replies import refuse


class WeightGate:
    """Counts the calls that a model server has in hand and holds back the others while paused.

    Owned by the serving loop: every method is called there, or while nothing serves.
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
        """Calls that wait for the gate to open."""
        return len(self._waiting)

    @property
    def paused(self) -> bool:
        return self._paused

    async def enter(self) -> int:
        """Wait until the gate is open and return the weight version that will serve the call; then owe a `leave`.

        Raises:
            CallFailed: 503, too many calls wait already.
        """
        while self._paused:
            if len(self._waiting) >= self._limit:
                text = f"The model's weights are changing and {self._limit} calls wait already"
                raise refuse(503, text, code="weights_changing", retry_after=1.0)
            opened = asyncio.get_running_loop().create_future()
            self._waiting.add(opened)
            try:
                await opened
            finally:
                self._waiting.discard(opened)
        self.in_flight += 1
        return self.version

    def leave(self) -> None:
        """Say that the model server is done with a call."""
        self.in_flight -= 1
        if not self.in_flight:
            _wake(self._drained)

    async def pause(self) -> None:
        """Hold back the calls that arrive from here on; may be called twice."""
        self._paused = True

    async def drain(self, timeout: float) -> None:
        """Wait until no model server has a call in hand; `timeout` in seconds.

        Raises:
            TimeoutError: calls still run; says how many.
        """
        if not self.in_flight:
            return
        drained = asyncio.get_running_loop().create_future()
        self._drained.add(drained)
        try:
            await asyncio.wait_for(drained, timeout)
        except asyncio.TimeoutError:
            raise TimeoutError(f"{self.in_flight} model calls still run after {timeout} seconds of draining") from None
        finally:
            self._drained.discard(drained)

    async def resume(self, version: int | None = None) -> None:
        """Let the waiting calls pass, under `version` if it is given; may be called twice."""
        if version is not None:
            self.version = version
        self._paused = False
        _wake(self._waiting)


def _wake(waiters: set[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
