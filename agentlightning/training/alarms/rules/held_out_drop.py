"""Held-out tasks that get worse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from agentlightning.training.alarms.rule import Measurement, Rule, number
from agentlightning.training.progress import StepFigures

_LEAST_PAIRS = 6
"""With less no p-value of the exact test is below 0.05."""


@dataclass(frozen=True, kw_only=True)
class HeldOutDrop(Rule):
    """The mean reward on held-out tasks is below the best one so far, and the paired test on the same tasks says so too
    if it has pairs enough to tell.

    The reward of the training tasks may be gamed, or they are learned by heart.
    """

    name = "held_out_drop"
    what_to_try = (
        "the checkpoint of the best evaluation (agl runs show); read rollouts of the training tasks with a "
        "high reward; beta above 0; a smaller learning_rate; more training tasks"
    )

    patience: int = 1
    limit: float = 0.1
    """Largest loss of mean reward against the best evaluation, as a share of the range of the rewards of both: for
    rewards of 0 and 1, 0.1 is 10 points."""
    significance: float = 0.05
    """A loss with a p-value of this or more may be chance."""

    @override
    def measure(self, steps: Sequence[StepFigures]) -> Measurement | None:
        now = number(steps[-1].held_out)
        if now is None:
            return None
        change = steps[-1].held_out_change
        if not change:  # there was none before, or its figures do not tell
            best = max(value for figures in steps if (value := number(figures.held_out)) is not None)
            text = f"held-out mean reward is {now:.4g}, its best was {best:.4g} (limit {self.limit:g} below)"
            return self.above(best - now, self.limit, text)
        limit = self.limit * change["range"]
        text = (
            f"held-out mean reward is {now:.4g}, its best was {change['best']:.4g} after {change['updates']} updates "
            f"(limit {limit:.3g} below), p = {change['p_value']:.2g} over {change['pairs']} tasks"
        )
        measurement = self.above(-change["change"], limit, text)
        is_chance = change["pairs"] >= _LEAST_PAIRS and change["p_value"] >= self.significance
        return replace(measurement, is_bad=measurement.is_bad and not is_chance)
