"""`cs`: the algorithm and the runners as processes that share a store server, on one or several machines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

from typing_extensions import override

from agentlightning.base.terminal import counted
from agentlightning.env_var import LightningEnvVar, resolve_bool_env_var, resolve_int_env_var, resolve_str_env_var
from agentlightning.execution.address import DEFAULT_PORT, LOOPBACK, Address, HeldElsewhereError, PortReport
from agentlightning.execution.base import (
    AlgorithmBundle,
    AlgorithmDiedError,
    ExecutionStrategy,
    OpenWork,
    RunnerBundle,
)
from agentlightning.execution.children import ChildTask
from agentlightning.execution.events import ExecutionEvent, MultiprocessingEvent, ThreadingEvent
from agentlightning.execution.remote import RunWatch
from agentlightning.execution.roles import AlgorithmRole, AlgorithmTask, RunnerTask, outage_of
from agentlightning.execution.run_state import RemoteRunners, run_of
from agentlightning.execution.stall import DEFAULT_SECONDS, OnStall, StallPolicy
from agentlightning.execution.supervisor import INTERRUPTED, Patience, Supervision, TaskTeam, Team
from agentlightning.execution.team import (
    ProcessTeam,
    StartMethod,
    default_start_method,
    make_starter,
    obstacle_to_children,
)
from agentlightning.store.base import LightningStore
from agentlightning.utils.concurrency.interrupts import Interrupts
from agentlightning.utils.concurrency.loops import run
from agentlightning.utils.http.auth import is_loopback
from agentlightning.utils.setting_checks import check_choice, check_count, check_port, check_seconds

logger = logging.getLogger(__name__)

Role = Literal["algorithm", "runner", "both"]
MainProcess = Literal["algorithm", "runner"]
_KILL_SECONDS = 5.0
"""Minimum number of seconds to wait for killed processes at an ordinary end."""


class ClientServerExecutionStrategy(ExecutionStrategy):
    """Runs the algorithm and a store server in one process, and every runner in its own process.

    Args:
        role: the sides that this process runs: `algorithm`, `runner` or `both`. None reads `AGL_CURRENT_ROLE`, which is
            `both` by default. If a process with the role `both` cannot bind an address beyond loopback because another
            machine or another such process uses it, its runners join the run there and it runs no algorithm.
        server_host: address to bind, and to connect to; None reads `AGL_SERVER_HOST`, 127.0.0.1 by default.
        server_port: port of the store server; None reads `AGL_SERVER_PORT`, 4747 by default. With the role `both`, 0
            selects a free port. If the default port is in use, a free port is selected too.
        n_runners: number of runner processes. Each is a child process, also with the role `runner`. Exceptions, with a
            warning: a fork with an open accelerator, or a spawn with parts that cannot be pickled.
        graceful_timeout: seconds between the stop event and the first signal, at an ordinary end. Set it higher than
            the duration of the longest rollout, so that no rollout is interrupted.
        terminate_timeout: seconds after each of SIGINT and SIGTERM, and after SIGKILL. After SIGKILL it is at least
            5 s: the operating system may take that long to end a process on a busy machine.
        main_process: the side that runs in this process. `runner` requires the role `both` and one runner. It is for
            debugging: an agent that ends its process ends the program.
        managed_store: whether to serve the store to the runners; None reads `AGL_MANAGED_STORE`, which is true by
            default. With False, both sides get the store unchanged.
        allowed_exit_codes: exit codes of children that do not count as a failure.
        max_runner_restarts: maximum number of restarts of each runner process that died.
        start_method: `fork` (default on Linux), `spawn` (default elsewhere) or `forkserver`.
        connect_host: address to which the runners connect, if it differs from `server_host`.
        stall_timeout: seconds without progress after which the run logs what each part waits for; None is never.
        on_stall: `report` continues after the report, `raise` ends the run with `StalledError`.
        on_listening: called with the URL of the store server, which also serves the dashboard, once its port is bound;
            in the process that runs the server.

    Raises:
        ValueError, TypeError: a setting is out of range.
    """

    runners_share_process = False

    def __init__(
        self,
        role: Role | None = None,
        server_host: str | None = None,
        server_port: int | None = None,
        n_runners: int = 1,
        graceful_timeout: float = 10.0,
        terminate_timeout: float = 10.0,
        main_process: MainProcess = "algorithm",
        managed_store: bool | None = None,
        allowed_exit_codes: Sequence[int] = (0, -15),
        *,
        max_runner_restarts: int = 3,
        start_method: StartMethod | None = None,
        connect_host: str | None = None,
        stall_timeout: float | None = DEFAULT_SECONDS,
        on_stall: OnStall = "report",
        on_listening: Callable[[str], None] | None = None,
    ) -> None:
        role_name = resolve_str_env_var(LightningEnvVar.AGL_CURRENT_ROLE, role, fallback="both")
        self.role: Role = check_choice("role (AGL_CURRENT_ROLE)", role_name, get_args(Role))
        self.server_host = resolve_str_env_var(LightningEnvVar.AGL_SERVER_HOST, server_host, fallback=LOOPBACK)
        self.server_port = resolve_int_env_var(LightningEnvVar.AGL_SERVER_PORT, server_port)
        self.n_runners = check_count("n_runners", n_runners)
        self.graceful_timeout = check_seconds("graceful_timeout", graceful_timeout)
        self.terminate_timeout = check_seconds("terminate_timeout", terminate_timeout)
        self.main_process: MainProcess = check_choice("main_process", main_process, get_args(MainProcess))
        self.managed_store = resolve_bool_env_var(LightningEnvVar.AGL_MANAGED_STORE, managed_store, fallback=True)
        self.allowed_exit_codes = tuple(allowed_exit_codes)
        self.max_runner_restarts = check_count("max_runner_restarts", max_runner_restarts, minimum=0)
        method = check_choice("start_method", start_method or default_start_method(), get_args(StartMethod))
        self.start_method: StartMethod = method
        self.connect_host = connect_host
        self.stall_timeout = None if stall_timeout is None else check_seconds("stall_timeout", stall_timeout)
        self.on_stall: OnStall = check_choice("on_stall", on_stall, get_args(OnStall))
        self.on_listening = on_listening
        self._check_sides()

    def _check_sides(self) -> None:
        """Raise `ValueError` for unknown or incompatible sides: both attributes may be set after construction."""
        check_choice("role (AGL_CURRENT_ROLE)", self.role, get_args(Role))
        check_choice("main_process", self.main_process, get_args(MainProcess))
        if self.main_process == "runner" and self.role != "both":
            raise ValueError(f"main_process='runner' is only supported when role='both'; the role is {self.role!r}")
        if self.main_process == "runner" and self.n_runners != 1:
            raise ValueError(f"main_process='runner' requires n_runners to be 1; got {self.n_runners}")
        if self._port == 0 and self.role != "both" and self.managed_store:
            raise ValueError(f"server_port=0 requires role='both'; with role={self.role!r}, set a port on both sides")

    @property
    def server_port(self) -> int:
        """The configured port; 4747 by default."""
        return DEFAULT_PORT if self._port is None else self._port

    @server_port.setter
    def server_port(self, port: int | None) -> None:
        self._port = None if port is None else check_port("server_port", port)

    @override
    def execute(self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore) -> Any:
        self.interrupted = False
        self._check_sides()
        execution = _Execution(self, algorithm, runner, store)
        if self.role == "algorithm":
            return execution.with_main_algorithm(has_runners=False)
        if self.role == "runner":
            return execution.only_runners()
        try:
            return execution.with_main_algorithm() if self.main_process == "algorithm" else execution.with_main_runner()
        except HeldElsewhereError as held:
            assert execution.address is not None
            execution.address = execution.address.of_the_other
            text = "%s: this process joins the run at %s with %s and runs no algorithm"
            logger.warning(text, held, execution.address.url, counted(self.n_runners, "runner"))
            return execution.only_runners()

    def address(self) -> Address:
        """Return the address at which this process serves the store or connects to it."""
        may_move = self._port is None and self.role == "both"
        joins = self.known_address if self.may_be_joined else None
        return Address(self.server_host, self.server_port, may_move, self.connect_host, joins, self.on_listening)

    @property
    def known_address(self) -> str:
        """The server's address for other machines: `AGL_SERVER_HOST` if the server listens on all addresses."""
        everywhere = self.server_host in ("0.0.0.0", "::")
        return (resolve_str_env_var(LightningEnvVar.AGL_SERVER_HOST) if everywhere else None) or self.server_host

    @property
    def may_be_joined(self) -> bool:
        """True for the role `both` on an address beyond loopback: a process that cannot bind it joins the run. So no
        name is generated for the run."""
        return self.role == "both" and self.managed_store and not is_loopback(self.server_host)


