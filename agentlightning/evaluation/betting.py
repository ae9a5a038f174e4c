"""Testing by betting: a p-value that is valid at whatever time one looks.

Source: Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", J. R.
Stat. Soc. B 86 (2024) 1-27: under "no better" the capital of a bet on bounded rewards has a mean of 1 at most at any
stopping time, so that by Ville's inequality it ever reaches 1/a with a chance of a at most. The bet is a diversified
one: the capital is shared among fixed fractions of the largest bet, each of which is laid on every task. It needs no
tuning, and the order of the tasks seen does not matter. Each of the two directions has half of the significance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from agentlightning.evaluation.statistics import Verdict
from agentlightning.field_help import explain_fields

_FRACTIONS = tuple((2 * k + 1) / 32 for k in range(16))
"""Shares of the largest bet that cannot lose everything."""


@explain_fields
@dataclass(frozen=True)
class Stopping:
    """The end of an evaluation with a sequential test."""

    verdict: Verdict
    """Against the threshold, or the baseline."""
    p_value: float
    """Valid at any time."""
    tasks_run: int
    tasks_saved: int
    """Tasks that were not run, since the verdict was sure."""
    against: str
    """`baseline` or `threshold 0.8`."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """The bounds that rewards were assumed to have."""
    note: str = ""
    """Why there was no test; empty if there was one."""

    def text(self) -> str:
        """Return it in a line."""
        if self.note:
            return self.note
        sure = "no verdict against" if self.verdict == "no evidence" else f"{self.verdict} than"
        return f"{sure} {self.against} after {self.tasks_run} tasks, p = {self.p_value:.2g}; {self.tasks_saved} saved"


class Bet:
    """The capital of a bet that the mean of changes is above 0.

    Args:
        deepest: Size of the largest loss that there can be.
    """

    def __init__(self, deepest: float) -> None:
        self._bets = [fraction / deepest for fraction in _FRACTIONS]
        self._logs = [0.0] * len(self._bets)

    def add(self, changes: Iterable[float]) -> None:
        """Play a round for each change, none of which may be below `-deepest`."""
        for change in changes:
            if change:
                for place, bet in enumerate(self._bets):
                    self._logs[place] += math.log1p(bet * change)

    @property
    def p_value(self) -> float:
        """One over the capital: a p-value at any time."""
        most = max(self._logs)
        log_capital = most + math.log(math.fsum(math.exp(log - most) for log in self._logs) / len(self._logs))
        return math.exp(min(0.0, -log_capital))


def judge(bets: tuple[Bet, Bet], changes: Iterable[float], significance: float) -> tuple[Verdict, float]:
    """Return the verdict over all changes so far, and its two-sided p-value.

    `bets`: on better and on worse; they remember. `changes`: those that are new, each a reward less what is to beat.
    """
    up, down = bets
    changes = list(changes)
    up.add(changes)
    down.add(-change for change in changes)
    p_value = min(1.0, 2.0 * min(up.p_value, down.p_value))
    if p_value >= significance:
        return "no evidence", p_value
    return ("better" if up.p_value < down.p_value else "worse"), p_value
