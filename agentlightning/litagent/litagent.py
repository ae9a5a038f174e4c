"""LitAgent: the base class for agents."""

from __future__ import annotations

import contextlib
import inspect
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from agentlightning.base.field_help import explain_fields
from agentlightning.errors import AgentLightningError
from agentlightning.store.base import LightningStore
from agentlightning.tracer.base import Tracer
from agentlightning.types import NamedResources, Rollout, RolloutMode, RolloutRawResult

T = TypeVar("T")
_GENERAL = ("rollout_async", "rollout")
_TRAINING = ("training_rollout_async", "training_rollout", *_GENERAL)
_VALIDATION = ("validation_rollout_async", "validation_rollout", *_GENERAL)
_METHODS: dict[RolloutMode | None, tuple[str, ...]] = {
    "train": _TRAINING,
    "val": _VALIDATION,
    "test": _VALIDATION,
    None: (*_GENERAL, *_VALIDATION[:2], *_TRAINING[:2]),
}
"""The methods for each mode, from the most to the least specific; the asynchronous one of each pair comes first."""


class AgentTrainer(Protocol):
    """The part of the `Trainer` that an agent uses; the class itself is in a higher layer."""

    @property
    def tracer(self) -> Tracer: ...

    @property
    def store(self) -> LightningStore: ...


class AgentRunner(Protocol):
    """The part of the `Runner` that an agent uses; the class itself is in a higher layer."""

    @property
    def worker_id(self) -> int | None: ...

    async def step(
        self, input: Any, *, resources: NamedResources | None = None, mode: RolloutMode | None = None
    ) -> Rollout: ...


class AgentFault(AgentLightningError):
    """An exception that classifies its attempt by its `reason`; see `runner/outcome.py`."""

    reason: str = "exception"


class LitAgent(Generic[T]):
    """An agent that can be trained. Override `rollout` or `rollout_async`, or a method for each mode.

    A method gets the task, the resources by name and the attempt, and returns the attempt's reward: a number; None if
    it emitted rewards itself; or spans. Synchronous methods run on the main thread or on another thread.
    """

    needs_resources: bool = True
    """False allows attempts without published resources; they get an empty dictionary of resources."""
    _trainer_ref: weakref.ref[AgentTrainer] | None = None
    _runner_ref: weakref.ref[AgentRunner] | None = None

    def __init__(self, *, trained_agents: str | None = None) -> None:
        if trained_agents is not None:
            warnings.warn(
                "trained_agents is deprecated; set agent_match=... of the adapter instead",
                DeprecationWarning,
                stacklevel=2,
            )
        self.trained_agents = trained_agents

    def __getstate__(self) -> dict[str, Any]:
        """Exclude trainer and runner: they belong to this process."""
        return {**self.__dict__, "_trainer_ref": None, "_runner_ref": None}

    # --- methods to override ---------------------------------------------------------------------------------------

    def rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Run one task, in any mode without its own method."""
        raise NotImplementedError(f"{type(self).__name__} must override rollout or rollout_async")

    async def rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Run one task, as a coroutine."""
        raise NotImplementedError(f"{type(self).__name__} must override rollout or rollout_async")

    def training_rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Run one task in mode `train`."""
        return self.rollout(task, resources, rollout)

    def validation_rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Run one task in mode `val` or `test`."""
        return self.rollout(task, resources, rollout)

    async def training_rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Run one task in mode `train`."""
        return await self.rollout_async(task, resources, rollout)

    async def validation_rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Run one task in mode `val` or `test`."""
        return await self.rollout_async(task, resources, rollout)

    def is_async(self) -> bool:
        """True if an asynchronous method is overridden."""
        return any(_overridden(self, name) for name in (*_TRAINING, *_VALIDATION) if name.endswith("_async"))

    def method_for(self, mode: RolloutMode | None) -> Callable[..., Any]:
        """Return the method that runs a rollout of this mode: the most specific one that is overridden.

        Raises:
            NotImplementedError: no method for this mode is overridden.
        """
        for name in _METHODS[mode]:
            if _overridden(self, name):
                return getattr(self, name)
        raise NotImplementedError(
            f"{type(self).__name__} has no method for mode {mode!r}; override one of: {', '.join(_METHODS[mode])}"
        )

    def has_sync_method(self) -> bool:
        """Return whether a synchronous method runs the rollouts of any mode."""
        for mode in _METHODS:
            with contextlib.suppress(NotImplementedError):
                if not inspect.iscoroutinefunction(self.method_for(mode)):
                    return True
        return False

    # --- where it runs ---------------------------------------------------------------------------------------------

    def set_trainer(self, trainer: AgentTrainer) -> None:
        """Store a weak reference to the trainer."""
        self._trainer_ref = weakref.ref(trainer)

    def get_trainer(self) -> AgentTrainer:
        """Return the trainer.

        Raises:
            ValueError: it is not set, or has been deleted.
        """
        return _alive(self._trainer_ref, "Trainer")

    @property
    def trainer(self) -> AgentTrainer:
        """The trainer."""
        return self.get_trainer()

    def set_runner(self, runner: AgentRunner) -> None:
        """Store a weak reference to the runner."""
        self._runner_ref = weakref.ref(runner)

    def get_runner(self) -> AgentRunner:
        """Return the runner.

        Raises:
            ValueError: it is not set, or has been deleted.
        """
        return _alive(self._runner_ref, "Runner")

    @property
    def runner(self) -> AgentRunner:
        """The runner."""
        return self.get_runner()

    def get_tracer(self) -> Tracer:
        """Return the runner's tracer, else the trainer's."""
        runner = self._runner_ref() if self._runner_ref is not None else None
        tracer = getattr(runner, "tracer", None)
        return tracer if tracer is not None else self.get_trainer().tracer

    @property
    def tracer(self) -> Tracer:
        """The tracer."""
        return self.get_tracer()

    def on_rollout_start(self, task: Any, runner: Any, tracer: Any) -> None:
        """Deprecated; use a `Hook`. Called by the runner of v0.1 only."""

    def on_rollout_end(self, task: Any, rollout: Any, runner: Any, tracer: Any) -> None:
        """Deprecated; use a `Hook`. Called by the runner of v0.1 only."""


def is_v0_1_rollout_api(func: Callable[..., Any]) -> bool:
    """Return whether the function has a parameter `rollout_id`, as agents of v0.1 had."""
    return "rollout_id" in inspect.signature(func).parameters


def _overridden(agent: LitAgent[Any], name: str) -> bool:
    return getattr(type(agent), name) is not getattr(LitAgent, name) or name in agent.__dict__


R = TypeVar("R")


def _alive(reference: weakref.ref[R] | None, what: str) -> R:
    if reference is None:
        raise ValueError(f"{what} has not been set for this agent")
    value = reference()
    if value is None:
        raise ValueError(f"{what} reference is no longer valid (it was deleted)")
    return value


@explain_fields
@dataclass
class DataProto:
    """A result of an agent for `Trainer(reward_fn=...)` to score: fields by name, and the model's raw reply.

    An agent may return any other value as well. This class is unrelated to the tensor batches with the same name in
    some training frameworks.
    """

    data: dict[str, Any] = field(default_factory=dict[str, Any])
    """The result by field."""
    raw_response: str | None = None
    """The model's reply before it was parsed."""
