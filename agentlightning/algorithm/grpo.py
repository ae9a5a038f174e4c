"""GRPO: sample rollouts in groups, compare each with its group, update the weights and serve them.

The run is `training/run.py`; the formulas are in `training/losses/`: `advantages.py` (group-relative advantage,
DeepSeekMath, arXiv:2402.03300) and `objective.py` (clipped objective).
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from typing_extensions import override

import agentlightning.engine.torch_setup  # noqa: F401 -- before what imports torch # pyright: ignore[reportUnusedImport]
from agentlightning.algorithm.base import Algorithm
from agentlightning.engine.torch_setup import deterministic_torch
from agentlightning.errors import BadRequestError
from agentlightning.training.group_rewards import GroupReward, check_group_reward, name_of_group_reward
from agentlightning.training.learner.memory import check_memory
from agentlightning.training.policies import PolicyUpdater
from agentlightning.training.result import GRPOResult
from agentlightning.training.resume import OpenRun
from agentlightning.training.run import train
from agentlightning.training.run_inputs import (
    check_device,
    check_model,
    check_one_time_limit,
    check_tasks,
    triplet_adapter,
)
from agentlightning.training.settings import GRPOSettings, Pick, TrainingSettings, accepts, make_settings, signature_of
from agentlightning.training.tasks import items_of
from agentlightning.types import Dataset, RolloutConfig

__all__ = ["GRPO", "GRPOResult", "GRPOSettings"]


@dataclass(frozen=True, kw_only=True)
class GRPOArguments(GRPOSettings):
    """Train the weights of a transformers model on rewards. `GRPOSettings` describes each setting."""

    model: str | Path | None = field(default=None, kw_only=False)  # pyright: ignore[reportIncompatibleVariableOverride] -- a path becomes a text
    group_reward: GroupReward | None = None


class GRPO(Algorithm[GRPOResult]):
    """Train the weights of a transformers model on the rewards of an agent's rollouts.

    `GRPO(model="path", max_steps=20, batch_size=16, num_generations=8, ...)`; `GRPOSettings` has every setting with its
    meaning and default. Runs on a CPU for small models; on a GPU with `device="cuda"`.

    Args:
        model: folder of the model; with `policies`, for the policies without their own model.
        group_reward: computes the rewards of all rollouts of a task together and replaces their own rewards: an
            `agl.RankingReward`, or a function `(task, answers) -> rewards`, where an answer has the messages of the
            agent from its first reply on. Rollouts whose judge fails have no reward and are not trained.

    Raises:
        TypeError: a setting is unknown (the message names the nearest one), or `group_reward` is neither of these.
        BadRequestError: a value is out of range.
    """

    pick: Pick | None = None
    """The function with which a subclass selects rollouts; see `agl.SFT`."""

    @accepts(GRPOArguments)
    def __init__(
        self, model: str | Path | None = None, *, group_reward: GroupReward | None = None, **settings: Any
    ) -> None:
        self.settings: TrainingSettings = make_settings(GRPOSettings, model, settings)
        self.group_reward = check_group_reward(
            group_reward, self.settings.num_generations, solve_rates=self.settings.draws_by_solve_rate
        )

    @property
    @override
    def shows_progress(self) -> bool:
        return self.settings.progress != "none"

    @override
    def with_iterations(self, max_iterations: int) -> Self:
        """Return a copy that runs this many steps."""
        twin = copy.copy(self)
        twin.settings = dataclasses.replace(self.settings, max_steps=max_iterations)
        return twin

    @override
    def recorded_settings(self) -> dict[str, object]:
        judged = {} if self.group_reward is None else {"group_reward": name_of_group_reward(self.group_reward)}
        return {**self.settings.as_json(), **judged}

    @override
    def check_rollout_config(self, config: RolloutConfig) -> None:
        check_one_time_limit(type(self).__name__, self.settings.rollout_timeout_seconds, config)

    async def run(
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> GRPOResult:
        """Train on `train_dataset`. If given, evaluate on `val_dataset` before, during and after training.

        Raises:
            BadRequestError: there are no tasks, the model does not exist, the adapter returns no triplets, the device
                or the output folder cannot be used, or a setting is incompatible with the model or the tasks.
            OutOfMemoryError: the run, or a single row of a step, does not fit into the memory.
            NonFiniteLossError: the loss was not finite in three steps in a row.
            NoTrainableCallError: no rollout with a reward in the first step has a trainable model call.
            TooMuchDriftError: more turns drifted than `max_drift` allows.
            NoScoredRolloutError: no rollout of the run was usable for training.
        """
        settings, name = self.settings, type(self).__name__
        tasks, held_out = items_of(train_dataset), items_of(val_dataset)
        check_tasks(name, settings, tasks, held_out)
        by_policy = settings.by_policy()
        policies = list(by_policy.values())
        for policy in policies:
            check_model(policy.model)
        check_device(settings.device)
        policy_of_adapter = getattr(triplet_adapter(self), "policy", None)
        names = [policy for policy in by_policy if policy is not None]
        if names and policy_of_adapter is not None:
            raise BadRequestError(
                f"GRPO trains {', '.join(names)}, but the adapter selects policy={policy_of_adapter!r}. Remove policy= "
                "from the adapter"
            )

        async def make_updater(opened: OpenRun, stack: AsyncExitStack) -> PolicyUpdater:
            stack.enter_context(deterministic_torch(settings.device) if settings.deterministic else nullcontext())
            await asyncio.to_thread(check_memory, *policies)
            folder, checkpoint = opened.folder.path, opened.resume.checkpoint
            return await PolicyUpdater.open(settings, self.get_store(), folder, checkpoint, stack)

        return await train(
            self,
            settings,
            tasks,
            held_out,
            make_updater,
            config={name.lower(): settings.as_json()},
            group_reward=self.group_reward,
            pick=self.pick,
        )


GRPO.__signature__ = signature_of(GRPOSettings)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
