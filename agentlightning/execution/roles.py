"""Algorithm and runner as picklable tasks: what runs in a child, or in the main process in its place."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from agentlightning.execution.address import Address, PortReport
from agentlightning.execution.base import AlgorithmBundle, RunnerBundle
from agentlightning.execution.events import ExecutionEvent
from agentlightning.execution.remote import DEFAULT_OUTAGE_SECONDS, heed, term_left_to_parent, until_known
from agentlightning.execution.run_state import OpenedRun, RemoteRunners, run_of
from agentlightning.execution.stall import StallDetector, StallPolicy
from agentlightning.execution.supervisor import INTERRUPTED, Patience, Supervision, TaskTeam, until_set
from agentlightning.store.base import LightningStore
from agentlightning.utils.concurrency.interrupts import Interrupts

if TYPE_CHECKING:
    from agentlightning.store.client_server import LightningStoreClient

logger = logging.getLogger(__name__)

RELEASE_POLL_SECONDS = 0.02
STOP_SECONDS = 3.0
"""How long a store server may take to stop; then it is left to the end of the process."""


@dataclass(frozen=True)
class RunnerTask:
    """One runner: connects to the server at `url`, or takes `store` as it is."""

    runner: RunnerBundle
    url: str | None
    store: LightningStore | None
    remote: RemoteRunners | None = None
    """Of a process that runs no algorithm: wait for the store first, which may start later than this."""

    @property
    def wants_main_thread(self) -> bool:
        """True if the loop that runs this leaves the main thread to the agent."""
        return bool(getattr(self.runner, "wants_main_thread", False))

    async def __call__(self, index: int, event: ExecutionEvent) -> Any:
        """Run the bundle as worker `index`."""
        async with connected(self.url, self.store, outage_of(self.runner)) as store:
            if self.remote is None:
                return None if event.is_set() else await self.runner(store, index, event)
            async with term_left_to_parent(event):
                await until_known(self.remote, store, event)
                return None if event.is_set() else await self.runner(store, index, event)


@dataclass(frozen=True)
class AlgorithmTask:
    """The algorithm with its store server, in a child process of its own."""

    algorithm: AlgorithmBundle
    store: LightningStore
    address: Address | None
    """Where to serve the store; None serves nothing: it is shared in another way."""
    patience: Patience
    stall: StallPolicy
    released: ExecutionEvent
    """Set when no runner needs the server any more."""
    report: PortReport | None
    """Where to tell the port of the server; None if there is none."""

    async def __call__(self, index: int, event: ExecutionEvent) -> Any:
        """Serve the store, run the bundle and return its result, once the runners have ended as well."""
        server = None if self.address is None else self.address.bound_server(self.store)
        if server is not None and self.report is not None:
            self.report.tell(server.server_launcher.port)
        async with own_connection(server or self.store, outage_of(self.algorithm)) as store:
            opened_run = OpenedRun(self.algorithm)
            if server is not None:
                await opened_run.open(store)
            supervision = Supervision(
                team=TaskTeam({}),
                event=event,
                interrupts=Interrupts(asyncio.get_running_loop()),  # Ctrl+C cancels this coroutine instead
                patience=self.patience,
                hasty=INTERRUPTED,
                watchers=algorithm_watchers(opened_run, store, event, self.stall),
            )
            async with served(server):
                try:
                    async with opened_run.ending(store, lambda: supervision.interrupted):
                        return await supervision.conduct(opened_run(store, event))
                finally:
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(until_set(self.released, RELEASE_POLL_SECONDS), self.patience.ask)


def algorithm_watchers(
    opened_run: OpenedRun,
    store: LightningStore,
    event: ExecutionEvent,
    stall: StallPolicy,
    position: Callable[[], list[str]] | None = None,
) -> list[Callable[[], Coroutine[object, object, None]]]:
    """Return what runs beside an algorithm: the look for a note that ends the run, and the stall detector."""
    detector = StallDetector(stall, opened_run.algorithm, store, position)
    return [lambda: heed(store, run_of(opened_run.algorithm), event, opened_run.done), detector.watch]


def outage_of(bundle: AlgorithmBundle | RunnerBundle) -> float:
    """Return how long the store may be away from a side of the run, in seconds."""
    return float(getattr(bundle, "store_unreachable_timeout", DEFAULT_OUTAGE_SECONDS))


@contextlib.asynccontextmanager
async def own_connection(store: LightningStore, outage_seconds: float) -> AsyncGenerator[LightningStore]:
    """Give a store that was handed over as it is; of a client a copy, so that its connections are closed here.

    The copy bears a server that is away for `outage_seconds`, unless the client was made with a deadline.
    """
    is_client = False
    if hasattr(store, "server_address_root"):  # else its web stack would be loaded in vain
        from agentlightning.store.client_server import LightningStoreClient

        is_client = type(store) is LightningStoreClient  # no class of the user's made from it, which may hold more
    if not is_client:
        yield store
        return
    own = cast("LightningStoreClient", copy.copy(store))
    own.set_default_deadline(outage_seconds)
    try:
        yield own
    finally:
        await own.close()


@contextlib.asynccontextmanager
async def connected(
    url: str | None, store: LightningStore | None, outage_seconds: float
) -> AsyncGenerator[LightningStore]:
    """Give a client of the server at `url`, closed at the end; without a URL give `store`, and leave it open."""
    if url is None:
        assert store is not None
        async with own_connection(store, outage_seconds) as own:
            yield own
        return
    from agentlightning.store.client_server import LightningStoreClient

    client = LightningStoreClient(url, deadline=outage_seconds)
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
