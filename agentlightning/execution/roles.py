"""The roles of a run's processes: the algorithm with its store, and a runner; picklable if they run in a child."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from agentlightning.errors import NotFoundError
from agentlightning.execution.address import Address, PortReport
from agentlightning.execution.base import AlgorithmBundle, OpenWork, RunnerBundle
from agentlightning.execution.events import ExecutionEvent, ThreadingEvent
from agentlightning.execution.remote import heed, term_left_to_parent, until_known
from agentlightning.execution.run_state import (
    HAS_ENDED,
    RemoteRunners,
    StopNote,
    end_run,
    name_of_run,
    remote_runners,
    run_of,
    until_told,
)
from agentlightning.execution.stall import StallDetector, StallPolicy
from agentlightning.execution.supervisor import INTERRUPTED, Patience, Supervision, TaskTeam, until_set
from agentlightning.store.base import LightningStore
from agentlightning.store.wrappers import complete
from agentlightning.types.runs import RunState
from agentlightning.utils.backoff import OUTAGE_SECONDS
from agentlightning.utils.concurrency.interrupts import Interrupts
from agentlightning.utils.concurrency.loops import within

if TYPE_CHECKING:
    from agentlightning.store.client_server import LightningStoreClient, LightningStoreServer

logger = logging.getLogger(__name__)

RELEASE_POLL_SECONDS = 0.02
STOP_SECONDS = 3.0
"""Seconds that a store server may take to stop; after that it ends with the process."""
TELL_SECONDS = 5.0
"""Seconds that the end of a run waits for remote runners to detect it."""
HASTY_TELL_SECONDS = 0.5
"""The same after Ctrl+C."""
_WRITE_SECONDS = 2.0
"""Minimum number of seconds that the store has to record the end of a run."""


@dataclass
class AlgorithmRole:
    """The algorithm of a run with its store: it opens the run first, and records its end."""

    algorithm: AlgorithmBundle
    stall: StallPolicy
    position: Callable[[], list[str]] | None = None
    """Returns the algorithm's stack, if it is not a task of the loop that supervises the run."""
    _is_open: ThreadingEvent = field(default_factory=ThreadingEvent, init=False)
    """Set once the run is open; stop notes count from then on."""
    _has_returned: bool = field(default=False, init=False)
    """True once the algorithm has returned."""

    async def __call__(self, store: LightningStore, event: ExecutionEvent) -> Any:
        """Open the run and run the algorithm."""
        await self._open(store)
        result = await self.algorithm(store, event)
        self._has_returned = True
        return result

    async def conduct(
        self,
        supervision: Supervision,
        store: LightningStore,
        server: LightningStoreServer | None = None,
        *,
        work: Coroutine[object, object, Any] | None = None,
        runner: RunnerBundle | None = None,
        all_are_away: bool = False,
        released: ExecutionEvent | None = None,
    ) -> Any:
        """Run the algorithm together with the team of runners, end both, and return the result.

        `server` serves the store during this time. `work` is a call of this object that runs elsewhere. `runner` is the
        team's bundle, if no other process runs the rollouts. `all_are_away`: see `until_told`. The server runs until
        `released` is set, if other processes still need it.
        """
        async with own_connection(server or store, outage_of(self.algorithm)) as own:
            if server is not None:  # before runners can reach the store
                await self._open(own)
            work_of_run = OpenWork.of(self.algorithm, own, runner)
            detector = StallDetector(self.stall, work_of_run, getattr(self.algorithm, "llm_proxy", None), self.position)
            note = work_of_run.run_id, supervision.event, self._is_open
            supervision.watchers = [lambda: heed(own, *note), detector.watch]
            supervision.open_work = None if runner is None else work_of_run
            supervision.team.store = own
            async with served(server):
                error: BaseException | None = None
                try:
                    return await supervision.conduct(work or self(own, supervision.event))
                except BaseException as raised:
                    error = raised
                    raise
                finally:
                    await self._write_end(own, error, supervision.interrupted, all_are_away)
                    if released is not None:
                        with contextlib.suppress(TimeoutError):
                            waiting = until_set(released, RELEASE_POLL_SECONDS)
                            await asyncio.wait_for(waiting, supervision.patience.ask)

    async def _open(self, store: LightningStore) -> None:
        if not self._is_open.is_set():
            own: Callable[[LightningStore], Any] | None = getattr(self.algorithm, "open_run", None)
            with contextlib.suppress(NotImplementedError):  # a store of the user's that does not store runs
                await (own(store) if own is not None else complete(store).start_run(run_of(self.algorithm) or ""))
            self._is_open.set()

    async def _write_end(
        self, store: LightningStore, error: BaseException | None, interrupted: bool, all_are_away: bool
    ) -> None:
        """Record the end of the run and notify remote runners. Never raises."""
        run_id = run_of(self.algorithm)
        interrupted = interrupted or isinstance(error, (asyncio.CancelledError, KeyboardInterrupt))
        seconds = HASTY_TELL_SECONDS if interrupted else TELL_SECONDS
        state: RunState | None = "interrupted" if interrupted else "succeeded" if self._has_returned else None
        try:
            run = await within(max(seconds, _WRITE_SECONDS), end_run(store, run_id, state, error))
            note = StopNote(HAS_ENDED, max(run.end_time or 0.0, run.stop_time or 0.0))
            if all_are_away or await within(seconds, remote_runners(store, run_id)):
                telling = until_told(store, run_id, note, seconds=seconds, all_are_away=all_are_away)
                await within(seconds + 1.0, telling)
        except (NotImplementedError, NotFoundError):  # a store without runs; a run deleted in the meantime
            return
        except Exception as failure:  # the run is over, even if the store and remote runners do not know it
            logger.warning("Could not record the end of %s or notify its runners: %r", name_of_run(run_id), failure)


