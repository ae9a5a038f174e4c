"""The three ways in which client-server spreads a run over processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from agentlightning.execution.address import Address, PortReport
from agentlightning.execution.base import AlgorithmBundle, AlgorithmDiedError, OpenWork, RunnerBundle
from agentlightning.execution.events import ExecutionEvent, MultiprocessingEvent, ThreadingEvent
from agentlightning.execution.processes.children import ChildTask
from agentlightning.execution.processes.dead_workers import EndAttempts
from agentlightning.execution.processes.team import ProcessTeam, StartMethod, make_starter, obstacle_to_children
from agentlightning.execution.run.remote import RunWatch
from agentlightning.execution.run.roles import (
    AlgorithmTask,
    RunnerTask,
    algorithm_watchers,
    connected,
    outage_of,
    own_connection,
    served,
)
from agentlightning.execution.run.run_end import OpenedRun, run_of
from agentlightning.execution.run.stall import StallPolicy
from agentlightning.execution.run.stop_note import RemoteRunners
from agentlightning.execution.run.supervisor import INTERRUPTED, Patience, Supervision, TaskTeam, Team
from agentlightning.store.base import LightningStore
from agentlightning.utils.concurrency.interrupts import Interrupts
from agentlightning.utils.concurrency.loops import run

if TYPE_CHECKING:
    from agentlightning.store.client_server import LightningStoreServer

logger = logging.getLogger(__name__)

ONE_SIDE_INTERRUPTED = Patience(ask=0.0, interrupt=4.0)
"""Ctrl+C where this process runs only the algorithm or only runners; its children have the same time."""


@dataclass
class Layout:
    """One execution: the two bundles, the store, and how children are treated."""

    algorithm: AlgorithmBundle
    runner: RunnerBundle
    store: LightningStore
    address: Address | None
    """Where the store is served; None hands the store to both sides as it is."""
    patience: Patience
    start_method: StartMethod
    n_runners: int
    max_runner_restarts: int
    allowed_exit_codes: tuple[int, ...]
    stall: StallPolicy
    interrupted: bool = field(default=False, init=False)

    def with_main_algorithm(self) -> Any:
        """Algorithm and server here, runners in children that are started before anything else."""
        server = None if self.address is None else self.address.bound_server(self.store)
        reached = None if server is None or self.address is None else self.address.at(server.server_launcher.port)
        event = MultiprocessingEvent()

        with self._children(self._runner_task(reached), event, "runner-", self.n_runners) as team:
            return run(lambda i: self._main_algorithm(server, team, event, i, runners_here=True), terminable=True)

    def alone(self) -> Any:
        """Algorithm and server here, no runner of ours."""
        server = None if self.address is None else self.address.bound_server(self.store)
        event = ThreadingEvent()

        return run(
            lambda i: self._main_algorithm(server, TaskTeam({}), event, i, runners_here=False),
            terminable=True,
        )

    def with_main_runner(self) -> Any:
        """Worker 0 here, algorithm and server in a child. What the store holds at the end stays there."""
        if self.address is not None:
            self.address.check_free()
        report = None if self.address is None else PortReport()
        event, released = MultiprocessingEvent(), MultiprocessingEvent()
        open_work: list[OpenWork] = []

        async def serve(connections: contextlib.AsyncExitStack) -> Any:
            try:
                address = self.address
                if address is not None and report is not None:
                    port = await report.port(event)
                    if port is None:
                        return None
                    address = address.at(port)
                task = self._runner_task(address)
                store = await connections.enter_async_context(connected(task.url, task.store, outage_of(self.runner)))
                open_work.append(OpenWork.of(self.algorithm, store, self.runner))
                return await task(0, event)
            finally:
                released.set()

        async def main(interrupts: Interrupts) -> Any:
            async with contextlib.AsyncExitStack() as connections:
                team = TaskTeam({"runner-0": serve(connections)})
                work = until_ended(child, INTERRUPTED)
                return await self._conduct(work, team, event, interrupts, ONE_SIDE_INTERRUPTED, open_work)

        algorithm = AlgorithmTask(self.algorithm, self.store, self.address, self.patience, self.stall, released, report)
        with self._children(algorithm, event, "algorithm", 1) as child:
            return run(main, terminable=True, beside=self._runner_task(None).wants_main_thread)

    def only_runners(self) -> Any:
        """Runners of a remote algorithm, in children; one runs in this process where no child can be made."""
        remote = RemoteRunners(run_of(self.runner), f"{socket.gethostname()}-{os.getpid()}", self.n_runners)
        task = replace(self._runner_task(self.address), remote=remote)
        if self.n_runners == 1 and (obstacle := obstacle_to_children(self.start_method, task)) is not None:
            logger.warning(
                "The runner runs in this process, where nobody starts it again when the agent ends the process, "
                "and what the agent starts may outlive it: %s",
                obstacle,
            )
            event = ThreadingEvent()
            return run(
                lambda i: self._main_runners(task, task(0, event), event, i),
                terminable=True,
                beside=task.wants_main_thread,
            )
        shared = MultiprocessingEvent()
        with self._children(task, shared, "runner-", self.n_runners) as team:
            team.alone = True
            return run(
                lambda i: self._main_runners(task, until_ended(team, INTERRUPTED), shared, i, team),
                terminable=True,
            )

    def _runner_task(self, address: Address | None) -> RunnerTask:
        return RunnerTask(self.runner, address.url if address else None, None if address else self.store)

    async def _main_algorithm(
        self,
        server: LightningStoreServer | None,
        team: Team,
        event: ExecutionEvent,
        interrupts: Interrupts,
        *,
        runners_here: bool,
    ) -> Any:
        async with own_connection(server or self.store, outage_of(self.algorithm)) as store:
            opened_run = OpenedRun(self.algorithm)
            if server is not None:
                await opened_run.open(store)
            open_work = [OpenWork.of(self.algorithm, store, self.runner)] if runners_here else []
            watchers = algorithm_watchers(opened_run, store, event, self.stall)
            if isinstance(team, ProcessTeam):
                team.settle, team.settle_stopped = EndAttempts(store), EndAttempts(store, stopped=True)
            ending = opened_run.ending(store, lambda: self.interrupted, all_are_away=not runners_here)
            async with served(server), ending:
                work = opened_run(store, event)
                return await self._conduct(work, team, event, interrupts, INTERRUPTED, open_work, watchers)

    async def _main_runners(
        self,
        task: RunnerTask,
        work: Coroutine[object, object, object],
        event: ExecutionEvent,
        interrupts: Interrupts,
        team: ProcessTeam | None = None,
    ) -> Any:
        assert task.remote is not None
        outage = outage_of(self.runner)
        async with connected(task.url, task.store, outage) as store:
            if team is not None:
                team.settle = team.settle_stopped = EndAttempts(store)
            run_watch = RunWatch(
                store=store,
                where=task.url or getattr(store, "server_address_root", type(store).__name__),
                remote=task.remote,
                outage_seconds=outage,
                event=event,
                heeds_old_notes=task.url is not None or run_of(self.runner) is not None,
            )

            async def drain() -> None:
                """End in order at SIGTERM, by which operators take machines away, so that no work is lost."""
                await interrupts.draining()
                logger.warning("SIGTERM: no further rollouts; those under way have %g s", self.patience.ask)
                event.set()

            interrupts.drains = True
            none, watchers = TaskTeam({}), [run_watch.watch, drain]
            try:
                return await self._conduct(work, none, event, interrupts, ONE_SIDE_INTERRUPTED, watchers=watchers)
            finally:
                await run_watch.leave()

    async def _conduct(
        self,
        work: Coroutine[object, object, object],
        team: Team,
        event: ExecutionEvent,
        interrupts: Interrupts,
        hasty: Patience,
        open_work: Sequence[OpenWork] = (),
        watchers: Sequence[Callable[[], Coroutine[object, object, None]]] = (),
    ) -> Any:
        supervision = Supervision(team, event, interrupts, self.patience, hasty, open_work=open_work, watchers=watchers)
        try:
            return await supervision.conduct(work)
        finally:
            self.interrupted = supervision.interrupted

    @contextlib.contextmanager
    def _children(self, task: ChildTask, event: ExecutionEvent, prefix: str, size: int) -> Generator[ProcessTeam]:
        """Start the children, and see to it that none is left. With `fork`: before a thread of ours starts."""
        runners = prefix == "runner-"
        restarts = self.max_runner_restarts if runners else 0
        starter = make_starter(self.start_method, task, event, prefix, restarts=restarts > 0, ends_descendants=runners)
        team = ProcessTeam(starter, size, event, prefix, self.allowed_exit_codes, restarts)
        if prefix == "algorithm":
            team.error = AlgorithmDiedError
        try:
            team.start()
            yield team
        finally:
            event.set()
            starter.close()


async def until_ended(team: ProcessTeam, patience: Patience) -> Any:
    """Wait for children as for a coroutine: return what the last of them returned; when cancelled, end them.

    A result that comes while they end counts: it was there, and only late.
    """
    try:
        await team.watch()
    except asyncio.CancelledError:
        await team.end(patience)
        if team.result is None:
            raise
    return team.result
