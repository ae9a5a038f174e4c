"""The settings of a PPO run: those of GRPO that apply without groups, under PPO's names, and those of the critic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

from typing_extensions import override

from agentlightning.base.field_help import explain_fields
from agentlightning.errors import BadRequestError
from agentlightning.training.loss_settings import Count, CriticSettings, NotNegative
from agentlightning.training.settings import GRPOSettings
from agentlightning.utils.setting_checks import Bounds, check_fields

_BY_ANOTHER_NAME: Final[Mapping[str, str]] = {
    "num_iterations": "num_ppo_epochs",
    "ppo_epochs": "num_ppo_epochs",
    "epsilon": "cliprange",
    "epsilon_high": "cliprange",
    "clip_ratio": "cliprange",
    "beta": "kl_coef",
    "total_episodes": "max_steps, which counts steps of batch_size * num_generations rollouts",
    "response_length": "max_completion_length",
    "num_mini_batches": "minibatch_rollouts, which counts rollouts",
    "critic_learning_rate": "value_learning_rate",
    "whiten_rewards": "whiten_advantages, which whitens advantages",
}
_SAME_IN_GRPO: Final[Mapping[str, str]] = {
    name: _BY_ANOTHER_NAME[name] for name in ("num_iterations", "epsilon", "epsilon_high", "beta")
}
_WITHOUT_MEANING: Final[Mapping[str, str]] = {
    "loss": "PPO has a fixed, clipped loss; use agl.GRPO for your own",
    **dict.fromkeys(
        (
            *("sapo_temperature_pos", "sapo_temperature_neg"),
            *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        ),
        "PPO has a fixed, clipped loss; use agl.GRPO with this loss_type",
    ),
    "loss_type": "PPO has a fixed, clipped loss; `aggregation` sets how it is averaged",
    "advantage": "PPO computes advantages with its critic",
    "scale_rewards": "PPO compares with a value, not with a group; use `whiten_advantages` to scale",
    "multi_objective_aggregation": "`reward_weights` combines several dimensions into one reward",
    "max_num_gen_batches": "PPO also learns from groups with equal rewards",
    **dict.fromkeys(
        ("turn_advantage_weight", "turn_group", "turn_gamma"),
        "PPO's critic assigns the reward of a rollout to its tokens; use agl.GRPO for the rewards of calls",
    ),
    "policies": "PPO trains one policy with one critic; use agl.GRPO for several policies",
    "max_staleness": "PPO collects synchronously; use agl.GRPO",
    "staleness_clip_max": "PPO collects synchronously; use agl.GRPO with max_staleness",
}


@explain_fields
@dataclass(frozen=True, kw_only=True)
class PPOSettings(CriticSettings, GRPOSettings):
    """Every setting of `PPO`, with its meaning and default.

    A setting that TRL 1.16's `PPOConfig` also has keeps its name; settings shared with GRPO are named as in
    `GRPOSettings`. VERL 0.9.1's name follows in brackets.
    """

    algorithm = "PPO"
    names_elsewhere = _BY_ANOTHER_NAME
    without_meaning = _WITHOUT_MEANING
    other_names = _SAME_IN_GRPO
    model_missing = (
        "PPO needs model, the folder of a transformers model: agl.PPO(model='path/to/model'), or "
        "Trainer(algorithm={'type': 'ppo', 'model': 'path/to/model'})"
    )

    num_generations: Count = 1
    """Rollouts per task and step; 1 is enough, because PPO compares no group. [`rollout.n`]"""
    num_ppo_epochs: Count = 4
    """Passes over the rows of a step. [`actor.ppo_epochs`]"""
    cliprange: Annotated[float, Bounds(above=0, below=1)] = 0.2
    """Clip range: the ratio of new to old probability counts up to this distance from 1. [`actor.clip_ratio`]"""
    kl_coef: NotNegative = 0.0
    """Weight of the KL divergence from the model as loaded: in the loss, or with `use_kl_in_reward` in the reward of
    each token. [`algorithm.kl_ctrl.kl_coef`, `actor.kl_loss_coef`]"""

    @override
    def __post_init__(self) -> None:
        self.refuse_metric_schedules()
        check_fields(self)
        for name in ("use_kl_in_reward", "sync_ref_model"):
            if getattr(self, name) and self.kl_coef == 0:
                raise BadRequestError(
                    f"{name}=True and kl_coef=0 cannot be combined: set kl_coef, the weight of the penalty"
                )
        same = {"num_iterations": self.num_ppo_epochs, "beta": self.kl_coef}
        for name, value in {**same, "epsilon": self.cliprange, "epsilon_high": self.cliprange}.items():
            object.__setattr__(self, name, value)
        super().__post_init__()

    @property
    @override
    def compares_in_groups(self) -> bool:
        return False

    @property
    @override
    def critic(self) -> CriticSettings:
        return self
