"""What a rule is: its thresholds, and a measurement out of the figures of a run's steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from agentlightning.errors import BadRequestError
from agentlightning.training.progress import StepFigures


@dataclass(frozen=True, slots=True)
class Measurement:
    """The finding of a rule after a step."""

    value: float
    """The figure that is compared."""
    threshold: float
    """What it is compared with."""
    is_bad: bool
    """The value is beyond the threshold."""
    is_fine: bool
    """It is on the right side by the rule's margin. Neither bad nor fine: an alarm stays as it is."""
    text: str
    """The finding as one sentence with its values, without a full stop."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One condition. Subclasses name their thresholds as further fields.

    Raises:
        BadRequestError: a threshold is no finite number of at least 0, or `patience` no whole number of at least 1.
    """

    name: ClassVar[str]
    """Of its alarms."""
    what_to_try: ClassVar[str]
    """What to look at or to change, the most likely first."""

    patience: int = 2
    """So many steps in a row have to be bad before there is an alarm, and so many fine before it is over, unless the
    rule says otherwise."""
    margin: float = 0.1
    """A value is fine once it is on the right side of the threshold by this share of the threshold."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            whole = isinstance(field.default, int)
            lowest = 1 if whole else 0
            kind = int if whole else (int, float)
            if isinstance(value, bool) or not isinstance(value, kind) or not lowest <= value < math.inf:
                wanted = "a whole number of at least 1" if whole else "a number of at least 0"
                raise BadRequestError(f"alarms: {self.name}.{field.name} must be {wanted}; got {value!r}")

        if self.margin >= 1:
            raise BadRequestError(f"alarms: {self.name}.margin is a share, below 1; got {self.margin!r}")

    @property
    def rest(self) -> int:
        """So many steps in a row have to be fine before an alarm is over."""
        return self.patience

    def measure(self, steps: Sequence[StepFigures]) -> Measurement | None:
        """Return the measurement after the last of `steps`: all steps of the run so far, in order and at least one.
        None where the figures do not tell."""
        raise NotImplementedError

    def above(self, value: float, threshold: float, text: str) -> Measurement:
        """Return a measurement that is bad above the threshold."""
        return Measurement(value, threshold, value > threshold, value <= threshold - abs(threshold) * self.margin, text)

    def below(self, value: float, threshold: float, text: str) -> Measurement:
        """Return a measurement that is bad below the threshold."""
        return Measurement(value, threshold, value < threshold, value >= threshold + abs(threshold) * self.margin, text)


def number(value: object) -> float | None:
    """Return a figure as a finite number; None where there is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def updated(figures: StepFigures, name: str) -> float | None:
    """Return a figure of a step's update; None if the step took none."""
    return number(figures.update.get(name)) if number(figures.update.get("steps")) else None


def start_of(values: Sequence[float | None], count: int) -> float | None:
    """Return the mean of the first `count` values that there are, to which later ones are compared; None before there
    is a later one."""
    known = [value for value in values if value is not None]
    return math.fsum(known[:count]) / count if len(known) > count else None
