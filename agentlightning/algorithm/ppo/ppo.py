"""PPO (arXiv:1707.06347) as the Trainer sees it. The run is that of GRPO: the loop, the rows, the records, checkpoints
and the learner are in `agentlightning.algorithm.grpo`; what PPO adds is in its `critic/`."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

from agentlightning.algorithm.grpo.grpo import GRPO
from agentlightning.training.critic.ppo_settings import PPOSettings, make_ppo_settings, ppo_setting_names
from agentlightning.training.group_rewards import GroupReward, check_group_reward

__all__ = ["PPO"]


class PPO(GRPO):
    """Train the weights of a transformers model, and a value head on them, on the rewards of an agent's rollouts.

    `PPO(model="path", max_steps=20, batch_size=64, ...)`; every setting, its meaning and its default are in
    `PPOSettings`. A task needs one rollout: what a token was worth is told by the values that the head learns.

    Args:
        model: folder of the model.
        group_reward: as for `GRPO`; needs `num_generations` of 2 or more.

    Raises:
        TypeError: an unknown setting, and the nearest right one; or `group_reward` is no ranking and no function.
        BadRequestError: there is no model, or a value is out of its range.
    """

    def __init__(
        self, model: str | Path | None = None, *, group_reward: GroupReward | None = None, **settings: Any
    ) -> None:
        self.settings = make_ppo_settings(model, settings)
        self.group_reward = check_group_reward(group_reward, self.settings.num_generations)


def _signature() -> inspect.Signature:
    """Return the constructor's signature with every setting by name, for help texts and command lines."""
    fields = {field.name: field for field in dataclasses.fields(PPOSettings)}
    own = [inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="str | Path")]
    own += [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=fields[name].default, annotation=fields[name].type
        )
        for name in ppo_setting_names()
    ]
    return inspect.Signature(own)


PPO.__signature__ = _signature()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
