"""VERL: rollouts as in `agl.GRPO`, with VERL's trainer and engines as learner and engine.

The loop, the records and the ledger are those of GRPO. VERL runs advantages, loss, optimizer steps, weight transfer and
checkpoints on its Ray workers (`agentlightning.training.external.verl`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from typing_extensions import override

from agentlightning.algorithm.base import Algorithm
from agentlightning.training.external.verl.settings import VERLSettings, make_settings
from agentlightning.training.run_inputs import check_one_time_limit
from agentlightning.types import Dataset, RolloutConfig

if TYPE_CHECKING:
    from agentlightning.training.result import GRPOResult

__all__ = ["VERL"]


class VERL(Algorithm["GRPOResult"]):
    """Train the weights of a transformers model with VERL on the rewards of an agent's rollouts.

    `VERL({"actor_rollout_ref": {"model": {"path": "..."}, "rollout": {"n": 8, "name": "vllm"}}, "data":
    {"train_batch_size": 32}, "trainer": {"n_gpus_per_node": 8, "total_epochs": 2}})`: settings of VERL's `ppo_trainer`
    configuration, nested or with dots in their names. The defaults are VERL's, except for those that a run requires.
    Settings under `agentlightning` are shared with `agl.GRPO`.

    Args:
        config: VERL's settings.
    Raises:
        ImportError: verl is not installed, or its version is unsupported.
        TypeError: `config` is not a dict.
        BadRequestError: a setting is out of range or not supported here. The message names it and the fix.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.settings: VERLSettings = make_settings(config)
        self.config: Any = self.settings.config
        """The full configuration, an `omegaconf.DictConfig`."""

    @property
    @override
    def shows_progress(self) -> bool:
        return self.settings.own.get("progress") != "none"

    @override
    def with_iterations(self, max_iterations: int) -> Self:
        """Return a copy that runs this many steps."""
        twin = copy.copy(self)
        twin.config = copy.deepcopy(self.config)
        twin.config.trainer.total_training_steps = max_iterations
        twin.settings = dataclasses.replace(self.settings, config=twin.config)
        return twin

    @override
    def recorded_settings(self) -> dict[str, object]:
        return self.settings.recorded()

    @override
    def check_rollout_config(self, config: RolloutConfig) -> None:
        check_one_time_limit("VERL", self.settings.own.get("rollout_timeout_seconds"), config)

    async def run(
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> GRPOResult:
        """Train on `train_dataset`. If given, evaluate on `val_dataset` before and after training, and every
        `trainer.test_freq` steps.

        Raises:
            BadRequestError: there are no tasks, the model does not exist, or a setting is incompatible.
            RuntimeError: VERL or Ray ended with an error, which the message includes.
            NoTrainableCallError: no rollout with a reward in the first step has a trainable model call.
            NoScoredRolloutError: no rollout of the run was usable for training.
        """
        from agentlightning.training.external.verl.updater import run_verl

        return await run_verl(self, self.settings, train_dataset, val_dataset)
