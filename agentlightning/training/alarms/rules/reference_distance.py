"""A policy far from the model that it was loaded as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from agentlightning.training.alarms.rule import Measurement, Rule, updated
from agentlightning.training.progress import StepFigures


@dataclass(frozen=True, kw_only=True)
class ReferenceDistance(Rule):
    """The divergence from the reference has become large; only of runs with `beta` above 0."""

    name = "reference_distance"
    what_to_try = (
        "a greater beta; a smaller learning_rate; nothing, if held-out tasks get better and the replies read well"
    )

    limit: float = 1.0
    """Largest mean divergence per token, in nats."""

    @override
    def measure(self, steps: Sequence[StepFigures]) -> Measurement | None:
        kl = updated(steps[-1], "kl")
        if kl is None:
            return None
        return self.above(
            kl, self.limit, f"the policy is {kl:.3g} nats per token from its reference (limit {self.limit:g})"
        )
