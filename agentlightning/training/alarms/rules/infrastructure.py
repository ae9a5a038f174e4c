"""Rollouts that fail for reasons that are not the policy's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from agentlightning.training.alarms.rule import Measurement, Rule, number
from agentlightning.training.progress import StepFigures


@dataclass(frozen=True, kw_only=True)
class Infrastructure(Rule):
    """Most rollouts of a step ended with a fault of the infrastructure."""

    name = "infrastructure"
    what_to_try = (
        "agl rollouts list --outcome infrastructure_fault and agl rollouts explain say what went wrong in "
        "each; the agent's own services and keys; infrastructure_retries in rollout_config; "
        "rollout_timeout_seconds"
    )

    patience: int = 1
    limit: float = 0.5
    """Largest share of a step's rollouts."""

    @override
    def measure(self, steps: Sequence[StepFigures]) -> Measurement | None:
        figures = steps[-1]
        rollouts = figures.rollouts_done + figures.rollouts_failed
        if not rollouts:
            return None
        faults = number(figures.rollouts_excluded.get("infrastructure_fault")) or 0.0
        text = f"{faults:.0f} of {rollouts} rollouts ended with an infrastructure fault (limit {self.limit:.0%})"
        return self.above(faults / rollouts, self.limit, text)
