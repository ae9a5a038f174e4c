"""The two sides of client-server as picklable objects: what runs in a child, or in the main process in its place."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from agentlightning.execution.address import Address
from agentlightning.execution.base import AlgorithmBundle, RunnerBundle
from agentlightning.execution.events import ExecutionEvent
from agentlightning.execution.interrupts import Interrupts
from agentlightning.execution.supervise import INTERRUPTED, Patience, Supervision, TaskTeam, until_set
from agentlightning.store.base import LightningStore

logger = logging.getLogger(__name__)

RELEASE_POLL_SECONDS = 0.02
STOP_SECONDS = 3.0
"""How long a store server may take to stop; then it is left to the end of the process."""


@dataclass(frozen=True)
class RunnerSide:
    """One runner: connects to the server at `url`, or takes `store` as it is."""

    runner: RunnerBundle
    url: str | None
    store: LightningStore | None

    async def __call__(self, index: int, event: ExecutionEvent) -> Any:
        """Run the bundle as worker `index`."""
        async with connected(self.url, self.store) as store:
            return await self.runner(store, index, event)


@dataclass(frozen=True)
class AlgorithmSide:
    """The algorithm with its store server, in a child process of its own."""

    algorithm: AlgorithmBundle
    store: LightningStore
    address: Address | None
    """Where to serve the store; None serves nothing: it is shared in another way."""
    patience: Patience
    released: ExecutionEvent
    """Set when no runner needs the server any more."""

    async def __call__(self, index: int, event: ExecutionEvent) -> Any:
        """Serve the store, run the bundle and return its result, once the runners have ended as well."""
        server = None if self.address is None else self.address.bound_server(self.store)
        supervision = Supervision(
            team=TaskTeam({}),
            event=event,
            interrupts=Interrupts(asyncio.get_running_loop()),  # Ctrl+C cancels this coroutine instead
            patience=self.patience,
            hasty=INTERRUPTED,
        )
        async with served(server):
            try:
                return await supervision.conduct(self.algorithm(server or self.store, event))
            finally:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(until_set(self.released, RELEASE_POLL_SECONDS), self.patience.ask)


@contextlib.asynccontextmanager
async def connected(url: str | None, store: LightningStore | None) -> AsyncGenerator[LightningStore]:
    """Give a client of the server at `url`, closed at the end; without a URL give `store`, and leave it open."""
    if url is None:
        assert store is not None
        yield store
        return
    from agentlightning.store.client_server import LightningStoreClient

    client = LightningStoreClient(url)
    try:
        yield client
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def served(server: Any) -> AsyncGenerator[None]:
    """Keep a bound server running for the body; None serves nothing."""
    if server is None:
        yield
        return
    await server.start()
    try:
        yield
    finally:
        try:
            await asyncio.wait_for(server.stop(), STOP_SECONDS)
        except Exception as error:  # the run is over: what it gave counts, not how the server ended
            logger.error("The store server did not stop as it should: %r", error)
