"""`shm`: algorithm and runners as threads of one process, around one store."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Coroutine
from functools import partial
from typing import Any, Literal, get_args

from typing_extensions import override

from agentlightning.env_var import LightningEnvVar, resolve_bool_env_var
from agentlightning.execution.base import (
    AlgorithmBundle,
    ExecutionStrategy,
    RunnerBundle,
)
from agentlightning.execution.events import ThreadingEvent
from agentlightning.execution.roles import AlgorithmRole
from agentlightning.execution.run_state import run_of
from agentlightning.execution.stall import DEFAULT_SECONDS, OnStall, StallPolicy
from agentlightning.execution.supervisor import Patience, Supervision, TaskTeam
from agentlightning.execution.team import SETTLE_STOPPED_SECONDS, end_attempts
from agentlightning.runner.base import worker_label
from agentlightning.store.base import LightningStore
from agentlightning.utils.concurrency.interrupts import Interrupts
from agentlightning.utils.concurrency.loop_thread import LoopThread
from agentlightning.utils.concurrency.loops import run, within
from agentlightning.utils.setting_checks import check_choice, check_count, check_seconds

logger = logging.getLogger(__name__)

MainThread = Literal["algorithm", "runner"]

INTERRUPTED_ASK_SECONDS = 2.0
"""Seconds that runners may take to finish their rollouts after Ctrl+C if the algorithm has the main thread."""
INTERRUPT_SECONDS = 2.0
"""Seconds that coroutines may take to end after Ctrl+C cancelled them."""


class SharedMemoryExecutionStrategy(ExecutionStrategy):
    """Runs every bundle in this process, each on its own event loop, all but one on daemon threads.

    An agent that ends its process (`os._exit`, a crash) ends the program with that exit code, and processes that agents
    start may outlive the run. To prevent both, use `cs`, or runners with `isolation="process"`.

    Args:
        n_runners: number of runner threads.
        main_thread: the side that runs on the calling thread. None: the runner if there is exactly one, else the
            algorithm.
        join_timeout: seconds to wait at the end for a thread if its bundle does not stop.
        graceful_delay: seconds between the stop event and cancellation, and again after cancellation. After Ctrl+C, the
            run ends within 5 s. If the algorithm runs on the main thread, runners have 2 s of them to finish rollouts.
        poll_interval: seconds between checks of the stop event.
        managed_store: whether to wrap the store in `LightningStoreThreaded`; None reads `AGL_MANAGED_STORE`, which is
            true by default.
        stall_timeout: seconds without progress after which the run logs what each part waits for; None is never.
        on_stall: `report` continues after the report, `raise` ends the run with `StalledError`.

    Raises:
        ValueError: a setting is out of range, or `main_thread="runner"` with several runners.
    """

    runners_share_process = True

    def __init__(
        self,
        n_runners: int = 1,
        main_thread: MainThread | None = None,
        join_timeout: float = 15.0,
        graceful_delay: float = 5.0,
        poll_interval: float = 0.05,
        managed_store: bool | None = None,
        *,
        stall_timeout: float | None = DEFAULT_SECONDS,
        on_stall: OnStall = "report",
    ) -> None:
        self.n_runners = check_count("n_runners", n_runners)
        if main_thread is None:
            main_thread = "runner" if n_runners == 1 else "algorithm"
        self.main_thread: MainThread = check_choice("main_thread", main_thread, get_args(MainThread))
        self._check_main_thread()
        self.join_timeout = check_seconds("join_timeout", join_timeout)
        self.graceful_delay = check_seconds("graceful_delay", graceful_delay)
        self.poll_interval = check_seconds("poll_interval", poll_interval)
        self.managed_store = resolve_bool_env_var(LightningEnvVar.AGL_MANAGED_STORE, managed_store, fallback=True)
        self.stall_timeout = None if stall_timeout is None else check_seconds("stall_timeout", stall_timeout)
        self.on_stall: OnStall = check_choice("on_stall", on_stall, get_args(OnStall))

    def _check_main_thread(self) -> None:
        """Raise `ValueError` for an unknown side or several runners on the main thread: both may be set later."""
        check_choice("main_thread", self.main_thread, get_args(MainThread))
        if self.main_thread == "runner" and self.n_runners != 1:
            raise ValueError(
                f"main_thread='runner' allows one runner, but n_runners is {self.n_runners}. "
                "Set n_runners=1 or main_thread='algorithm', or omit main_thread."
            )

    @override
    def execute(self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore) -> Any:
        self.interrupted = False
        self._check_main_thread()
        if self.managed_store:
            from agentlightning.store.threading import LightningStoreThreaded

            store = LightningStoreThreaded(store)
        threads: list[LoopThread] = []
        try:
            return run(
                lambda i: self._conduct(algorithm, runner, store, i, threads),
                terminable=True,
                beside=self.main_thread == "runner" and getattr(runner, "wants_main_thread", False),
            )
        finally:
            timeout = 0.1 if self.interrupted else self.join_timeout
            alive = [thread.name for thread in threads if not thread.join(timeout)]
            if alive:
                logger.error("These threads did not end: %s", ", ".join(alive))

    async def _conduct(
        self,
        algorithm: AlgorithmBundle,
        runner: RunnerBundle,
        store: LightningStore,
        interrupts: Interrupts,
        threads: list[LoopThread],
    ) -> Any:
        event, role = ThreadingEvent(), AlgorithmRole(algorithm, StallPolicy(self.stall_timeout, self.on_stall))

        def on_thread(name: str, bundle: Any, *args: Any) -> Coroutine[Any, Any, Any]:
            threads.append(LoopThread(name, lambda: bundle(*args)))
            threads[-1].start()
            return threads[-1].result()

        work, patience, ask = None, Patience(ask=self.graceful_delay, interrupt=self.graceful_delay), 0.0
        if self.main_thread == "algorithm":
            names = [f"runner-{i}" for i in range(self.n_runners)]
            members = {name: on_thread(name, runner, store, i, event) for i, name in enumerate(names)}
            ask = min(INTERRUPTED_ASK_SECONDS, self.graceful_delay)
        else:
            members = {"runner-0": runner(store, 0, event)}
            work = on_thread("algorithm", role, store, event)
            role.position = threads[-1].stack
        hasty = Patience(ask, INTERRUPT_SECONDS)
        supervision = Supervision(TaskTeam(members), event, interrupts, patience, hasty, self.poll_interval)
        supervision.on_interrupt = partial(self.note_interrupt, algorithm)
        try:
            return await role.conduct(supervision, store, work=work, runner=runner)
        finally:  # end attempts that runners still hold: a claim that a runner no longer awaited
            host, pid = socket.gethostname(), os.getpid()
            workers = {worker_label(host, pid, index) for index in range(self.n_runners)}
            message = "its runner ended with its run during this attempt"
            with contextlib.suppress(Exception):  # the store is unreachable: then the lease runs out
                ending = end_attempts(store, workers, message, stopped=True, run_id=run_of(runner))
                await within(SETTLE_STOPPED_SECONDS, ending)
