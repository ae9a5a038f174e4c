"""What a strategy runs and what it promises: the two bundles, `ExecutionStrategy`, and how a run may fail.

A bundle is one coroutine function that holds everything its side needs but the store. A strategy decides where the
bundles run (threads, processes, machines) and how they end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from agentlightning.errors import AgentLightningError

if TYPE_CHECKING:
    from agentlightning.execution.events import ExecutionEvent
    from agentlightning.store.base import LightningStore


class AlgorithmBundle(Protocol):
    """The algorithm's side. What it returns is the result of the run.

    It may also offer `scope(store) -> store`: the view of the store that holds only this run's rollouts; `run_id`; and
    `llm_proxy`, the gateway of the run.
    """

    async def __call__(self, store: LightningStore, event: ExecutionEvent) -> Any:
        """Run the algorithm on `store`; `event` is set when it should stop."""


class RunnerBundle(Protocol):
    """One runner's side; called once per worker.

    It may also offer `run_id`, and `store_unreachable_timeout`: how long the store may be away, in seconds.
    """

    async def __call__(self, store: LightningStore, worker_id: int, event: ExecutionEvent) -> Any:
        """Serve rollouts as worker `worker_id` until `event` is set or there is nothing left to do."""


class ExecutionStrategy:
    """Runs one algorithm bundle and some runner bundles around one store, to an end.

    An instance may execute several times, one after another. One that has an attribute `n_runners` decides how many
    runners there are; else the Trainer does.
    """

    interrupted: bool = False
    """True when the last `execute` was ended by Ctrl+C. `execute` itself then cleans up and returns."""
    runners_share_process: bool = False
    """True if several runners live in this process, so that each needs a runner object of its own."""

    def execute(self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore) -> Any:
        """Run both sides until the algorithm ends, and return what it returned (None if it was interrupted).

        Raises what the algorithm raised; `RunnerDiedError` when a runner failed for good; `StrandedWorkError` when
        rollouts are open and no runner is left.
        """
        raise NotImplementedError(f"{type(self).__name__} must define execute(algorithm, runner, store)")


class StrandedWorkError(AgentLightningError, RuntimeError):
    """Every runner has ended, rollouts are still open, and nobody would ever run them."""


class StalledError(AgentLightningError, RuntimeError):
    """Nothing has moved for `stall_timeout`; says what each part waits for."""


class AlgorithmDiedError(AgentLightningError, RuntimeError):
    """The process that ran the algorithm ended in an unexpected way; holds its traceback if it left one."""
