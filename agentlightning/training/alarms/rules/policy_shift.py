"""Ratios far from one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from agentlightning.training.alarms.rule import Measurement, Rule, updated
from agentlightning.training.progress import StepFigures


@dataclass(frozen=True, kw_only=True)
class PolicyShift(Rule):
    """An update moves the policy far from what it was before. One such update can destroy it."""

    name = "policy_shift"
    what_to_try = (
        "a smaller learning_rate; fewer num_iterations; smaller epsilon and epsilon_high; a smaller "
        "max_grad_norm; larger batches"
    )

    patience: int = 1
    limit: float = 0.5
    """Largest estimated KL divergence per token of the policy before the update from the one after it, in nats. First
    updates of a small model that learns well reach 0.2."""

    @property
    @override
    def rest(self) -> int:
        return max(2, self.patience)

    @override
    def measure(self, steps: Sequence[StepFigures]) -> Measurement | None:
        # where the trainer does not measure it after the last step: the mean over its steps, of fresh tokens if known
        distances = (updated(steps[-1], name) for name in ("update_kl", "fresh_kl", "approx_kl"))
        kl = next((value for value in distances if value is not None), None)
        if kl is None:
            return None
        clipped = updated(steps[-1], "clip_fraction") or 0.0
        moved = f"the update moved the policy by {kl:.3g} nats per token"
        text = f"{moved}, {clipped:.1%} of the tokens clipped (limit {self.limit:g})"
        return self.above(kl, self.limit, text)
