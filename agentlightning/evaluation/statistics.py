"""Means with confidence intervals, and p-values: the exact McNemar test, and corrections for multiple tests.

Sources: the exact (conditional, two-sided binomial) form of McNemar, "Note on the sampling error of the difference
between correlated proportions", Psychometrika 12 (1947) 153-157; the interval of Wilson, "Probable inference, the law
of succession, and statistical inference", J. Am. Stat. Assoc. 22 (1927) 209-212; that of Clopper and Pearson, "The use
of confidence or fiducial limits illustrated in the case of the binomial", Biometrika 26 (1934) 404-413; the
bias-corrected and accelerated (BCa) interval of Efron, "Better bootstrap confidence intervals", J. Am. Stat. Assoc. 82
(1987) 171-185, with the acceleration of Efron and Tibshirani, An Introduction to the Bootstrap (1993), equation 14.15;
that of Bonett and Price, "Adjusted Wald confidence interval for a difference of binomial proportions based on paired
data", J. Educ. Behav. Stat. 37 (2012) 479-488; Holm, "A simple sequentially rejective multiple test procedure", Scand.
J. Stat. 6 (1979) 65-70.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, get_args

IntervalMethod = Literal["wilson", "exact", "student", "bootstrap"]
"""`wilson` and `exact` (Clopper-Pearson): for values of 0 and 1. `student`: Student's t. `bootstrap`: BCa."""
METHODS = {"wilson": "Wilson", "exact": "Clopper-Pearson", "student": "Student's t", "bootstrap": "BCa bootstrap"}
"""Names of the methods in texts."""
METHODS["bonett-price"] = "Bonett-Price"
RESAMPLES = 2000
"""Number of samples of a bootstrap interval."""
_Bounds = tuple[float, float, float]
"""A mean, and the lower and upper limits of its interval."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its confidence interval."""

    mean: float
    low: float
    high: float
    method: str = ""
    """Name of the method: an `IntervalMethod`, or `bonett-price` for a difference."""

    @property
    def limits(self) -> str:
        """The limits as text, such as `95 % interval 0.400 to 0.600 (Wilson)`; empty if they are infinite."""
        limits = f"95 % interval {self.low:.3f} to {self.high:.3f}"
        return "" if self.high == math.inf else f"{limits} ({METHODS[self.method]})"

    def text(self, *, signed: bool = False, named: bool = False) -> str:
        """Return a text such as `0.500 (0.400 to 0.600, Wilson)`, with `named` the method. A single value has only a
        mean, as have equal values of unknown range."""
        form = "+.3f" if signed else ".3f"
        if self.high == math.inf:
            return f"{self.mean:{form}}"
        method = f", {METHODS[self.method]}" if named else ""
        return f"{self.mean:{form}} ({self.low:{form}} to {self.high:{form}}{method})"


def interval_of(
    values: Sequence[float], *, confidence: float = 0.95, method: IntervalMethod | None = None, seed: int = 0
) -> Interval | None:
    """Return the mean of the values with its interval; None without values.

    The default `method` is Wilson's if all values are 0 or 1, otherwise Student's t. Values that are all between 0 and
    1 have an interval in this range: Student's t is cut at 0 and 1. Equal values have no spread to estimate from:
    between 0 and 1 they have Wilson's interval with the mean as the share, which is never too narrow, otherwise none.

    Raises:
        ValueError: `confidence` is not between 0 and 1, the method is unknown, or it requires values of 0 and 1.
    """
    check_share("confidence", confidence)
    if method is not None and method not in get_args(IntervalMethod):
        raise ValueError(f"method={method!r} must be one of {', '.join(get_args(IntervalMethod))}")
    if not values:
        return None
    other = next((value for value in values if value not in (0.0, 1.0)), None)
    in_range = all(0.0 <= value <= 1.0 for value in values)
    if method is None and other is not None and len(values) > 1 and not _varies(values):
        bounds = _wilson(values, confidence) if in_range else t_interval(values[:1])
        return Interval(*bounds, "wilson" if in_range else "student")
    if method in ("wilson", "exact") and other is not None:
        raise ValueError(f"method={method!r} requires rewards of 0 and 1; got {other}. Use 'bootstrap' or 'student'")
    if method == "bootstrap":
        return Interval(*_bootstrap(values, confidence, seed), method)
    method = method or ("wilson" if other is None else "student")
    mean, low, high = {"wilson": _wilson, "exact": _clopper_pearson, "student": t_interval}[method](values, confidence)
    if method == "student" and in_range and len(values) > 1:
        low, high = max(0.0, low), min(1.0, high)
    return Interval(mean, low, high, method)


def difference_interval(changes: Sequence[float], largest: float, *, is_binary: bool) -> Interval:
    """Return the mean of one or more paired differences with its 95 % interval, which never exceeds `largest`.

    For differences of rewards of 0 and 1, and for equal differences, it is the interval of Bonett and Price: that of
    the normal distribution with two pairs added, one of each extreme difference. Otherwise it is Student's t. A single
    difference, and equal ones of unknown range (`largest` is infinite), have only a mean.
    """
    mean, low, high = t_interval(changes)
    if not is_binary and _varies(changes):
        return Interval(mean, max(-largest, low), min(largest, high), "student")
    largest = 1.0 if is_binary else largest
    if len(changes) == 1 or largest == math.inf:
        return Interval(mean, -math.inf, math.inf, "student")
    count = len(changes) + 2
    middle = math.fsum(changes) / count
    squares = math.fsum(change * change for change in changes) + 2.0 * largest**2
    half = NormalDist().inv_cdf(0.975) * math.sqrt((squares / count - middle**2) / count)
    return Interval(mean, max(-largest, middle - half), min(largest, middle + half), "bonett-price")


