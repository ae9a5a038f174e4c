"""The interface of strategies: the two bundles, `ExecutionStrategy`, and the errors of a run.

A bundle is a coroutine function that holds everything it needs except the store. A strategy decides where the
bundles run (threads, processes, machines) and how they end. This module also has the parts that all strategies share:
the number of open rollouts and the exit codes of processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from agentlightning.errors import (
    AgentLightningError,
    ConflictError,
    NotFoundError,
    StoreUnreachableError,
    UnauthorizedError,
)
from agentlightning.exit_codes import ExitCode
from agentlightning.store.base import QUEUING, RUNNING, LightningStore

_OPEN = sorted(QUEUING | RUNNING)

if TYPE_CHECKING:
    from agentlightning.execution.events import ExecutionEvent


class AlgorithmBundle(Protocol):
    """The algorithm's part of a run. Its return value is the result of the run.

    Optional members: `scope(store) -> store`, the view of the store that holds only this run's rollouts; `run_id`;
    `llm_proxy`, the gateway of the run; `store_unreachable_timeout`, as in `RunnerBundle`; and `interrupted`, which is
    set to True when Ctrl+C ended the run.
    """

    async def __call__(self, store: LightningStore, event: ExecutionEvent) -> Any:
        """Run the algorithm on `store`; `event` is set when it should stop."""


class RunnerBundle(Protocol):
    """A runner's part of a run; called once per worker.

    Optional members: `run_id`; `max_rollouts`, the number of rollouts after which each runner ends;
    `store_unreachable_timeout`, the seconds that the store may be unreachable; and `wants_main_thread`, True if the
    bundle makes calls on the main thread, so that its event loop must run on another one.
    """

    async def __call__(self, store: LightningStore, worker_id: int, event: ExecutionEvent) -> Any:
        """Run rollouts as worker `worker_id` until `event` is set or the runner has run its `max_rollouts`."""


class ExecutionStrategy:
    """Runs one algorithm bundle and several runner bundles on one store until the algorithm ends.

    An instance may execute several times, one after another. If it has an attribute `n_runners`, that is the number of
    runners; otherwise the Trainer decides. A strategy that delegates to others returns what their `execute` returns.
    """

    interrupted: bool = False
    """True when the last `execute` was ended by Ctrl+C. `execute` itself then cleans up and returns."""
    runners_share_process: bool | None = None
    """True if several runners live in this process, so that each needs its own runner object; False if each has its own
    process. None if the strategy does not declare it: the strategy gets objects for both cases."""

    def execute(self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore) -> Any:
        """Run both bundles until the algorithm ends, and return its result (None if it was interrupted).

        Raises the algorithm's exception; `RunnerDiedError` if a runner failed permanently; `StrandedWorkError` if
        rollouts are open and no runner remains.
        """
        raise NotImplementedError(f"{type(self).__name__} must define execute(algorithm, runner, store)")

    def note_interrupt(self, algorithm: AlgorithmBundle) -> None:
        """Record that Ctrl+C ended the run; also in the bundle, for a strategy that delegates to this one."""
        self.interrupted = True
        if hasattr(algorithm, "interrupted"):
            cast("Any", algorithm).interrupted = True


class StrandedWorkError(AgentLightningError, RuntimeError):
    """Every runner has ended while rollouts are open, so nothing would ever run them."""


class StalledError(AgentLightningError, RuntimeError):
    """The run made no progress for `stall_timeout` seconds; the message lists what each part waits for."""


class AlgorithmDiedError(AgentLightningError, RuntimeError):
    """The process that ran the algorithm ended unexpectedly; the message has its traceback if it left one."""


@dataclass(frozen=True)
class OpenWork:
    """The open rollouts of one run."""

    view: LightningStore
    """The run's view of the store."""
    run_id: str | None = None
    max_rollouts: int | None = None
    """Number of rollouts after which each runner ends; further rollouts are not run. None: no limit."""

    @classmethod
    def of(cls, algorithm: AlgorithmBundle, store: LightningStore, runner: RunnerBundle | None = None) -> OpenWork:
        """Return the open work of a run."""
        scope: Callable[[LightningStore], LightningStore] | None = getattr(algorithm, "scope", None)
        view, limit = store if scope is None else scope(store), getattr(runner, "max_rollouts", None)
        return cls(view, getattr(algorithm, "run_id", None), limit)

    async def count(self) -> int:
        """Return the number of open rollouts."""
        try:
            return (await self.view.query_rollouts(status_in=_OPEN, limit=1)).total
        except NotImplementedError:  # a user's store without this query
            return 0

    async def cancel(self) -> None:
        """Cancel all open rollouts."""
        for rollout in await self.view.query_rollouts(status_in=_OPEN):
            with contextlib.suppress(ConflictError, NotFoundError):  # ended or deleted in the meantime
                await self.view.update_rollout(rollout.rollout_id, status="cancelled")


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that ends because of `error`: 0 for a `SystemExit` without a code."""
    match error:
        case SystemExit(code=None):
            return ExitCode.DONE
        case SystemExit(code=int(code)):
            return code
        case KeyboardInterrupt():
            return ExitCode.INTERRUPTED
        case UnauthorizedError():
            return ExitCode.UNAUTHORIZED
        case StoreUnreachableError():
            return ExitCode.STORE_UNREACHABLE
        case _:
            return ExitCode.FAILED


def error_with(code: int | None) -> type[UnauthorizedError | StoreUnreachableError] | None:
    """Return the error class of this exit code, or None."""
    return {
        ExitCode.UNAUTHORIZED.value: UnauthorizedError,
        ExitCode.STORE_UNREACHABLE.value: StoreUnreachableError,
    }.get(code or 0)
