"""Groups that teach nothing because their rewards are equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from agentlightning.training.alarms.rule import Measurement, Rule, number
from agentlightning.training.progress import StepFigures


@dataclass(frozen=True, kw_only=True)
class EqualRewards(Rule):
    """Nearly all groups of a step have equal rewards: there is nothing to compare within them."""

    name = "equal_rewards"
    what_to_try = (
        "look at the rewards: if all are at the top, the tasks are learned, take harder ones; if all are at "
        "the bottom from the start, easier tasks, partial credit, or a warm start; if they fell there, a smaller "
        "learning_rate and larger batches; more num_generations, a higher temperature; max_num_gen_batches=3 samples "
        "other tasks in their place"
    )

    patience: int = 3
    limit: float = 0.9
    """Largest share of a step's groups."""

    @override
    def measure(self, steps: Sequence[StepFigures]) -> Measurement | None:
        compared, equal = number(steps[-1].groups.get("compared")), number(steps[-1].groups.get("equal_rewards"))
        if not compared or equal is None:
            return None
        share, mean = equal / compared, number(steps[-1].mean_reward)
        of = "" if mean is None else f", mean reward {mean:.3g}"
        text = f"in {equal:.0f} of {compared:.0f} groups all rewards are equal{of} (limit {self.limit:.0%})"
        return self.above(share, self.limit, text)
