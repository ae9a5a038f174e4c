"""Two evaluations of the same tasks compared task by task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from agentlightning.evaluation.betting import Bet, judge
from agentlightning.evaluation.intervals import Interval
from agentlightning.evaluation.resampling import differing, sign_flip_test
from agentlightning.evaluation.statistics import Verdict, check_share, t_interval


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """Two evaluations of the same tasks, task by task."""

    difference: Interval | None
    """Mean difference of the rewards, the second minus the first, as wide as it can be with one pair; None without."""
    pairs: int
    """Tasks that have a reward on both sides."""
    unpaired: int
    """Tasks that have none on at least one side."""
    gained: int
    lost: int
    """Pairs whose reward is higher, and lower, in the second."""
    p_value: float
    """Chance of a mean difference at least as far from 0 as this one if nothing had changed."""
    verdict: Verdict
    """Whether the second is `better` or `worse`."""
    method: str = "exact sign test"
    """The test of the p-value."""

    @override
    def __str__(self) -> str:
        changed = f"{self.gained} tasks gained, {self.lost} lost of {self.pairs} pairs ({self.unpaired} without)"
        by = "" if self.difference is None else f", mean difference {self.difference.text(signed=True)}"
        return f"{self.verdict}: {changed}{by}, p = {self.p_value:.2g} ({self.method})"


def compare_rewards(
    before: Sequence[float | None],
    after: Sequence[float | None],
    *,
    significance: float = 0.05,
    seed: int = 0,
    stopped_in: tuple[float, float] | None = None,
) -> PairedComparison:
    """Compare rewards of the same tasks in the same order; None stands for a task without one, which is no pair.

    The verdict is `better` or `worse` only if the p-value is below `significance`. The test is `sign_flip_test`; where
    a side might have been stopped early, no test of a fixed number of tasks is valid, and it is the sequential one for
    rewards in the range `stopped_in`.

    Raises:
        ValueError: the lengths differ, or `significance` is not between 0 and 1.
    """
    check_share("significance", significance)
    both = list(zip(before, after, strict=True))
    changes = [late - early for early, late in both if early is not None and late is not None]
    changed = differing(changes)
    gained = sum(change > 0 for change in changed)
    verdict: Verdict = "no evidence"
    if stopped_in is None:
        p_value, method = sign_flip_test(changes, seed=seed)
    else:
        p_value, method = _p_value_at_any_time(changes, stopped_in[1] - stopped_in[0]), "sequential test"
    if p_value < significance:
        verdict = "better" if math.fsum(changed) > 0 else "worse"
    difference = Interval(*t_interval(changes), "student") if changes else None
    unpaired = len(both) - len(changes)
    return PairedComparison(difference, len(changes), unpaired, gained, len(changed) - gained, p_value, verdict, method)


def _p_value_at_any_time(changes: Sequence[float], largest: float) -> float:
    if any(abs(change) > largest for change in changes):  # the test holds for rewards inside of their range only
        return 1.0
    return judge((Bet(largest), Bet(largest)), changes, 0.05)[1]