@dataclass(frozen=True)
class AlgorithmTask:
    """The algorithm with its store server, in its own child process."""

    algorithm: AlgorithmBundle
    store: LightningStore
    address: Address | None
    """Address at which to serve the store; None if the store is shared in another way."""
    patience: Patience
    stall: StallPolicy
    released: ExecutionEvent
    """Set once no runner needs the server."""
    report: PortReport
    """Receives the port of the server, if it has one."""

    async def __call__(self, index: int, event: ExecutionEvent) -> Any:
        """Serve the store, run the bundle and return its result, once the runners have ended as well."""
        server = None if self.address is None else self.address.bound_server(self.store)
        if server is not None:
            self.report.tell(server.server_launcher.port)
        interrupts = Interrupts(asyncio.get_running_loop())  # Ctrl+C cancels this coroutine instead
        supervision = Supervision(TaskTeam({}), event, interrupts, self.patience, INTERRUPTED)
        role = AlgorithmRole(self.algorithm, self.stall)
        return await role.conduct(supervision, self.store, server, released=self.released)


@dataclass(frozen=True)
class RunnerTask:
    """One runner: connects to the server at `url`, or uses `store` directly."""

    runner: RunnerBundle
    url: str | None
    store: LightningStore | None
    remote: RemoteRunners | None = None
    """Set in a process without an algorithm, which first waits for the store."""

    @property
    def wants_main_thread(self) -> bool:
        """True if the event loop leaves the main thread to the agent."""
        return bool(getattr(self.runner, "wants_main_thread", False))

    async def __call__(self, index: int, event: ExecutionEvent) -> Any:
        """Run the bundle as worker `index`."""
        async with self.connected() as store, contextlib.AsyncExitStack() as stack:
            if self.remote is not None:
                await stack.enter_async_context(term_left_to_parent(event))
                await until_known(self.remote, store, event)
            return None if event.is_set() else await self.runner(store, index, event)

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncGenerator[LightningStore]:
        """Yield a client of the server, which is closed at the end; without a URL the store, which stays open."""
        seconds = outage_of(self.runner)
        if self.url is None:
            assert self.store is not None
            async with own_connection(self.store, seconds) as own:
                yield own
            return
        from agentlightning.store.client_server import LightningStoreClient

        client = LightningStoreClient(self.url, deadline=seconds)
        try:
            yield client
        finally:
            await client.close()


def outage_of(bundle: AlgorithmBundle | RunnerBundle) -> float:
    """Return the seconds that a side of the run tolerates an unreachable store."""
    return float(getattr(bundle, "store_unreachable_timeout", OUTAGE_SECONDS))


@contextlib.asynccontextmanager
async def own_connection(store: LightningStore, outage_seconds: float) -> AsyncGenerator[LightningStore]:
    """Yield the store itself; for a client yield a copy, so that its connections are closed here.

    The copy tolerates an unreachable server for `outage_seconds`, unless the client has its own deadline.
    """
    is_client = False
    if hasattr(store, "server_address_root"):  # do not load the web stack for other stores
        from agentlightning.store.client_server import LightningStoreClient

        is_client = type(store) is LightningStoreClient  # not a user's subclass, which may hold more
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
async def served(server: LightningStoreServer | None) -> AsyncGenerator[None]:
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
        except Exception as error:  # the run is over: its result counts, not the end of the server
            logger.error("The store server failed while stopping: %r", error)