ONE_SIDE_INTERRUPTED = Patience(ask=0.0, interrupt=4.0)
"""Patience after Ctrl+C if this process runs only the algorithm or only runners. Its children get the same time."""


class _Execution:
    """One execution of the strategy: its parts, and the layouts that assign them to processes."""

    def __init__(
        self,
        strategy: ClientServerExecutionStrategy,
        algorithm: AlgorithmBundle,
        runner: RunnerBundle,
        store: LightningStore,
    ) -> None:
        self._strategy, self._algorithm, self._runner, self._store = strategy, algorithm, runner, store
        self.address = strategy.address() if strategy.managed_store else None
        """Address of the store server; with None, both sides get the store unchanged."""
        seconds = strategy.terminate_timeout
        self._patience = Patience(strategy.graceful_timeout, seconds, seconds, kill=max(seconds, _KILL_SECONDS))
        self._stall = StallPolicy(strategy.stall_timeout, strategy.on_stall)

    def with_main_algorithm(self, *, has_runners: bool = True) -> Any:
        """Run algorithm and server here, and the runners, if any, in children that are started before anything else."""
        server = None if self.address is None else self.address.bound_server(self._store)
        reached = None if server is None or self.address is None else self.address.at(server.server_launcher.port)
        event = MultiprocessingEvent() if has_runners else ThreadingEvent()
        children = self._children(self._runner_task(reached), event, "runner-") if has_runners else None

        async def main(interrupts: Interrupts) -> Any:
            supervision = self._supervision(team or TaskTeam({}), event, interrupts, INTERRUPTED)
            role, runner = AlgorithmRole(self._algorithm, self._stall), self._runner if has_runners else None
            return await role.conduct(supervision, self._store, server, runner=runner, all_are_away=not has_runners)

        with children or contextlib.nullcontext() as team:
            return run(main, terminable=True)

    def with_main_runner(self) -> Any:
        """Run worker 0 here, and algorithm and server in a child. The store's final contents stay in the child."""
        if self.address is not None:
            self.address.check_free()
        report, event, released = PortReport(), MultiprocessingEvent(), MultiprocessingEvent()

        async def main(interrupts: Interrupts) -> Any:
            async with contextlib.AsyncExitStack() as connections:

                async def serve() -> Any:
                    try:
                        address = self.address
                        if address is not None:
                            port = await report.port(event)
                            if port is None:
                                return None
                            address = address.at(port)
                        task = self._runner_task(address)
                        store = await connections.enter_async_context(task.connected())
                        supervision.open_work = OpenWork.of(self._algorithm, store, self._runner)
                        return await task(0, event)
                    finally:
                        released.set()

                team = TaskTeam({"runner-0": serve()})
                supervision = self._supervision(team, event, interrupts, ONE_SIDE_INTERRUPTED)
                return await supervision.conduct(until_ended(child, INTERRUPTED))

        task = AlgorithmTask(self._algorithm, self._store, self.address, self._patience, self._stall, released, report)
        with self._children(task, event, "algorithm") as child:
            return run(main, terminable=True, beside=self._runner_task(None).wants_main_thread)

    def only_runners(self) -> Any:
        """Run the runners of a remote algorithm in children; one runs in this process if it cannot have children."""
        n_runners, method = self._strategy.n_runners, self._strategy.start_method
        remote = RemoteRunners(run_of(self._runner), f"{socket.gethostname()}-{os.getpid()}", n_runners)
        task = replace(self._runner_task(self.address), remote=remote)
        if n_runners == 1 and (obstacle := obstacle_to_children(method, task)) is not None:
            logger.warning(
                "The runner runs in this process: it is not restarted if the agent ends the process, and processes "
                "that the agent starts may outlive it. Reason: %s",
                obstacle,
            )
            event = ThreadingEvent()
            return run(
                lambda i: self._main_runners(task, None, event, i), terminable=True, beside=task.wants_main_thread
            )
        shared = MultiprocessingEvent()
        with self._children(task, shared, "runner-") as team:
            team.alone = True
            return run(lambda i: self._main_runners(task, team, shared, i), terminable=True)

    async def _main_runners(
        self, task: RunnerTask, team: ProcessTeam | None, event: ExecutionEvent, interrupts: Interrupts
    ) -> Any:
        """Run the team's runners, or one runner in this process without a team, until their run ends."""
        assert task.remote is not None
        async with task.connected() as store:
            if team is not None:
                team.store = store
            run_watch = RunWatch(
                store=store,
                where=task.url or getattr(store, "server_address_root", type(store).__name__),
                remote=task.remote,
                outage_seconds=outage_of(self._runner),
                event=event,
                heeds_old_notes=task.url is not None or run_of(self._runner) is not None,
            )

            async def drain() -> None:
                """End in order at SIGTERM, which operators send before they remove a machine, without losing work."""
                await interrupts.draining()
                logger.warning("SIGTERM: no further rollouts; running rollouts have %g s", self._patience.ask)
                event.set()

            interrupts.drains = True
            supervision = self._supervision(TaskTeam({}), event, interrupts, ONE_SIDE_INTERRUPTED)
            supervision.watchers = [run_watch.watch, drain]
            try:
                return await supervision.conduct(task(0, event) if team is None else until_ended(team, INTERRUPTED))
            finally:
                await run_watch.leave()

    def _runner_task(self, address: Address | None) -> RunnerTask:
        return RunnerTask(self._runner, address.url if address else None, None if address else self._store)

    def _supervision(self, team: Team, event: ExecutionEvent, interrupts: Interrupts, hasty: Patience) -> Supervision:
        note = partial(self._strategy.note_interrupt, self._algorithm)
        return Supervision(team, event, interrupts, self._patience, hasty, on_interrupt=note)

    @contextlib.contextmanager
    def _children(self, task: ChildTask, event: ExecutionEvent, prefix: str) -> Generator[ProcessTeam]:
        """Start the children, and end all of them when the body ends. With `fork`: before a thread of ours starts."""
        strategy, are_runners = self._strategy, prefix == "runner-"
        restarts, size = (strategy.max_runner_restarts, strategy.n_runners) if are_runners else (0, 1)
        starter = make_starter(
            strategy.start_method, task, event, prefix, restarts=restarts > 0, ends_descendants=are_runners
        )
        team = ProcessTeam(starter, size, event, prefix, strategy.allowed_exit_codes, restarts)
        if not are_runners:
            team.error = AlgorithmDiedError
        try:
            team.start()
            yield team
        finally:
            event.set()
            starter.close()


async def until_ended(team: ProcessTeam, patience: Patience) -> Any:
    """Wait for the children and return the result of the last one. When cancelled, end them.

    A result that arrives while they end still counts.
    """
    try:
        await team.watch()
    except asyncio.CancelledError:
        await team.end(patience)
        if team.result is None:
            raise
    return team.result
