"""The three ways in which client-server spreads a run over processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass, field, replace
from typing import Any

from agentlightning.execution.address import Address
from agentlightning.execution.base import AlgorithmBundle, AlgorithmDiedError, RunnerBundle
from agentlightning.execution.children import ChildTask
from agentlightning.execution.events import ExecutionEvent, MultiprocessingEvent, ThreadingEvent
from agentlightning.execution.interrupts import Interrupts
from agentlightning.execution.loops import run
from agentlightning.execution.processes import ProcessTeam, StartMethod, make_starter
from agentlightning.execution.sides import AlgorithmSide, RunnerSide, connected, served
from agentlightning.execution.supervise import INTERRUPTED, Patience, Supervision, TaskTeam, Team
from agentlightning.execution.work import open_work_counter
from agentlightning.store.base import LightningStore

ONE_SIDE_INTERRUPTED = Patience(ask=0.0, interrupt=4.0)
"""Ctrl+C where this process has one side only; its children have the same time."""

UNASKED = replace(INTERRUPTED, ask=0.0)
"""For an algorithm in a child: it has seen the event for a while when it comes to this."""


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
    interrupted: bool = field(default=False, init=False)

    def with_main_algorithm(self) -> Any:
        """Algorithm and server here, runners in children that are started before anything else."""
        server = None if self.address is None else self.address.bound_server(self.store)
        reached = None if server is None or self.address is None else self.address.at(server.server_launcher.port)
        event = MultiprocessingEvent()

        async def main(interrupts: Interrupts) -> Any:
            view = server or self.store
            count = open_work_counter(self.algorithm, view)
            async with served(server):
                work = self.algorithm(view, event)
                return await self._conduct(work, team, event, interrupts, INTERRUPTED, count)

        with self._children(self._runner_side(reached), event, "runner-", self.n_runners) as team:
            return run(main)

    def alone(self) -> Any:
        """Algorithm and server here, no runner of ours."""
        server = None if self.address is None else self.address.bound_server(self.store)
        event = ThreadingEvent()

        async def main(interrupts: Interrupts) -> Any:
            async with served(server):
                work = self.algorithm(server or self.store, event)
                return await self._conduct(work, TaskTeam({}), event, interrupts, INTERRUPTED)

        return run(main)

    def with_main_runner(self) -> Any:
        """Worker 0 here, algorithm and server in a child. What the store holds at the end stays there."""
        address = None if self.address is None else self.address.settled()
        event, released = MultiprocessingEvent(), MultiprocessingEvent()
        side = self._runner_side(address)

        async def serve() -> Any:
            try:
                if address is not None:
                    await address.until_listening()
                return await side(0, event)
            finally:
                released.set()

        async def main(interrupts: Interrupts) -> Any:
            async with connected(side.url, side.store) as store:
                count = open_work_counter(self.algorithm, store)
                team = TaskTeam({"runner-0": serve()})
                work = until_ended(child, UNASKED)
                return await self._conduct(work, team, event, interrupts, ONE_SIDE_INTERRUPTED, count)

        task = AlgorithmSide(self.algorithm, self.store, address, self.patience, released)
        with self._children(task, event, "algorithm", 1) as child:
            return run(main)

    def only_runners(self) -> Any:
        """Runners of an algorithm elsewhere: one in this process, several in children."""
        side = self._runner_side(self.address)
        if self.n_runners == 1:
            event = ThreadingEvent()
            return run(lambda interrupts: self._conduct_alone(side(0, event), event, interrupts))
        shared = MultiprocessingEvent()
        with self._children(side, shared, "runner-", self.n_runners) as team:
            return run(lambda interrupts: self._conduct_alone(until_ended(team, INTERRUPTED), shared, interrupts))

    def _runner_side(self, address: Address | None) -> RunnerSide:
        return RunnerSide(self.runner, address.url if address else None, None if address else self.store)

    async def _conduct_alone(
        self, work: Coroutine[Any, Any, Any], event: ExecutionEvent, interrupts: Interrupts
    ) -> Any:
        return await self._conduct(work, TaskTeam({}), event, interrupts, ONE_SIDE_INTERRUPTED)

    async def _conduct(
        self,
        work: Coroutine[Any, Any, Any],
        team: Team,
        event: ExecutionEvent,
        interrupts: Interrupts,
        hasty: Patience,
        count_open_work: Callable[[], Awaitable[int]] | None = None,
    ) -> Any:
        supervision = Supervision(team, event, interrupts, self.patience, hasty, count_open_work=count_open_work)
        try:
            return await supervision.conduct(work)
        finally:
            self.interrupted = supervision.interrupted

    @contextlib.contextmanager
    def _children(self, task: ChildTask, event: ExecutionEvent, prefix: str, size: int) -> Generator[ProcessTeam]:
        """Start the children, and see to it that none is left. With `fork`: before a thread of ours starts."""
        restarts = self.max_runner_restarts if prefix == "runner-" else 0
        starter = make_starter(self.start_method, task, event, prefix, restarts=restarts > 0)
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
    """Wait for children as for a coroutine: return what the last of them returned; when cancelled, end them."""
    try:
        await team.watch()
    except asyncio.CancelledError:
        await team.end(patience)
        raise
    return team.result
