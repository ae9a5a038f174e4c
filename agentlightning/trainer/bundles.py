"""The two bundles of a fit: everything that a side needs except the store, in one picklable object.

Also the settings of a Trainer that are recorded with each run (without keys and resources).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from agentlightning.adapter.base import TraceAdapter
from agentlightning.algorithm.base import Algorithm, AlgorithmTrainer
from agentlightning.algorithm.decorator import FunctionalAlgorithm
from agentlightning.errors import NotFoundError
from agentlightning.execution.events import ExecutionEvent
from agentlightning.execution.run_state import end_run
from agentlightning.execution.supervisor import until_set
from agentlightning.litagent.litagent import LitAgent
from agentlightning.runner.base import RunContext, Runner
from agentlightning.store.base import LightningStore
from agentlightning.store.rules.values import to_json
from agentlightning.store.spec import public_form
from agentlightning.store.wrappers import LightningStoreScoped, complete
from agentlightning.trackers.feed import RunTracking
from agentlightning.trackers.tracker import Tracker
from agentlightning.trainer.follow import RunReport, followed
from agentlightning.trainer.parts import place_of
from agentlightning.trainer.resume import LightningStoreOfRun, past_of
from agentlightning.training.progress import Style
from agentlightning.training.records import RunLog
from agentlightning.training.run_folder import versions
from agentlightning.types import Dataset, Hook, NamedResources, RolloutConfig
from agentlightning.utils.backoff import OUTAGE_SECONDS
from agentlightning.utils.concurrency.loop_thread import call_in_thread
from agentlightning.utils.masking import masked

if TYPE_CHECKING:
    from agentlightning.llm_proxy import LLMProxy

EVENT_POLL_SECONDS = 0.1


def scoped(store: LightningStore, run_id: str | None) -> LightningStore:
    """Return the view of the store for a run, with all operations; without a run, the store itself."""
    return complete(store) if run_id is None else LightningStoreScoped(store, run_id)


@dataclass
class AlgorithmSide:
    """The algorithm with its parts. A call binds the parts, runs the algorithm and returns its result."""

    algorithm: Algorithm | None
    trainer: AlgorithmTrainer | None
    adapter: TraceAdapter[Any]
    initial_resources: NamedResources | None
    llm_proxy: LLMProxy | None
    train_dataset: Dataset[Any] | None
    val_dataset: Dataset[Any] | None
    run_id: str | None
    rollout_config: RolloutConfig | None = None
    report: RunReport | None = None
    """Report on the run's progress; None shows none."""
    progress: Style = "none"
    seen: set[str] | None = None
    """Ids of the rollouts that this program has enqueued, for a named run, which may be resumed."""
    config: Mapping[str, object] = field(default_factory=dict[str, object])
    """Settings of the Trainer, recorded with the run."""
    trackers: Sequence[Tracker] = ()
    """Trackers that receive the run's records."""
    store_unreachable_timeout: float = OUTAGE_SECONDS
    """Seconds that the algorithm and the gateway tolerate an unreachable store; the same as for the runner."""
    result: Any = field(default=None, init=False)
    """The algorithm's return value, if it ran in this process."""
    interrupted: bool = field(default=False, init=False)
    """True if Ctrl+C ended the run; set by the strategy, or by a strategy that it delegates to."""
    _opened: bool = field(default=False, init=False)
    """True once a strategy has opened the run; the strategy then also records the run's end."""
    _opened_at: float | None = field(default=None, init=False)
    """Time at which the run was opened, by the store's clock, in Unix seconds."""

    def __getstate__(self) -> dict[str, object]:
        """Exclude the trainer: it belongs to the process that called `fit`."""
        return {**self.__dict__, "trainer": None}

    def scope(self, store: LightningStore) -> LightningStore:
        """Return the view of the store that holds only this run."""
        return scoped(store, self.run_id)

    async def open_run(self, store: LightningStore) -> None:
        """Begin the run in the store, or resume it.

        Raises:
            NotImplementedError: the store does not support runs.
        """
        self._opened = True
        name, config = self._recorded()
        run_id = self.run_id or ""
        run = await complete(store).start_run(run_id, algorithm=name, config=config, versions=versions())
        self._opened_at = getattr(run, "last_heartbeat_time", None)  # a user's store may return nothing

    def _recorded(self) -> tuple[str | None, dict[str, Any]]:
        """Return the name of the algorithm and all settings, without secrets."""
        sections: dict[str, object] = {"trainer": dict(self.config)}
        name = None
        if self.algorithm is not None:
            name = name_of(self.algorithm)
            sections["algorithm"] = self.algorithm.recorded_settings()
        return name, masked(to_json(sections, "config"))

    def __call__(self, store: LightningStore, event: ExecutionEvent) -> CoroutineType[Any, Any, Any]:
        """Run the algorithm; without one, wait for the event. A synchronous algorithm runs on its own thread."""
        return self._run(store, event) if self._opened else self._run_alone(store, event)

    async def _run_alone(self, store: LightningStore, event: ExecutionEvent) -> Any:
        """Open the run, run the algorithm and record its end; for a strategy that does not handle runs."""
        with contextlib.suppress(NotImplementedError):
            await self.open_run(store)
        try:
            result = await self._run(store, event)
        except BaseException as error:  # every end of the run is recorded
            was_cancelled = isinstance(error, (asyncio.CancelledError, KeyboardInterrupt))
            with contextlib.suppress(Exception):  # the first error counts
                await end_run(store, self.run_id, "interrupted" if was_cancelled else None, error)
            raise
        with contextlib.suppress(NotImplementedError, NotFoundError):
            await end_run(store, self.run_id, "succeeded")
        return result

    async def _run(self, store: LightningStore, event: ExecutionEvent) -> Any:
        if self.algorithm is None:
            await until_set(event, EVENT_POLL_SECONDS)
            return None
        algorithm, view = self.algorithm, self.scope(store)
        if self.seen is not None and self.run_id is not None:  # a named run may be resumed
            resumable, opened = algorithm.resumable, self._opened_at
            past = await past_of(view, self.run_id, self.seen, resumable=resumable, opened=opened)
            view = LightningStoreOfRun(store, self.run_id, self.rollout_config, past, self.seen)
        elif self.rollout_config is not None:
            view = LightningStoreOfRun(store, self.run_id, self.rollout_config)
        if self.trainer is not None:
            algorithm.set_trainer(self.trainer)
        algorithm.set_store(view)
        algorithm.set_adapter(self.adapter)
        algorithm.set_rollout_config(self.rollout_config)
        tracking = RunTracking(self.trackers, self.run_id, self._recorded)
        run_log = RunLog(complete(store), self.run_id, str(self.config.get("store", "")), tell=tracking.tell)
        algorithm.set_run_log(run_log)
        if self.initial_resources is not None:
            algorithm.set_initial_resources(self.initial_resources)
        if self.llm_proxy is not None:
            self.llm_proxy.store_unreachable_timeout = self.store_unreachable_timeout
            self.llm_proxy.set_store(view)
            algorithm.set_llm_proxy(self.llm_proxy)
        following = contextlib.nullcontext()
        if self.report is not None:
            following = followed(self.report, view, self.progress, live=not algorithm.shows_progress)
        datasets = {"train_dataset": self.train_dataset, "val_dataset": self.val_dataset}
        async with following, tracking.around(run_log), run_log.kept_alive():
            if algorithm.is_async():
                result = algorithm.run(**datasets)
            else:
                result = await call_in_thread(lambda: algorithm.run(**datasets), name="algorithm")
            self.result = await result if inspect.isawaitable(result) else result
            tracking.result = self.result
        return self.result


