"""PPO (arXiv:1707.06347): the run of GRPO, with a value head that computes an advantage for each token."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentlightning.algorithm.grpo import GRPO
from agentlightning.training.group_rewards import GroupReward, check_group_reward
from agentlightning.training.ppo_settings import PPOSettings
from agentlightning.training.settings import accepts, make_settings, signature_of

__all__ = ["PPO"]


@dataclass(frozen=True, kw_only=True)
class PPOArguments(PPOSettings):
    """Train a transformers model and a value head on rewards. `PPOSettings` describes each setting."""

    model: str | Path | None = field(default=None, kw_only=False)  # pyright: ignore[reportIncompatibleVariableOverride] -- a path becomes a text
    group_reward: GroupReward | None = None


class PPO(GRPO):
    """Train the weights of a transformers model and a value head on the rewards of an agent's rollouts.

    `PPO(model="path", max_steps=20, batch_size=64, ...)`; `PPOSettings` has every setting with its meaning and
    default. A task needs only one rollout: the learned values are the baseline of each token.

    Args:
        model: folder of the model.
        group_reward: as for `GRPO`; requires `num_generations` of at least 2.

    Raises:
        TypeError: a setting is unknown, or `group_reward` is neither a ranking nor a function.
        BadRequestError: the model is missing, or a value is out of range.
    """

    @accepts(PPOArguments)
    def __init__(
        self, model: str | Path | None = None, *, group_reward: GroupReward | None = None, **settings: Any
    ) -> None:
        self.settings = make_settings(PPOSettings, model, settings)
        self.group_reward = check_group_reward(group_reward, self.settings.num_generations)


PPO.__signature__ = signature_of(PPOSettings)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
