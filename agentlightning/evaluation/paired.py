"""Paired tests: compare rewards of the same tasks, at the end of an evaluation or during it.

Sources: the randomization test of paired differences of Fisher, The Design of Experiments (1935), section 21, which
Dror et al., "The hitchhiker's guide to testing statistical significance in natural language processing", ACL 2018,
recommend for graded measures; its p-value from samples is that of Phipson and Smyth, "Permutation p-values should never
be zero", Stat. Appl. Genet. Mol. Biol. 9 (2010) 39. The sequential test is testing by betting: Waudby-Smith and Ramdas,
"Estimating means of bounded random variables by betting", J. R. Stat. Soc. B 86 (2024) 1-27.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Literal

from typing_extensions import override

from agentlightning.base.field_help import explain_fields
from agentlightning.base.terminal import counted
from agentlightning.evaluation.statistics import Interval, check_share, difference_interval, mcnemar_exact

Verdict = Literal["better", "no evidence", "worse"]
SIGN_TEST = "exact sign test"
"""Name of the test on the signs of differences of one size. For rewards of 0 and 1 it is the exact McNemar test."""
SIGN_FLIP_TEST = "sign-flip permutation test"
"""Name of the test on differences of several sizes."""
SEQUENTIAL_TEST = "sequential test"
"""Name of the test for evaluations that might stop early."""
FLIPS = 10_000
"""Number of samples of a permutation test. The p-value is never below 1 / (FLIPS + 1)."""
_MOST_EXACT = 16
"""Maximum number of differences for which all sign assignments are enumerated."""
_TABLE = 8
"""Number of differences per random byte. Their sums for all sign assignments are in a lookup table."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """The comparison of two evaluations by task."""

    difference: Interval | None
    """Mean difference of the rewards, second minus first, see `difference_interval`; None without pairs."""
    pairs: int
    """Number of tasks with a reward on both sides."""
    unpaired: int
    """Number of tasks without a reward on at least one side."""
    gained: int
    lost: int
    """Number of pairs with a higher (`gained`) and with a lower (`lost`) reward in the second."""
    p_value: float
    """Probability of a mean difference at least as far from 0 as this one if there is no change."""
    verdict: Verdict
    """Verdict on the second evaluation: `better`, `worse` or `no evidence`."""
    method: str = SIGN_TEST
    """Name of the test for the p-value, and for several sizes of differences its number of draws or `exact`."""

    @override
    def __str__(self) -> str:
        pairs = f"{counted(self.pairs, 'pair')} ({counted(self.unpaired, 'unpaired task')})"
        counts = f"{counted(self.gained, 'task')} gained, {self.lost} lost of {pairs}"
        mean = "" if self.difference is None else self.difference.text(signed=True, named=True)
        difference = mean and f", mean difference {mean}"
        return f"{self.verdict}: {counts}{difference}, p = {self.p_value:.2g} ({self.method})"


def compare_rewards(
    before: Sequence[float | None],
    after: Sequence[float | None],
    *,
    significance: float = 0.05,
    seed: int = 0,
    stopped_in: tuple[float, float] | None = None,
) -> PairedComparison:
    """Compare rewards of the same tasks in the same order. A task with the reward None forms no pair.

    The verdict is `better` or `worse` only if the p-value is below `significance`. The test is a sign-flip test:
    without a change, both signs of each difference are equally likely. If all differences have the same size, it is
    the exact sign test, which is McNemar's test for rewards of 0 and 1. Up to 16 other differences are enumerated; for
    more, signs are sampled with `seed`. If an evaluation might have been stopped early, a test of a fixed number of
    tasks is not valid. In this case the test is the sequential one for rewards in the range `stopped_in`.

    Raises:
        ValueError: The lengths differ, or `significance` is not between 0 and 1.
    """
    check_share("significance", significance)
    both = list(zip(before, after, strict=True))
    pairs = [(early, late) for early, late in both if early is not None and late is not None]
    noise = max(1e-12, _ROUNDING * max((abs(late - early) for early, late in pairs), default=0.0))
    changes = [late - early if abs(late - early) > noise else 0.0 for early, late in pairs]  # without rounding errors
    changed = [change for change in changes if abs(change) > noise]
    rewards = {reward for pair in pairs for reward in pair}
    largest = 1.0 if all(0.0 <= reward <= 1.0 for reward in rewards) else math.inf
    if stopped_in is None:
        p_value, method = _sign_flip_test(changed, seed)
    else:
        p_value, method, stated = 1.0, SEQUENTIAL_TEST, stopped_in[1] - stopped_in[0]
        if all(abs(change) <= stated for change in changes):  # the test is valid only for rewards inside their range
            largest, (_, p_value) = stated, SequentialTest(stated, stated).add(changes, significance)
    verdict: Verdict = "no evidence"
    if p_value < significance:
        verdict = "better" if math.fsum(changed) > 0 else "worse"
    difference = difference_interval(changes, largest, is_binary=rewards <= {0.0, 1.0}) if changes else None
    gained, unpaired = sum(change > 0 for change in changed), len(both) - len(changes)
    return PairedComparison(difference, len(changes), unpaired, gained, len(changed) - gained, p_value, verdict, method)


def _sign_flip_test(changes: Sequence[float], seed: int) -> tuple[float, str]:
    """Return the two-sided p-value of the mean of non-zero changes, and the name of the test."""
    sizes = [abs(change) for change in changes]
    if not sizes or min(sizes) >= max(sizes) * (1.0 - _ROUNDING):
        gained = sum(change > 0 for change in changes)
        return mcnemar_exact(gained, len(changes) - gained), SIGN_TEST
    whole, observed = math.fsum(sizes), abs(math.fsum(changes))
    # A sum with signs is twice the sum of the positive ones minus the whole.
    low, high = (whole - observed) / 2.0 + _ROUNDING * whole, (whole + observed) / 2.0 - _ROUNDING * whole
    if len(sizes) <= _MOST_EXACT:
        sums = _subset_sums(sizes)
        return sum(total <= low or total >= high for total in sums) / len(sums), f"{SIGN_FLIP_TEST}, exact"
    rng = random.Random(seed)
    rng.shuffle(sizes)
    sizes += [0.0] * (-len(sizes) % _TABLE)
    tables = [_subset_sums(sizes[start : start + _TABLE]) for start in range(0, len(sizes), _TABLE)]
    extreme = 0
    for _ in range(FLIPS):
        total = sum(map(getitem, tables, rng.randbytes(len(tables))))
        extreme += total <= low or total >= high
    return (extreme + 1) / (FLIPS + 1), f"{SIGN_FLIP_TEST}, {FLIPS:,} draws"


def _subset_sums(sizes: Sequence[float]) -> list[float]:
    sums = [0.0]
    for size in sizes:
        sums += [total + size for total in sums]
    return sums


@explain_fields
@dataclass(frozen=True)
class Stopping:
    """The result of a sequential test during an evaluation."""

    verdict: Verdict
    """Verdict against the threshold or the baseline."""
    p_value: float
    """P-value that is valid at any time of the evaluation."""
    tasks_run: int
    tasks_saved: int
    """Number of tasks that did not run because the verdict was reached."""
    against: str
    """`baseline` or `threshold 0.8`."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Assumed range of rewards."""
    note: str = ""
    """Reason why there was no test; empty if there was one."""

    def text(self) -> str:
        """Return a one-line description."""
        if self.note:
            return self.note
        verdict = "no verdict against" if self.verdict == "no evidence" else f"{self.verdict} than"
        ended = f"{verdict} {self.against} after {counted(self.tasks_run, 'task')}"
        return f"{ended}, p = {self.p_value:.2g}; {self.tasks_saved} saved"


