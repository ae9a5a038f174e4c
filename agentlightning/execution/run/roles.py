"""Algorithm and runner as picklable tasks: what runs in a child, or in the main process in its place."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from agentlightning.execution.address import Address, PortReport
from agentlightning.execution.base import AlgorithmBundle, RunnerBundle
from agentlightning.execution.events import ExecutionEvent, ThreadingEvent
from agentlightning.execution.run.remote import heed, term_left_to_parent, until_known
from agentlightning.execution.run.stall import StallDetector, StallPolicy
from agentlightning.execution.run.stop_note import RemoteRunners, remote_runners, reopen_run, tell_remote_runners
from agentlightning.execution.run.supervisor import INTERRUPTED, Patience, Supervision, TaskTeam, until_set
from agentlightning.store.base import LightningStore
from agentlightning.utils.concurrency.interrupts import Interrupts
from agentlightning.utils.concurrency.loops import within

logger = logging.getLogger(__name__)

RELEASE_POLL_SECONDS = 0.02
STOP_SECONDS = 3.0
"""How long a store server may take to stop; then it is left to the end of the process."""
TELL_SECONDS = 5.0
"""How long the end of a run waits for remote runners to take note of it."""
HASTY_TELL_SECONDS = 0.5
"""The same after Ctrl+C."""


@dataclass(frozen=True)
class RunnerTask:
    """One runner: connects to the server at `url`, or takes `store` as it is."""

    runner: RunnerBundle
    url: str | None
    store: LightningStore | None
    remote: RemoteRunners | None = None
    """Of a process that runs no algorithm: wait for the store first, which may start later than this."""

    async def __call__(self, index: int, event: ExecutionEvent) -> Any:
        """Run the bundle as worker `index`."""
        async with connected(self.url, self.store) as store:
            if self.remote is None:
                return None if event.is_set() else await self.runner(store, index, event)
            with term_left_to_parent(event):
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
        async with own_connection(server or self.store) as store:
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
                    return await supervision.conduct(opened_run(store, event))
                finally:
                    await run_ends(self.algorithm, store, TELL_SECONDS)
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


def run_of(bundle: AlgorithmBundle | RunnerBundle) -> str | None:
    """Return the run of a bundle, if it has one."""
    return getattr(bundle, "run_id", None)


@dataclass
class OpenedRun:
    """An algorithm that opens its run first: it takes back the note that ended the run before."""

    algorithm: AlgorithmBundle
    done: ThreadingEvent = field(default_factory=ThreadingEvent)
    """Set once the run is open; a note counts from then on."""

    async def open(self, store: LightningStore) -> None:
        """Open the run. Again is harmless. Before runners can see the store, where it is served from here."""
        if not self.done.is_set():
            with contextlib.suppress(NotImplementedError):  # a store of the user's that keeps no notes
                await reopen_run(store, run_of(self.algorithm))
            self.done.set()

    async def __call__(self, store: LightningStore, event: ExecutionEvent) -> Any:
        """Open the run and run the algorithm."""
        await self.open(store)
        return await self.algorithm(store, event)


async def run_ends(
    algorithm: AlgorithmBundle, store: LightningStore, seconds: float, *, all_are_away: bool = False
) -> None:
    """Tell remote runners, if there are or may be any, that the run has ended. Never raises: the run is over."""
    run_id = run_of(algorithm)
    try:
        if all_are_away or await within(seconds, remote_runners(store, run_id)):
            reason = "its algorithm has ended"
            telling = tell_remote_runners(store, run_id, reason=reason, seconds=seconds, all_are_away=all_are_away)
            await within(seconds + 1.0, telling)
    except NotImplementedError:  # as above
        return
    except Exception as error:  # the run is over, whether they know or not
        logger.warning("Remote runners could not be told that the run has ended: %r", error)


@contextlib.asynccontextmanager
async def own_connection(store: LightningStore) -> AsyncGenerator[LightningStore]:
    """Give a store that was handed over as it is; of a client a copy, so that its connections are closed here."""
    is_client = False
    if hasattr(store, "server_address_root"):  # else its web stack would be loaded in vain
        from agentlightning.store.client_server import LightningStoreClient

        is_client = type(store) is LightningStoreClient  # no class of the user's made from it, which may hold more
    if not is_client:
        yield store
        return
    own = copy.copy(store)
    try:
        yield own
    finally:
        await own.close()


@contextlib.asynccontextmanager
async def connected(url: str | None, store: LightningStore | None) -> AsyncGenerator[LightningStore]:
    """Give a client of the server at `url`, closed at the end; without a URL give `store`, and leave it open."""
    if url is None:
        assert store is not None
        async with own_connection(store) as own:
            yield own
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
