"""From the measurements of one rule to alarms: one when the condition begins, one when it is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentlightning.training.alarms.rule import Rule
from agentlightning.training.progress import StepFigures

AlarmState = Literal["raised", "over"]


@dataclass(frozen=True, slots=True)
class Alarm:
    """That a condition began, or that it is over."""

    name: str
    """Of the rule."""
    state: AlarmState
    """`raised`: it began. `over`: it has ended."""
    step: int
    """After which it began or ended."""
    since: int
    """The step after which it was raised; for `raised` the same as `step`."""
    value: float
    """The figure that was compared."""
    threshold: float
    """What it was compared with."""
    text: str
    """The finding with its values, in one sentence."""
    what_to_try: str
    """What to look at or to change; empty for `over`."""

    @property
    def line(self) -> str:
        """The alarm as one line for people."""
        if self.state == "over":
            return f"step {self.step}: alarm {self.name} (since step {self.since}) is over: {self.text}"
        return f"step {self.step}: alarm {self.name}: {self.text}. To try: {self.what_to_try}"

    def data(self) -> dict[str, Any]:
        """Return what an `alarm` record holds beside its name and its text."""
        fields = ("state", "since", "value", "threshold", "what_to_try")
        return {field: getattr(self, field) for field in fields}


class Watch:
    """Watches one condition over the steps of a run. Its state follows from the steps that it has seen alone."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.since: int | None = None
        """The step after which the alarm was raised; None while there is none."""
        self._in_a_row = 0

    def see(self, steps: Sequence[StepFigures]) -> Alarm | None:
        """Return an alarm if the last of `steps` (all so far) begins one or ends it."""
        measurement = self.rule.measure(steps)
        if measurement is None:
            return None  # the figures do not tell: the count of steps in a row stays
        if self.since is None:
            turns, needed = measurement.is_bad, self.rule.patience
        else:
            turns, needed = measurement.is_fine, self.rule.rest
        self._in_a_row = self._in_a_row + 1 if turns else 0
        if self._in_a_row < needed:
            return None
        self._in_a_row = 0
        step, since = steps[-1].step, self.since
        self.since = step if since is None else None
        return Alarm(
            name=self.rule.name,
            state="raised" if since is None else "over",
            step=step,
            since=step if since is None else since,
            value=measurement.value,
            threshold=measurement.threshold,
            text=measurement.text,
            what_to_try=self.rule.what_to_try if since is None else "",
        )
