"""Statistics of evaluations: an exact paired comparison on the same tasks, confidence intervals, several tests at once.

Sources: the exact (conditional, two-sided binomial) form of McNemar, "Note on the sampling error of the difference
between correlated proportions", Psychometrika 12 (1947) 153-157; the interval of Wilson, "Probable inference, the law
of succession, and statistical inference", J. Am. Stat. Assoc. 22 (1927) 209-212; that of Clopper and Pearson, "The use
of confidence or fiducial limits illustrated in the case of the binomial", Biometrika 26 (1934) 404-413; Holm, "A simple
sequentially rejective multiple test procedure", Scand. J. Stat. 6 (1979) 65-70.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

Verdict = Literal["better", "no evidence", "worse"]


@dataclass(frozen=True, slots=True)
class Proportion:
    """A share of successes with its confidence interval, all between 0 and 1."""

    successes: int
    count: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same tasks before and after, task by task."""

    before: Proportion
    after: Proportion
    gained: int
    """Tasks that failed before and succeeded after."""
    lost: int
    """Tasks that succeeded before and failed after."""
    p_value: float
    """Chance of a split of gained and lost at least as uneven as this one if nothing had changed."""
    verdict: Verdict


def check_share(name: str, value: float) -> None:
    """Check a significance or confidence.

    Raises:
        ValueError: it is not between 0 and 1.
    """
    if not 0.0 < value < 1.0:
        raise ValueError(f"{name}={value} must be between 0 and 1")


def compare(before: Sequence[bool], after: Sequence[bool], *, significance: float = 0.05) -> Comparison:
    """Return whether `after` succeeds on more tasks than `before`; the two are in the same order of tasks.

    The verdict is `better` or `worse` only if the p-value is below `significance`.

    Raises:
        ValueError: the lengths differ, there is no task, or `significance` is not between 0 and 1.
    """
    if len(before) != len(after):
        raise ValueError(f"a paired comparison needs the same tasks: {len(before)} before, {len(after)} after")
    check_share("significance", significance)
    gained = sum(1 for was, now in zip(before, after, strict=True) if now and not was)
    lost = sum(1 for was, now in zip(before, after, strict=True) if was and not now)
    p_value = mcnemar_exact(gained, lost)
    verdict: Verdict = "no evidence"
    if p_value < significance:
        verdict = "better" if gained > lost else "worse"
    return Comparison(proportion(before), proportion(after), gained, lost, p_value, verdict)


def mcnemar_exact(gained: int, lost: int) -> float:
    """Return the two-sided p-value of the exact McNemar test: under no change each of the pairs that differ is a fair
    coin. 1.0 if no pair differs.

    Raises:
        ValueError: a count is negative.
    """
    if gained < 0 or lost < 0:
        raise ValueError(f"counts cannot be negative: gained={gained}, lost={lost}")
    differing = gained + lost
    ways, term = 0, 1  # sum and last term of C(differing, k) for k = 0 .. min(gained, lost)
    for k in range(min(gained, lost) + 1):
        ways += term
        term = term * (differing - k) // (k + 1)
    return min(1.0, 2 * ways / 2**differing)


def proportion(successes: Sequence[bool], *, confidence: float = 0.95) -> Proportion:
    """Return the share of true values with its Wilson score interval.

    Raises:
        ValueError: there are no values, or `confidence` is not between 0 and 1.
    """
    count, hits = len(successes), sum(map(bool, successes))
    if count == 0:
        raise ValueError("a proportion needs at least one task")
    check_share("confidence", confidence)
    z = NormalDist().inv_cdf((1.0 + confidence) / 2.0)
    mean = hits / count
    shrink = 1.0 + z * z / count
    centre = (mean + z * z / (2 * count)) / shrink
    half = z / shrink * math.sqrt(mean * (1.0 - mean) / count + z * z / (4 * count * count))
    return Proportion(hits, count, mean, max(0.0, centre - half), min(1.0, centre + half))


def clopper_pearson(successes: Sequence[bool], *, confidence: float = 0.95) -> Proportion:
    """Return the share of true values with its exact interval, which covers at least as often as it says.

    Raises:
        ValueError: there are no values, or `confidence` is not between 0 and 1.
    """
    count, hits = len(successes), sum(map(bool, successes))
    if count == 0:
        raise ValueError("a proportion needs at least one task")
    check_share("confidence", confidence)
    tail = (1.0 - confidence) / 2.0
    low = 0.0 if hits == 0 else _share_with_tail(hits - 1, count, 1.0 - tail)
    high = 1.0 if hits == count else _share_with_tail(hits, count, tail)
    return Proportion(hits, count, hits / count, low, high)


def _share_with_tail(hits: int, count: int, tail: float) -> float:
    """Return the share of successes with which at most `hits` of `count` have the chance `tail`."""
    ways = [math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) for k in range(hits + 1)]
    low, high = 0.0, 1.0
    while high - low > 1e-10:
        middle = (low + high) / 2.0
        yes, no = math.log(middle), math.log1p(-middle)
        chance = math.fsum(math.exp(way + k * yes + (count - k) * no) for k, way in enumerate(ways))
        low, high = (middle, high) if chance > tail else (low, middle)
    return (low + high) / 2.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values as they count among several tests (Holm's step-down), in the same order.

    The probability that even one of those below a significance is false is at most that significance.
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = least
    return adjusted


def t_interval(values: Sequence[float], *, confidence: float = 0.95) -> tuple[float, float, float]:
    """Return the mean of the values with the bounds of its Student's t interval; infinite ones for a single value.

    Raises:
        ValueError: there are no values, or `confidence` is not between 0 and 1.
    """
    if not values:
        raise ValueError("a mean needs at least one value")
    check_share("confidence", confidence)
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, -math.inf, math.inf
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
    half = t_quantile((1.0 + confidence) / 2.0, len(values) - 1) * spread
    return mean, mean - half, mean + half


def t_quantile(p: float, freedom: int) -> float:
    """Return the quantile of Student's t distribution, for `p` of 0.5 or more.

    Exact for one and two degrees of freedom, else within 1 % up to p = 0.995.

    Source: the expansion in Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 26.7.5.
    """
    if freedom == 1:
        return math.tan(math.pi * (p - 0.5))
    if freedom == 2:
        return (2.0 * p - 1.0) * math.sqrt(2.0 / (4.0 * p * (1.0 - p)))
    z, n = NormalDist().inv_cdf(p), float(freedom)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / n ** (power + 1) for power, term in enumerate(terms))
