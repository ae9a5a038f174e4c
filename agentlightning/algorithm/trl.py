"""TRL: rollouts as in `agl.GRPO`, with TRL's `GRPOTrainer` as learner.

The loop, the records, the ledger and the folder of checkpoints are those of GRPO. TRL computes the advantages and the
loss, takes the optimizer steps and writes the checkpoints (`agentlightning.training.external.trl`).
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from typing_extensions import override

from agentlightning.algorithm.base import Algorithm
from agentlightning.training.external.trl.settings import TRLSettings, make_settings
from agentlightning.training.run_inputs import check_one_time_limit
from agentlightning.types import Dataset, RolloutConfig

if TYPE_CHECKING:
    from agentlightning.training.result import GRPOResult

__all__ = ["TRL"]


class TRL(Algorithm["GRPOResult"]):
    """Train the weights of a transformers model with TRL's `GRPOTrainer` on the rewards of an agent's rollouts.

    `TRL(model="path", max_steps=20, num_generations=8, per_device_train_batch_size=128, learning_rate=1e-5)`: every
    setting that is not in `OWN` of `training/external/trl/settings.py` is a field of `trl.GRPOConfig`, with TRL's
    default. A step collects `generation_batch_size` rollouts, `num_generations` for each task.

    Args:
        model: folder of the model.
        config: a `trl.GRPOConfig` instead of its fields.
        peft_config: a `peft.PeftConfig`, or a dict of arguments of `peft.LoraConfig`; None trains all weights.

    Raises:
        ImportError: trl is not installed, or its version is unsupported.
        TypeError: a setting is unknown. The message names the nearest valid one.
        BadRequestError: a value is out of range or not supported here.
    """

    def __init__(self, model: str | Path, *, config: Any = None, peft_config: Any = None, **settings: Any) -> None:
        self.settings: TRLSettings = make_settings(model, config, peft_config, settings)

    @property
    @override
    def shows_progress(self) -> bool:
        return self.settings.own.get("progress") != "none"

    @override
    def with_iterations(self, max_iterations: int) -> Self:
        """Return a copy that runs this many steps, each with its own rollouts."""
        twin, config = copy.copy(self), copy.copy(self.settings.config)
        config.max_steps = max_iterations * self.settings.updates
        twin.settings = dataclasses.replace(self.settings, config=config)
        return twin

    @override
    def recorded_settings(self) -> dict[str, object]:
        return self.settings.recorded()

    @override
    def check_rollout_config(self, config: RolloutConfig) -> None:
        check_one_time_limit("TRL", self.settings.own.get("rollout_timeout_seconds"), config)

    async def run(
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> GRPOResult:
        """Train on `train_dataset`. If given, evaluate on `val_dataset` before, during and after training.

        Raises:
            BadRequestError: there are no tasks, the model does not exist, the adapter returns no triplets, the output
                folder cannot be used, a setting is incompatible, or a rollout has more than one token row.
            NonFiniteLossError: the gradient was not finite in three steps in a row.
            NoTrainableCallError: no rollout with a reward in the first step has a trainable model call.
            NoScoredRolloutError: no rollout of the run was usable for training.
        """
        from agentlightning.training.external.trl.updater import run_trl

        return await run_trl(self, self.settings, train_dataset, val_dataset)