def _varies(values: Sequence[float]) -> bool:
    """Return whether values differ by more than the rounding error of equal values."""
    return max(values) - min(values) > 1e-9 * max(map(abs, values))


def check_share(name: str, value: float) -> None:
    """Check a significance or confidence.

    Raises:
        ValueError: The value is not between 0 and 1.
    """
    if not 0.0 < value < 1.0:
        raise ValueError(f"{name}={value} must be between 0 and 1")


def t_interval(values: Sequence[float], confidence: float = 0.95) -> _Bounds:
    """Return the mean of one or more values with its Student's t interval, which is infinite for a single value."""
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, -math.inf, math.inf
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
    half = t_quantile((1.0 + confidence) / 2.0, len(values) - 1) * spread
    return mean, mean - half, mean + half


def t_quantile(p: float, freedom: int) -> float:
    """Return the quantile of Student's t distribution, for `p` of 0.5 or more.

    The result is exact for one and two degrees of freedom, otherwise within 1 % up to p = 0.995.

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


def wilson_bounds(mean: float, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the limits of Wilson's interval for a share of a number of trials."""
    z = NormalDist().inv_cdf((1.0 + confidence) / 2.0)
    shrink = 1.0 + z * z / count
    centre = (mean + z * z / (2 * count)) / shrink
    half = z / shrink * math.sqrt(mean * (1.0 - mean) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def _wilson(values: Sequence[float], confidence: float) -> _Bounds:
    mean = math.fsum(values) / len(values)
    return mean, *wilson_bounds(mean, len(values), confidence)


def _clopper_pearson(values: Sequence[float], confidence: float) -> _Bounds:
    """Return limits for values of 0 and 1 that contain the true share with at least the `confidence`."""
    count, successes = len(values), int(sum(values))
    tail = (1.0 - confidence) / 2.0
    low = 0.0 if successes == 0 else _share_with_tail(successes - 1, count, 1.0 - tail)
    high = 1.0 if successes == count else _share_with_tail(successes, count, tail)
    return successes / count, low, high


def _share_with_tail(most: int, count: int, tail: float) -> float:
    """Return the success probability at which `count` trials have at most `most` successes with probability `tail`."""
    ways = [math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) for k in range(most + 1)]
    low, high = 0.0, 1.0
    while high - low > 1e-10:
        middle = (low + high) / 2.0
        yes, no = math.log(middle), math.log1p(-middle)
        chance = math.fsum(math.exp(way + k * yes + (count - k) * no) for k, way in enumerate(ways))
        low, high = (middle, high) if chance > tail else (low, middle)
    return (low + high) / 2.0


def _bootstrap(values: Sequence[float], confidence: float, seed: int) -> _Bounds:
    """Return the BCa limits, which are infinite for a single value."""
    count, mean = len(values), math.fsum(values) / len(values)
    if count == 1:
        return mean, -math.inf, math.inf
    squares = math.fsum((value - mean) ** 2 for value in values)
    if squares <= (1e-9 * max(map(abs, values))) ** 2:  # rounding error of equal values
        return mean, mean, mean
    rng, normal = random.Random(seed), NormalDist()
    means = sorted(sum(rng.choices(values, k=count)) / count for _ in range(RESAMPLES))
    below = sum(drawn < mean for drawn in means) + 0.5 * sum(drawn == mean for drawn in means)
    bias = normal.inv_cdf(min(max(below, 0.5), RESAMPLES - 0.5) / RESAMPLES)
    spread = math.sqrt(squares)  # divided before the cube, which would be 0 or infinite for very small or large values
    skew = math.fsum(((value - mean) / spread) ** 3 for value in values) / 6.0  # a = skewness / (6 sqrt(n))

    def bound(p: float) -> float:
        z = bias + normal.inv_cdf(p)
        place = normal.cdf(bias + z / max(1e-9, 1.0 - skew * z)) * (RESAMPLES - 1)
        low = min(int(place), RESAMPLES - 2)
        return means[low] + (place - low) * (means[low + 1] - means[low])

    return mean, bound((1.0 - confidence) / 2.0), bound((1.0 + confidence) / 2.0)


def mcnemar_exact(gained: int, lost: int) -> float:
    """Return the two-sided p-value of the exact McNemar test; 1.0 if no pair differs.

    Without a change, each differing pair is equally likely to be gained or lost.
    """
    differing = gained + lost
    ways, term = 0, 1  # sum and last term of C(differing, k) for k = 0 .. min(gained, lost)
    for k in range(min(gained, lost) + 1):
        ways += term
        term = term * (differing - k) // (k + 1)
    return min(1.0, 2 * ways / 2**differing)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted for several tests (Holm's step-down), in the same order.

    The probability of any false positive below a significance is at most that significance.
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = least
    return adjusted
