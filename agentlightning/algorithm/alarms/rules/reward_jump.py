"""A mean reward that suddenly rises or falls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Final

from typing_extensions import override

from agentlightning.algorithm.alarms.rule import Measurement, Rule, number
from agentlightning.algorithm.progress import StepFigures

_LARGEST: Final = 1e300
"""Rewards beyond are taken for this one, so that sums and deviations of a window stay finite."""


@dataclass(frozen=True, kw_only=True)
class RewardJump(Rule):
    """The mean reward differs from that of the steps before by more than these differ among each other."""

    name = "reward_jump"
    what_to_try = (
        "compare rollouts of the two steps; a rise may be a reward that is gamed, read the best ones; a fall "
        "may be a broken service or a too large update: look at grad_norm and at failed rollouts, go on from "
        "the checkpoint before with a smaller learning_rate"
    )

    patience: int = 1
    least: float = 0.25
    """Least change, in units of the reward; the default is for rewards between 0 and 1."""
    deviations: float = 4.0
    """And at least so many standard deviations of the window."""
    window: int = 5
    """Steps before the present one that it is compared with; it is over after so many steps without a jump."""

    @property
    @override
    def rest(self) -> int:
        return self.window

    @override
    def measure(self, steps: Sequence[StepFigures]) -> Measurement | None:
        rewards = [reward for figures in steps if (reward := number(figures.mean_reward)) is not None]
        if number(steps[-1].mean_reward) is None or len(rewards) <= self.window:
            return None
        now, *before = (
            max(-_LARGEST, min(_LARGEST, reward)) for reward in (rewards[-1], *rewards[-1 - self.window : -1])
        )
        mean = fmean(before)
        threshold = max(self.least, self.deviations * pstdev(before))
        verb = "rose" if now >= mean else "fell"
        level = f"the mean of the {self.window} steps before is {mean:.3g}"
        text = f"mean reward {verb} to {now:.3g}; {level} (limit {threshold:.3g} from it)"
        return self.above(abs(now - mean), threshold, text)
