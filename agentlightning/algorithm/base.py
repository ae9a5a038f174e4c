"""`Algorithm`, the base class of all algorithms: the components that the Trainer sets, and the methods to define."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self

from typing_extensions import TypeVar

from agentlightning.adapter.base import TraceAdapter
from agentlightning.litagent.litagent import AgentTrainer
from agentlightning.store.base import LightningStore
from agentlightning.training.records import PendingWrite, RunLog
from agentlightning.types import Dataset, NamedResources, RolloutConfig

if TYPE_CHECKING:
    from agentlightning.llm_proxy import LLMProxy  # imports a web stack

ResultT = TypeVar("ResultT", covariant=True, default=Any)
"""The value that an algorithm returns, which becomes `trainer.result`."""
_BY_METHOD = {
    "store": "call get_store()",
    "adapter": "call get_adapter()",
    "trainer": "call get_trainer()",
    "tracer": "call get_trainer().tracer",
    "initial_resources": "call get_initial_resources()",
    "llm_proxy": "no gateway is set: pass llm_proxy= to the Trainer (get_llm_proxy() returns None without a gateway)",
    "_batch": "only a FastAlgorithm has it; use agentlightning.algorithm.utils.batch_iter_over_dataset",
}
"""Attributes that programs expect on an algorithm, and their replacements."""
_MOST_ITEMS = 100
"""Maximum number of items of a list that is recorded among the settings of an algorithm."""


class AlgorithmTrainer(AgentTrainer, Protocol):
    """The part of a `Trainer` that an algorithm uses."""

    @property
    def adapter(self) -> TraceAdapter[Any]: ...

    @property
    def llm_proxy(self) -> LLMProxy | None: ...

    @property
    def n_runners(self) -> int: ...


class Algorithm(Generic[ResultT]):
    """Learns from rollouts and returns a `ResultT`. The Trainer sets the components in this order, then calls `run`.

    The state has class-level defaults, so a subclass does not need to call `super().__init__`. References are strong: a
    component exists as long as the algorithm.
    """

    _trainer: AlgorithmTrainer | None = None
    _store: LightningStore | None = None
    _adapter: TraceAdapter[Any] | None = None
    _initial_resources: NamedResources | None = None
    _llm_proxy: LLMProxy | None = None
    _rollout_config: RolloutConfig | None = None
    _run_log: RunLog | None = None

    resumable: bool = True
    """True if a restarted run may reuse its earlier rollouts, because it makes the same requests in the same order with
    the same resources. False for an algorithm that loses its state when the process ends."""

    @property
    def shows_progress(self) -> bool:
        """True if the algorithm displays its own progress on the terminal, so that the Trainer does not."""
        return False

    def run(
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> ResultT | Awaitable[ResultT]:
        """Learn from rollouts. The returned value becomes `trainer.result`. May be a coroutine function."""
        raise NotImplementedError(f"{type(self).__name__} must define run(train_dataset, val_dataset)")

    def with_iterations(self, max_iterations: int) -> Self | None:
        """Return a copy that runs this many iterations, as the algorithm counts them; None if it has no iterations."""
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> ResultT | Awaitable[ResultT]:
        """Call `run`."""
        return self.run(*args, **kwargs)

    def is_async(self) -> bool:
        """True if `run` is a coroutine function."""
        return inspect.iscoroutinefunction(self.run)

    # --- parts -------------------------------------------------------------------------------------------------------

    def set_trainer(self, trainer: AlgorithmTrainer) -> None:
        """Set the Trainer."""
        self._trainer = trainer

    def get_trainer(self) -> AlgorithmTrainer:
        """Return the Trainer.

        Raises:
            ValueError: it is not set.
        """
        if self._trainer is None:
            raise ValueError("Trainer has not been set for this algorithm. Run it through Trainer.fit.")
        return self._trainer

    def set_store(self, store: LightningStore) -> None:
        """Set the store, as wrapped by the strategy."""
        self._store = store

    def get_store(self) -> LightningStore:
        """Return the store.

        Raises:
            ValueError: it is not set.
        """
        if self._store is None:
            raise ValueError(
                "Store has not been set for this algorithm. Run it through Trainer.fit, or call set_store."
            )
        return self._store

    def set_adapter(self, adapter: TraceAdapter[Any]) -> None:
        """Set the adapter."""
        self._adapter = adapter

    def get_adapter(self) -> TraceAdapter[Any]:
        """Return the adapter.

        Raises:
            ValueError: it is not set.
        """
        if self._adapter is None:
            raise ValueError("Adapter has not been set for this algorithm.")
        return self._adapter

    def set_initial_resources(self, resources: NamedResources) -> None:
        """Set the initial resources."""
        self._initial_resources = resources

    def get_initial_resources(self) -> NamedResources | None:
        """Return the initial resources, or None."""
        return self._initial_resources

    def set_llm_proxy(self, llm_proxy: LLMProxy | None) -> None:
        """Set the gateway."""
        self._llm_proxy = llm_proxy

    def get_llm_proxy(self) -> LLMProxy | None:
        """Return the gateway, or None."""
        return self._llm_proxy

    @property
    def llm_proxy(self) -> LLMProxy:
        """The gateway, the same as `get_llm_proxy`; the setter is `set_llm_proxy`.

        Raises:
            AttributeError: it is not set.
        """
        if self._llm_proxy is None:
            raise AttributeError  # Python then calls __getattr__, which has the text
        return self._llm_proxy

    @llm_proxy.setter
    def llm_proxy(self, llm_proxy: LLMProxy | None) -> None:
        self._llm_proxy = llm_proxy

    def set_rollout_config(self, config: RolloutConfig | None) -> None:
        """Set the Trainer's settings of attempts, time limits and retries."""
        self._rollout_config = config

    def get_rollout_config(self) -> RolloutConfig | None:
        """Return the Trainer's settings of attempts, time limits and retries, or None.

        The store of an algorithm adds them to every rollout. Only an algorithm with its own limits needs this method,
        see `training.tasks.with_timeout`.
        """
        return self._rollout_config

    def set_run_log(self, run_log: RunLog) -> None:
        """Set the records of the run."""
        self._run_log = run_log

    def get_run_log(self) -> RunLog:
        """Return the log that writes the records of the run; it discards them if no Trainer runs the algorithm."""
        return RunLog(None) if self._run_log is None else self._run_log

    def log_metrics(self, step: int, **figures: object) -> PendingWrite[int]:
        """Record `figures`, the metrics of a training step, such as `log_metrics(1, mean_reward=0.5)`.

        They are recorded in the store; `agl runs show` and the dashboard display them. May be awaited, see `RunLog`.
        Metrics of a step that is already recorded do not change.
        """
        return self.get_run_log().step(step, figures)

    # --- settings ----------------------------------------------------------------------------------------------------

    def unused_parts(self) -> frozenset[str]:
        """Return which of the Trainer's `adapter` and `initial_resources` this algorithm does not use."""
        return frozenset()

    def recorded_settings(self) -> dict[str, object]:
        """Return the settings to record with a run: the public attributes that are short JSON values."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_") and _is_setting(value)}

    def check_rollout_config(self, config: RolloutConfig) -> None:
        """Check that the Trainer's limits do not contradict settings of this algorithm.

        Raises:
            ValueError: they contradict each other. The message names both.
        """

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            if name in _BY_METHOD:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}: {_BY_METHOD[name]}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def get_client(self) -> object:
        """Deprecated: belongs to the v0.1 protocol."""
        raise NotImplementedError(f"{type(self).__name__} has no v0.1 client; use get_store()")


def _is_setting(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) <= _MOST_ITEMS and all(map(_is_setting, value))  # pyright: ignore[reportUnknownArgumentType] -- of the user's
    if isinstance(value, dict):
        return _is_setting(list(value)) and _is_setting(list(value.values()))  # pyright: ignore[reportUnknownArgumentType] -- of the user's
    return value is None or isinstance(value, (bool, int, float)) or (isinstance(value, str) and len(value) <= 1000)