class SequentialTest:
    """A test of whether the mean of bounded changes is 0, valid for any number of interim analyses.

    The test bets on better and on worse, each with half of the significance. If the mean is 0, the expected capital of
    a bet is at most 1 at any stopping time. By Ville's inequality, the probability that it ever reaches 1/a is at most
    a. The capital is divided among fixed fractions of the largest stake, each of which bets on every change. This needs
    no tuning, and the order of the changes does not matter.

    Args:
        largest_loss: Size of the most negative possible change.
        largest_gain: Size of the most positive possible change.
    """

    def __init__(self, largest_loss: float, largest_gain: float) -> None:
        shares = [(2 * k + 1) / 32 for k in range(16)]  # fractions of the largest stake that cannot lose everything
        self._stakes = [share / largest_loss for share in shares], [-share / largest_gain for share in shares]
        self._log_capitals = [0.0] * len(shares), [0.0] * len(shares)

    def add(self, changes: Iterable[float], significance: float) -> tuple[Verdict, float]:
        """Add changes, and return the verdict over all changes with its two-sided p-value."""
        for change in changes:
            for logs, stakes in zip(self._log_capitals, self._stakes, strict=True):
                for place, stake in enumerate(stakes):
                    logs[place] += math.log1p(stake * change)
        better, worse = map(_p_value_of_bet, self._log_capitals)
        p_value = min(1.0, 2.0 * min(better, worse))
        if p_value >= significance:
            return "no evidence", p_value
        return ("better" if better < worse else "worse"), p_value


def _p_value_of_bet(logs: Sequence[float]) -> float:
    """Return the reciprocal of the capital."""
    most = max(logs)
    log_capital = most + math.log(math.fsum(math.exp(log - most) for log in logs) / len(logs))
    return math.exp(min(0.0, -log_capital))
