"""Held-out tasks that get worse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from agentlightning.algorithm.alarms.rule import Measurement, Rule, number
from agentlightning.algorithm.progress import StepFigures


@dataclass(frozen=True, kw_only=True)
class HeldOutDrop(Rule):
    """The accuracy on held-out tasks is below the best one so far.

    The reward of the training tasks may be gamed, or they are learned by heart.
    """

    name = "held_out_drop"
    what_to_try = (
        "the checkpoint of the best evaluation (agl runs show); read rollouts of the training tasks with a "
        "high reward; beta above 0; a smaller learning_rate; more training tasks"
    )

    patience: int = 1
    limit: float = 0.1
    """Largest loss of accuracy against the best evaluation during training: 0.1 is 10 points."""

    @override
    def measure(self, steps: Sequence[StepFigures]) -> Measurement | None:
        now = number(steps[-1].held_out)
        if now is None:
            return None
        best = max(value for figures in steps if (value := number(figures.held_out)) is not None)
        text = f"held-out accuracy is {now:.1%}, its best was {best:.1%} (limit {self.limit:.0%} below)"
        return self.above(best - now, self.limit, text)
