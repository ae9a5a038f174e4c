"""Several samples of one task: pass@k, and how much rewards vary between tasks and within them.

Sources: the unbiased estimator of Chen et al., "Evaluating large language models trained on code", arXiv:2107.03374,
equation 1; the one-way random-effects analysis of variance for unequal numbers of samples, Searle, Casella and
McCulloch, Variance Components (1992), chapter 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agentlightning.evaluation.intervals import Interval


@dataclass(frozen=True, slots=True)
class PassAtK:
    """The chance that at least one of `k` samples of a task succeeds."""

    k: int
    interval: Interval | None
    """Mean over the tasks with its interval; None if no task has samples enough."""
    tasks: int
    """Tasks with at least `k` samples that have a reward."""
    left_out: int
    """Tasks with less."""
    threshold: float
    """A sample succeeds if its reward is above this."""


@dataclass(frozen=True, slots=True)
class Variance:
    """Variance of the rewards; the square roots are standard deviations."""

    between: float
    """Variance of the tasks' own mean rewards; more tasks make the mean more certain."""
    within: float
    """Variance of the samples of one task; more samples of each task help against this alone."""


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Return the unbiased estimate `1 - C(n - c, k) / C(n, k)` for one task with n samples and c successes.

    Raises:
        ValueError: `k` is not between 1 and the number of samples, or there are more successes than samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs k between 1 and the {samples} samples of the task")
    if not 0 <= successes <= samples:
        raise ValueError(f"successes={successes} must be between 0 and the {samples} samples")
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def variance_components(groups: Sequence[Sequence[float]]) -> Variance | None:
    """Return the variance between and within groups, one group of rewards for each task; an estimate below 0 is 0.

    None without two groups, or if no group has two rewards.
    """
    filled = [group for group in groups if group]
    count, freedom = sum(map(len, filled)), sum(len(group) - 1 for group in filled)
    if len(filled) < 2 or freedom == 0:
        return None
    means = [math.fsum(group) / len(group) for group in filled]
    whole = math.fsum(map(math.fsum, filled)) / count
    within = math.fsum((x - mean) ** 2 for group, mean in zip(filled, means, strict=True) for x in group) / freedom
    spread = math.fsum(len(group) * (mean - whole) ** 2 for group, mean in zip(filled, means, strict=True))
    usual = (count - sum(len(group) ** 2 for group in filled) / count) / (len(filled) - 1)
    return Variance(max(0.0, (spread / (len(filled) - 1) - within) / usual), within)
