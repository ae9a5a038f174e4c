"""Alarms of a training run: one when a condition begins, one when it is over.

The conditions are in `alarm_rules.py`; the setting `alarms=` changes their thresholds.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from agentlightning.errors import BadRequestError, closest_name
from agentlightning.training.alarm_rules import RULES, Rule
from agentlightning.training.progress import StepFigures

AlarmSettings = Literal["default", "none"] | Mapping[str, Mapping[str, float] | None]
"""`default`: every rule. `none`: no rule. A mapping changes thresholds of some rules, by rule and threshold; None in
the place of thresholds switches a rule off."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """The begin or the end of a condition."""

    name: str
    """Of the rule."""
    state: Literal["raised", "over"]
    step: int
    """The step after which the condition began or ended."""
    since: int
    """The step after which the alarm was raised; for `raised` the same as `step`."""
    value: float
    threshold: float
    """What the value was compared with."""
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
        self._since: int | None = None
        self._in_a_row = 0

    def see(self, steps: Sequence[StepFigures]) -> Alarm | None:
        """Return an alarm if the last of `steps` (all so far) begins one or ends it."""
        measurement = self.rule.measure(steps)
        if measurement is None:
            return None  # the count of steps in a row stays
        thresholds = self.rule.thresholds
        if self._since is None:
            turns, needed = measurement.is_bad, thresholds["patience"]
        else:
            turns, needed = measurement.is_fine(thresholds["margin"]), self.rule.rest(thresholds)
        self._in_a_row = self._in_a_row + 1 if turns else 0
        if self._in_a_row < needed:
            return None
        self._in_a_row = 0
        step, since = steps[-1].step, self._since
        self._since = step if since is None else None
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


class Alarms:
    """Watches the steps of one run. The alarms depend on the figures of the steps alone: a run that goes on shows it
    the earlier ones first."""

    def __init__(self, settings: object = "default", other_names: Mapping[str, str] | None = None) -> None:
        """`other_names`: the algorithm's names of the settings that the rules name as GRPO does."""
        self._other_names = other_names or {}
        self._watches = [Watch(rule) for rule in make_rules(settings)]
        self._steps: list[StepFigures] = []

    def see(self, figures: StepFigures) -> list[Alarm]:
        """Return the alarms that a step begins or ends."""
        self._steps.append(figures)
        alarms = [alarm for watch in self._watches if (alarm := watch.see(self._steps)) is not None]
        return [dataclasses.replace(alarm, what_to_try=self._renamed(alarm.what_to_try)) for alarm in alarms]

    def _renamed(self, what_to_try: str) -> str:
        """Return the text with the names that the algorithm has; two that are one here are named once."""
        for name, own in self._other_names.items():
            what_to_try = re.sub(rf"\b{name}\b", own, what_to_try)
        return re.sub(r"\b(\w+) and \1\b", r"\1", what_to_try)


def make_rules(settings: object) -> list[Rule]:
    """Return the rules of a run, from its setting `alarms`; see `AlarmSettings`.

    Raises:
        BadRequestError: a rule or a threshold is unknown (names the nearest right one), or a value out of its range.
    """
    if settings in ("default", "none"):
        return [] if settings == "none" else list(RULES.values())
    if not isinstance(settings, Mapping):
        raise BadRequestError(
            "alarms must be 'default', 'none', or thresholds by rule such as {'entropy_collapse': {'share': 0.05}, "
            f"'token_drift': None}}; got {settings!r}"
        )
    changes = cast("Mapping[Any, Any]", settings)
    for name in changes:
        if name not in RULES:
            raise BadRequestError(f"alarms: there is no rule {name!r}{_hint(name, RULES)}")
    return [_changed(rule, changes.get(name, {})) for name, rule in RULES.items() if changes.get(name, {}) is not None]


def _changed(rule: Rule, changes: object) -> Rule:
    """Return a rule with other thresholds, each checked."""
    if not isinstance(changes, Mapping):
        known = ", ".join(rule.thresholds)
        raise BadRequestError(f"alarms: {rule.name} takes thresholds by name, of {known}, or None; got {changes!r}")
    for name in cast("Mapping[Any, Any]", changes):
        if name not in rule.thresholds:
            raise BadRequestError(f"alarms: {rule.name} has no threshold {name!r}{_hint(name, rule.thresholds)}")
    thresholds: dict[str, Any] = {**rule.thresholds, **changes}
    for name, default in rule.thresholds.items():
        value, whole = thresholds[name], isinstance(default, int)
        kind, lowest = (int, 1) if whole else ((int, float), 0)
        if isinstance(value, bool) or not isinstance(value, kind) or not lowest <= value < math.inf:
            wanted = "a whole number of at least 1" if whole else "a number of at least 0"
            raise BadRequestError(f"alarms: {rule.name}.{name} must be {wanted}; got {value!r}")
    if thresholds["margin"] >= 1:
        raise BadRequestError(f"alarms: {rule.name}.margin is a share, below 1; got {thresholds['margin']!r}")
    if "factor" in thresholds and thresholds["factor"] <= 1:
        raise BadRequestError(f"alarms: {rule.name}.factor must be above 1; got {thresholds['factor']!r}")
    return dataclasses.replace(rule, thresholds=thresholds)


def _hint(name: object, known: Mapping[str, Any]) -> str:
    near = closest_name(name, list(known)) if isinstance(name, str) else None
    return f". Did you mean {near!r}?" if near else f"; there are {', '.join(known)}"
