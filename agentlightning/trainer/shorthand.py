"""Other ways to train: `configure` sets the algorithm, `train` takes all arguments, `fit_v0` serves v0.1."""

from __future__ import annotations

import asyncio
import copy
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from agentlightning.algorithm.base import Algorithm
from agentlightning.litagent.decorator import as_agent
from agentlightning.litagent.litagent import LitAgent
from agentlightning.trainer.arguments import check_algorithm_uses
from agentlightning.trainer.init_utils import ComponentSpec
from agentlightning.trainer.parts import TrainerParts, check_settings_are_used
from agentlightning.trainer.registry import short_name
from agentlightning.types import Dataset, PromptTemplate

if TYPE_CHECKING:
    from agentlightning.legacy import AgentLightningClient

logger = logging.getLogger(__name__)

_EPOCHS: Final = {
    "apo": "beam_rounds",
    "baseline": "n_epochs",
    "grpo": "max_steps",
    "ppo": "max_steps",
    "sft": "max_steps",
}
"""Name of the setting for the number of passes, by algorithm."""
_LEARNING_RATE: Final = {"grpo": "learning_rate", "ppo": "learning_rate", "sft": "learning_rate"}
_NO_WEIGHTS: Final = ("apo", "baseline", "gepa")
"""Algorithms that change no weights and so have no learning rate."""


class TrainerShorthand(TrainerParts):
    """`configure` and `train` of a Trainer."""

    def configure(
        self,
        algorithm: ComponentSpec[Algorithm],
        *,
        lr: float | None = None,
        epochs: int | None = None,
        **settings: Any,
    ) -> None:
        """Set the algorithm of an existing Trainer, with settings of the algorithm's constructor.

        `lr` is the learning rate; it is ignored with a warning if the algorithm changes no weights. `epochs` is the
        number of rounds of APO, passes of Baseline, or steps of GRPO, PPO and SFT.

        Raises:
            TypeError: the algorithm is an instance, or does not have a setting.
            ValueError: a value is out of range, or a setting of the Trainer has no effect with the algorithm.
        """
        name = short_name(algorithm) or ""
        if epochs is not None:
            settings[_EPOCHS.get(name, "epochs")] = epochs
        if lr is not None and name in _NO_WEIGHTS:
            logger.warning("configure(lr=%s) has no effect: %s does not train weights", lr, name.upper())
        elif lr is not None:
            settings[_LEARNING_RATE.get(name, "lr")] = lr
        spec: Any = algorithm
        if settings and isinstance(algorithm, dict):
            spec = {**algorithm, **settings}
        elif settings and isinstance(algorithm, str | type):
            spec = {"type": algorithm, **settings}
        elif settings:
            raise TypeError(
                f"configure({', '.join(settings)}) would have no effect on the existing {algorithm!r}: pass them to "
                "its constructor, or name the algorithm: configure(algorithm='apo', ...)"
            )
        trainer: Any = self
        made = self._make_algorithm(spec)
        part_settings = {"adapter": trainer._adapter_spec, "initial_resources": self.initial_resources or None}
        check_algorithm_uses(made, part_settings, trainer.rollout_config, trainer.progress)
        trainer.algorithm = made

    def train(
        self,
        runner: LitAgent[Any] | Callable[..., object] | object = None,
        dataset: Dataset[Any] | Iterable[object] | None = None,
        *,
        val_dataset: Dataset[Any] | Iterable[object] | None = None,
        reward_fn: Callable[..., Any] | None = None,
        max_iterations: int | None = None,
    ) -> Any:
        """Call `fit` and return its result; inside a running event loop, return an awaitable of it.

        `runner` is the agent, as in `fit`. `reward_fn` replaces that of the constructor. `max_iterations` is the
        largest number of new versions of APO, steps of GRPO, PPO, SFT, TRL and VERL, or passes of Baseline; other
        algorithms ignore it with a warning. A Trainer with a prompt template and without an algorithm uses APO. A
        search over prompts without `val_dataset` selects by the training tasks, with a warning. As with `fit`, a
        running event loop is blocked until the training ends.

        Raises:
            TypeError, ValueError: as `fit` and the constructor; the agent is missing; `max_iterations` is less than 1.
        """
        if runner is None:
            raise TypeError("train() needs an agent: train(runner=agent, dataset=tasks), or call fit(agent, tasks)")
        twin: Any = copy.copy(self)
        if twin.algorithm is None:
            _check_has_template(twin.initial_resources)
            twin.algorithm = self._make_algorithm("apo")
        if max_iterations is not None:
            algorithm: Any = twin.algorithm
            twin.algorithm = _with_iterations(algorithm, max_iterations)
        if reward_fn is not None:
            from agentlightning.runner.results import check_reward_fn

            twin.reward_fn = check_reward_fn(reward_fn)
            twin.runner = twin._make_runner(twin._runner_spec)
            check_settings_are_used(twin.runner, twin._runner_spec, twin._runner_settings(), None)
        from agentlightning.algorithm.prompt_algorithm import PromptSearch

        if val_dataset is None and isinstance(twin.algorithm, PromptSearch):
            logger.warning("No val_dataset: the prompts are selected by their scores on the training tasks")
            val_dataset = dataset

        def fitted() -> Any:
            trainer: Any = self
            try:
                twin.fit(runner, dataset, val_dataset=val_dataset)
            finally:
                trainer.result = twin.result
            return twin.result

        async def fitted_later() -> Any:
            return fitted()

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return fitted()
        return fitted_later()


