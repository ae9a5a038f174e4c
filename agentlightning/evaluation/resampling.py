"""Statistics that draw again from what was seen: a bootstrap interval and a paired permutation test. Seeded.

Sources: the bias-corrected and accelerated (BCa) interval of Efron, "Better bootstrap confidence intervals", J. Am.
Stat. Assoc. 82 (1987) 171-185, with the acceleration of Efron and Tibshirani, An Introduction to the Bootstrap (1993),
equation 14.15; the randomization test of paired differences of Fisher, The Design of Experiments (1935), section 21,
which Dror et al., "The hitchhiker's guide to testing statistical significance in natural language processing", ACL
2018, recommend for graded measures; its p-value from draws is that of Phipson and Smyth, "Permutation p-values should
never be zero", Stat. Appl. Genet. Mol. Biol. 9 (2010) 39.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from operator import getitem
from statistics import NormalDist

from agentlightning.evaluation.statistics import check_share, mcnemar_exact

RESAMPLES = 2000
"""Draws of a bootstrap interval."""
FLIPS = 10_000
"""Draws of a permutation test; its p-value is never below 1 / (FLIPS + 1)."""
_ALL_SIGNS = 16
"""Up to so many differences all assignments of signs are counted."""
_TABLE = 8
"""Differences whose sums for all signs are looked up by one random byte."""
_ROUNDING = 1e-9


def bootstrap_interval(
    values: Sequence[float], *, confidence: float = 0.95, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float, float]:
    """Return the mean of the values with the bounds of its BCa bootstrap interval; infinite ones for a single value.

    Raises:
        ValueError: there are no values, `confidence` is not between 0 and 1, or there are less than 100 resamples.
    """
    if not values:
        raise ValueError("a mean needs at least one value")
    check_share("confidence", confidence)
    if resamples < 100:
        raise ValueError(f"resamples={resamples} must be 100 or more")
    count, mean = len(values), math.fsum(values) / len(values)
    if count == 1:
        return mean, -math.inf, math.inf
    squares = math.fsum((value - mean) ** 2 for value in values)
    if squares <= (_ROUNDING * max(map(abs, values))) ** 2:
        return mean, mean, mean
    rng = random.Random(seed)
    means = sorted(sum(rng.choices(values, k=count)) / count for _ in range(resamples))
    below = sum(drawn < mean for drawn in means) + 0.5 * sum(drawn == mean for drawn in means)
    normal = NormalDist()
    bias = normal.inv_cdf(min(max(below, 0.5), resamples - 0.5) / resamples)
    spread = math.sqrt(squares)  # divided before the cube, which would be 0 or infinite for very small or large values
    skew = math.fsum(((value - mean) / spread) ** 3 for value in values) / 6.0  # a = skewness / (6 sqrt(n))

    def bound(p: float) -> float:
        z = bias + normal.inv_cdf(p)
        share = normal.cdf(bias + z / max(1e-9, 1.0 - skew * z))
        place = share * (resamples - 1)
        low = min(int(place), resamples - 2)
        return means[low] + (place - low) * (means[low + 1] - means[low])

    return mean, bound((1.0 - confidence) / 2.0), bound((1.0 + confidence) / 2.0)


def differing(changes: Sequence[float]) -> list[float]:
    """Return the changes that are more than what rounding makes of equal rewards."""
    noise = _ROUNDING * max(map(abs, changes), default=0.0)
    return [change for change in changes if abs(change) > max(noise, 1e-12)]


def sign_flip_test(changes: Sequence[float], *, seed: int = 0, flips: int = FLIPS) -> tuple[float, str]:
    """Return the two-sided p-value of the mean change of pairs, and the name of the test.

    If nothing had changed, each change were as likely to have the other sign. Changes of one size give the exact sign
    test, which for rewards of 0 and 1 is McNemar's; up to 16 changes that differ are counted exactly; of more, signs
    are drawn.

    Raises:
        ValueError: there are less than 100 flips.
    """
    if flips < 100:
        raise ValueError(f"flips={flips} must be 100 or more")
    sizes = differing(changes)
    if not sizes:
        return 1.0, "exact sign test"
    largest = max(map(abs, sizes))
    if min(map(abs, sizes)) >= largest * (1.0 - _ROUNDING):
        gained = sum(size > 0 for size in sizes)
        return mcnemar_exact(gained, len(sizes) - gained), "exact sign test"
    whole, seen = math.fsum(map(abs, sizes)), abs(math.fsum(sizes))
    # A sum with signs is twice the sum of the positive ones less the whole.
    low, high = (whole - seen) / 2.0 + _ROUNDING * whole, (whole + seen) / 2.0 - _ROUNDING * whole
    sizes = [abs(size) for size in sizes]
    if len(sizes) <= _ALL_SIGNS:
        sums = _subset_sums(sizes)
        return sum(total <= low or total >= high for total in sums) / len(sums), "exact permutation test"
    rng = random.Random(seed)
    rng.shuffle(sizes)
    sizes += [0.0] * (-len(sizes) % _TABLE)
    groups = [sizes[start : start + _TABLE] for start in range(0, len(sizes), _TABLE)]
    tables = [_subset_sums(group) for group in groups]
    extreme = 0
    for _ in range(flips):
        total = sum(map(getitem, tables, rng.randbytes(len(tables))))
        extreme += total <= low or total >= high
    return (extreme + 1) / (flips + 1), f"permutation test, {flips:,} draws"


def _subset_sums(sizes: Sequence[float]) -> list[float]:
    sums = [0.0]
    for size in sizes:
        sums += [total + size for total in sums]
    return sums
