"""A mean with its confidence interval, by the method that is named or that fits the values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from agentlightning.evaluation.resampling import bootstrap_interval
from agentlightning.evaluation.statistics import clopper_pearson, proportion, t_interval

IntervalMethod = Literal["wilson", "exact", "student", "bootstrap"]
"""`wilson` and `exact` (Clopper-Pearson): for values of 0 and 1. `student`: t over the values. `bootstrap`: BCa."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its confidence interval."""

    mean: float
    low: float
    high: float
    method: str = ""
    """The name of the method."""

    def text(self, *, signed: bool = False) -> str:
        """Return it as `0.500 (0.400 to 0.600)`; a single value has a mean only."""
        form = "+.3f" if signed else ".3f"
        if self.high == float("inf"):
            return f"{self.mean:{form}}"
        return f"{self.mean:{form}} ({self.low:{form}} to {self.high:{form}})"


def interval_of(
    values: Sequence[float], *, confidence: float = 0.95, method: IntervalMethod | None = None, seed: int = 0
) -> Interval | None:
    """Return the mean of the values with its interval; None without values.

    Without a `method`: Wilson's if all values are 0 or 1, else Student's t.

    Raises:
        ValueError: `confidence` is not between 0 and 1; an unknown method; one for 0 and 1, and there are others.
    """
    if method is not None and method not in get_args(IntervalMethod):
        raise ValueError(f"method={method!r} must be one of {', '.join(get_args(IntervalMethod))}")
    if not values:
        return None
    other = next((value for value in values if value not in (0.0, 1.0)), None)
    if method is None:
        method = "student" if other is not None else "wilson"
    if method in ("wilson", "exact"):
        if other is not None:
            raise ValueError(f"method={method!r} is for rewards of 0 and 1; got {other}. Take 'bootstrap' or 'student'")
        share = (proportion if method == "wilson" else clopper_pearson)(
            [value == 1.0 for value in values], confidence=confidence
        )
        return Interval(share.mean, share.low, share.high, method)
    if method == "bootstrap":
        return Interval(*bootstrap_interval(values, confidence=confidence, seed=seed), method)
    return Interval(*t_interval(values, confidence=confidence), method)