@dataclass
class RunnerSide:
    """The agent with the runner of each worker. A call serves rollouts as one worker."""

    agent: LitAgent[Any]
    runners: tuple[Runner[Any], ...]
    """One runner per worker if workers may share a process; otherwise one runner, which is copied to each process."""
    hooks: tuple[Hook, ...]
    run_id: str | None
    _serving: set[int] = field(default_factory=set[int], init=False, repr=False)
    """Indices of the runners that are in use in this process."""

    @property
    def store_unreachable_timeout(self) -> float:
        """Seconds that the runner tolerates an unreachable store."""
        return float(getattr(self.runners[0], "store_unreachable_timeout", OUTAGE_SECONDS))

    @property
    def max_rollouts(self) -> int | None:
        """Number of rollouts after which each runner ends; None: no limit."""
        return getattr(self.runners[0], "max_rollouts", None)

    @property
    def wants_main_thread(self) -> bool:
        """True if the agent should run on the main thread, and the runner's loop on another one."""
        wants: Callable[[LitAgent[Any]], bool] | None = getattr(self.runners[0], "wants_main_thread", None)
        return wants is not None and wants(self.agent)

    async def __call__(self, store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        """Serve rollouts until the event is set."""
        place = worker_id % len(self.runners)
        runner = self.runners[place]
        if place in self._serving:
            raise RuntimeError(
                f"Worker {worker_id} would share one {type(runner).__name__} with another worker: the strategy runs "
                f"more workers in this process than there are runners ({len(self.runners)}). Set "
                "Trainer(n_runners=...), or add runners_share_process = True and an attribute n_runners to your "
                "strategy"
            )
        self._serving.add(place)
        try:
            with RunContext(runner, self.agent, scoped(store, self.run_id), self.hooks, worker_id):
                await runner.iter(event=event)
        finally:
            self._serving.discard(place)


def name_of(algorithm: Algorithm) -> str:
    """Return the algorithm's name in a run: that of the function or class."""
    return algorithm.__name__ if isinstance(algorithm, FunctionalAlgorithm) else type(algorithm).__name__


def settings_of(
    trainer: Any, agent: LitAgent[Any], train: Dataset[Any] | None, val: Dataset[Any] | None
) -> dict[str, object]:
    """Return the settings of a `Trainer`, the classes of its parts, and the sizes of the data sets."""
    parts = {"adapter": trainer.adapter, "runner": trainer.runner}
    parts |= {"strategy": trainer.strategy, "tracer": trainer.tracer}
    agents_name = getattr(agent, "__name__", None)
    return {
        "agent": agents_name if isinstance(agents_name, str) else type(agent).__name__,
        "n_runners": trainer.n_runners,
        "max_rollouts": trainer.max_rollouts,
        "rollout_config": trainer.rollout_config,
        "reward_dimensions": list(trainer.reward_dimensions),
        "store": public_form(place_of(trainer.store)),
        **{name: type(part).__name__ for name, part in parts.items()},
        "train_tasks": None if train is None else len(train),
        "val_tasks": None if val is None else len(val),
    }
