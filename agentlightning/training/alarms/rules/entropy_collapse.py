"""A policy that says nearly the same each time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from agentlightning.training.alarms.rule import Measurement, Rule, start_of, updated
from agentlightning.training.progress import StepFigures


@dataclass(frozen=True, kw_only=True)
class EntropyCollapse(Rule):
    """The entropy of the policy has fallen to a small share of what it began with."""

    name = "entropy_collapse"
    what_to_try = (
        "entropy_coef, such as 0.001; a greater epsilon_high; a smaller learning_rate; a temperature of 1; "
        "tasks on which more than one answer earns something"
    )

    share: float = 0.1
    """Least share of the mean entropy of the first steps."""
    reference_steps: int = 3
    """So many first steps that took an update are compared with."""

    @override
    def measure(self, steps: Sequence[StepFigures]) -> Measurement | None:
        entropies = [updated(figures, "entropy") for figures in steps]
        start = start_of(entropies, self.reference_steps)
        now = entropies[-1]
        if start is None or now is None:
            return None
        threshold = self.share * start
        first = f"{start:.3g} in the first {self.reference_steps} steps"
        text = f"entropy is {now:.3g} nats per token, {first} (limit {threshold:.3g})"
        return self.below(now, threshold, text)
