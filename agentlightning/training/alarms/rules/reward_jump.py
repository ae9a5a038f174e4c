"""A mean reward that suddenly rises or falls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Final

from typing_extensions import override

from agentlightning.training.alarms.rule import Measurement, Rule, number
from agentlightning.training.progress import StepFigures

_LARGEST: Final = 1e300
"""Figures beyond are taken for this one, so that sums and deviations of a window stay finite."""
_ROUNDING: Final = 1e-9
"""Share of a mean reward that the order of a sum may make."""


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
    effect_size: float = 0.5
    """Least change, in standard deviations of the rewards within a step: the greatest of the window and the present
    step."""
    deviations: float = 4.0
    """And at least so many standard deviations of the window's mean rewards."""
    window: int = 5
    """Steps before the present one that it is compared with; it is over after so many steps without a jump."""

    @property
    @override
    def rest(self) -> int:
        return self.window

    @override
    def measure(self, steps: Sequence[StepFigures]) -> Measurement | None:
        means, spreads = (
            _known(figures.mean_reward for figures in steps),
            _known(figures.reward_spread for figures in steps),
        )
        if number(steps[-1].mean_reward) is None or len(means) <= self.window or not spreads:
            return None
        *before, now = means[-1 - self.window :]
        mean = fmean(before)
        threshold = max(
            self.effect_size * max(spreads[-1 - self.window :]),
            self.deviations * pstdev(before),
            _ROUNDING * max(abs(mean), abs(now)),
        )
        verb = "rose" if now >= mean else "fell"
        level = f"the mean of the {self.window} steps before is {mean:.3g}"
        text = f"mean reward {verb} to {now:.3g}; {level} (limit {threshold:.3g} from it)"
        return self.above(abs(now - mean), threshold, text)


def _known(figures: Iterable[float | None]) -> list[float]:
    numbers = (number(figure) for figure in figures)
    return [max(-_LARGEST, min(_LARGEST, figure)) for figure in numbers if figure is not None]
