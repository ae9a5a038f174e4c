"""Training on replies of old weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from agentlightning.training.alarms.rule import Measurement, Rule, number, updated
from agentlightning.training.progress import StepFigures


@dataclass(frozen=True, kw_only=True)
class StaleWeights(Rule):
    """The trained calls were served by weights that are several updates old, or far from those that learn."""

    name = "stale_weights"
    what_to_try = (
        "a smaller max_staleness of agl.GRPO; more or faster runners; a smaller staleness_clip_max; "
        "a smaller learning_rate, which keeps versions closer"
    )

    limit: float = 2.0
    """Largest mean age of the trained calls, in updates."""
    divergence: float = 0.5
    """Largest estimated KL divergence of the weights that sampled stale tokens from those before the update, in nats
    per stale token."""

    @override
    def measure(self, steps: Sequence[StepFigures]) -> Measurement | None:
        behind, far = number(steps[-1].versions_behind), updated(steps[-1], "first_stale_kl")
        measurements: list[Measurement] = []
        if behind is not None:
            text = f"trained calls are {behind:.2g} updates old on average (limit {self.limit:g})"
            measurements.append(self.above(behind, self.limit, text))
        if far is not None:
            text = f"stale tokens are {far:.3g} nats each from the weights that learn from them"
            measurements.append(self.above(far, self.divergence, f"{text} (limit {self.divergence:g})"))
        return max(measurements, key=lambda each: (each.is_bad, not each.is_fine), default=None)
