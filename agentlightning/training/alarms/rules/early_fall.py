"""A mean reward that falls in the first steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from agentlightning.training.alarms.rule import Measurement, Rule, number
from agentlightning.training.progress import StepFigures


@dataclass(frozen=True, kw_only=True)
class EarlyFall(Rule):
    """The mean reward has fallen far below that of the first step, before `reward_jump` has steps to compare with.

    The first updates were too large, most of the time.
    """

    name = "early_fall"
    what_to_try = (
        "begin anew with a smaller learning_rate, such as a tenth; larger batches (batch_size, num_generations); fewer "
        "num_iterations; a smaller max_grad_norm"
    )

    patience: int = 1
    window: int = 4
    """A fall in one of so many steps after the first one; it is over whenever the mean reward is back."""
    share: float = 0.5
    """Least fall, as a share of the mean reward of the first step."""
    deviations: float = 3.0
    """And at least so many standard errors of the difference."""

    @override
    def measure(self, steps: Sequence[StepFigures]) -> Measurement | None:
        first, now = steps[0], steps[-1]
        before, after = number(first.mean_reward), number(now.mean_reward)
        error, other = number(first.reward_error), number(now.reward_error)
        if before is None or after is None or error is None or other is None:
            return None
        threshold = max(self.share * abs(before), self.deviations * math.hypot(error, other))
        fall = before - after
        text = f"mean reward fell to {after:.3g}, in the first step it was {before:.3g} (limit {threshold:.3g} below)"
        if not (math.isfinite(threshold) and math.isfinite(fall)):
            return None
        measurement = self.above(fall, threshold, text)
        return measurement if len(steps) <= self.window + 1 else replace(measurement, is_bad=False)
