"""The update of a training step as the settings of a run say it: made by the loop, and again by a replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentlightning.training.learner.policy import Policy
from agentlightning.training.learner.update import UpdateResult
from agentlightning.training.settings import GRPOSettings

if TYPE_CHECKING:
    from agentlightning.adapter.rows.samples import Sample


def update_policy(
    policy: Policy,
    settings: GRPOSettings,
    samples: Sequence[Sample],
    advantages: Sequence[float],
    *,
    step: int,
    share: float,
) -> UpdateResult:
    """Learn from the rows of a step; `share` is the weight that they have in the step's mean, see `StepRows.share`."""
    return policy.update(
        samples,
        advantages,
        loss=settings,
        critic=settings.critic,
        constant_length=settings.loss_scale_factor or settings.max_completion_length,
        share=share,
        num_iterations=settings.num_iterations,
        minibatch_rollouts=settings.minibatch_rollouts,
        temperature=settings.temperature,
        max_grad_norm=settings.max_grad_norm,
        learning_rate=settings.learning_rate_at(step),
        weight_version=policy.weight_version if settings.max_staleness else None,
    )