def _with_iterations(algorithm: Algorithm, count: int) -> Algorithm:
    """Return a copy of the algorithm with this number of iterations; itself, with a warning, if it has no such setting.

    Raises:
        ValueError: the number is less than 1.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"max_iterations must be a whole number of 1 or more; got {count!r}")
    limited = algorithm.with_iterations(count)
    if limited is None:
        logger.warning("max_iterations=%d has no effect: %s has no such setting", count, type(algorithm).__name__)
    return limited or algorithm


def _check_has_template(resources: Mapping[str, Any] | None) -> None:
    if not any(isinstance(each, PromptTemplate) for each in (resources or {}).values()):
        raise ValueError(
            "The Trainer has no algorithm. Set one with Trainer(algorithm='grpo', ...) or trainer.configure(...). "
            "To search for prompts without one, put an agl.PromptTemplate into initial_resources"
        )


class TrainerLegacy(TrainerParts):
    """The deprecated methods of the v0.1 trainer."""

    n_runners: int
    max_rollouts: int | None
    algorithm: Any
    adapter: Any

    def fit_v0(
        self, agent: LitAgent[Any] | Callable[..., object], train_data: str | AgentLightningClient, **others: object
    ) -> None:
        """Deprecated: run an agent on the tasks of a v0.1 server, until each of `n_runners` has run `max_rollouts`.

        `train_data` is the server's URL, or a client. With one runner, the agent runs in this process.

        Raises:
            TypeError, ValueError: `train_data` is not a v0.1 server; an algorithm is set; a setting has no effect.
            RunnerDiedError: a worker process ended unexpectedly.
        """
        from agentlightning.legacy import DevTaskLoader
        from agentlightning.legacy.workers import serve, serve_in_processes

        warnings.warn("fit_v0 uses the deprecated v0.1 protocol; use fit()", DeprecationWarning, stacklevel=2)
        if others:
            raise TypeError(
                f"fit_v0: {', '.join(others)} would have no effect: the tasks come from the server. To try an agent on "
                "a dataset, call dev(agent, train_dataset=...)"
            )
        if self.algorithm is not None:
            raise ValueError("fit_v0 uses no algorithm: the server trains. To use one, call fit(agent, ...)")
        client = self._client_of(train_data)
        if isinstance(client, DevTaskLoader) and self.n_runners > 1:
            raise ValueError(
                "A DevTaskLoader keeps the results in its own process, so n_runners must be 1; "
                f"got {self.n_runners}. Set n_runners=1 or call dev(agent, tasks)"
            )
        parts: tuple[Any, ...] = (as_agent(agent), client, self.tracer, self.adapter, self.max_rollouts)
        parts[0].set_trainer(self)
        if self.n_runners == 1:
            serve(*parts)
        else:
            serve_in_processes(self.n_runners, *parts)

    @staticmethod
    def kill_orphaned_processes() -> int:
        """End the worker processes that `fit_v0` left running in this process, and return their number."""
        from agentlightning.legacy.workers import kill_recorded

        return kill_recorded()

    def _client_of(self, train_data: object) -> AgentLightningClient:
        from agentlightning.legacy import AgentLightningClient

        if isinstance(train_data, AgentLightningClient):
            return train_data
        if not isinstance(train_data, str):
            raise TypeError(
                f"train_data of fit_v0 must be the URL of a v0.1 server or a client of it; got "
                f"{type(train_data).__name__}. To use a dataset, call fit(agent, train_dataset=...)"
            )
        if not train_data.startswith(("http://", "https://")):
            raise ValueError(
                f"train_data of fit_v0 must be an http address such as http://host:8000; got {train_data!r}"
            )
        return AgentLightningClient(train_data)
