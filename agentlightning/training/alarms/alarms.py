"""The rules of a run: which there are, with which thresholds, and what they say after each step."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal, cast

from agentlightning.errors import BadRequestError, closest_name
from agentlightning.training.alarms.rule import Rule
from agentlightning.training.alarms.rules.cut_off import CutOff
from agentlightning.training.alarms.rules.early_fall import EarlyFall
from agentlightning.training.alarms.rules.engine_mismatch import EngineMismatch
from agentlightning.training.alarms.rules.entropy_collapse import EntropyCollapse
from agentlightning.training.alarms.rules.equal_rewards import EqualRewards
from agentlightning.training.alarms.rules.held_out_drop import HeldOutDrop
from agentlightning.training.alarms.rules.infrastructure import Infrastructure
from agentlightning.training.alarms.rules.length_drift import LengthDrift
from agentlightning.training.alarms.rules.no_calls import NoCalls
from agentlightning.training.alarms.rules.nothing_trained import NothingTrained
from agentlightning.training.alarms.rules.policy_shift import PolicyShift
from agentlightning.training.alarms.rules.reference_distance import ReferenceDistance
from agentlightning.training.alarms.rules.reward_jump import RewardJump
from agentlightning.training.alarms.rules.stale_weights import StaleWeights
from agentlightning.training.alarms.rules.token_drift import TokenDrift
from agentlightning.training.alarms.watch import Alarm, Watch
from agentlightning.training.progress import StepFigures

AlarmSettings = Literal["default", "none"] | Mapping[str, Mapping[str, float] | None]
"""`default`: every rule. `none`: no rule. A mapping changes thresholds of some rules, by rule and threshold; None in
the place of thresholds switches a rule off."""

RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (
        *(CutOff, EarlyFall, EngineMismatch, EntropyCollapse, EqualRewards, HeldOutDrop, Infrastructure, LengthDrift),
        *(NoCalls, NothingTrained, PolicyShift, ReferenceDistance, RewardJump, StaleWeights, TokenDrift),
    )
}
"""Every rule by the name of its alarms."""


def make_rules(settings: object) -> list[Rule]:
    """Return the rules of a run, out of its setting `alarms`; see `AlarmSettings`.

    Raises:
        BadRequestError: a rule or a threshold is unknown (names the nearest right one), or a value out of its range.
    """
    if settings in ("default", "none"):
        return [] if settings == "none" else [rule() for rule in RULES.values()]
    if not isinstance(settings, Mapping):
        raise BadRequestError(
            "alarms must be 'default', 'none', or thresholds by rule such as {'entropy_collapse': {'share': 0.05}, "
            f"'token_drift': None}}; got {settings!r}"
        )
    of_rules = cast("Mapping[Any, Any]", settings)
    for name in of_rules:
        if name not in RULES:
            raise BadRequestError(f"alarms: there is no rule {name!r}{_hint(name, list(RULES))}")
    return [_make(kind, of_rules.get(name, {})) for name, kind in RULES.items() if of_rules.get(name, {}) is not None]


def _make(kind: type[Rule], thresholds: object) -> Rule:
    known = [field.name for field in dataclasses.fields(kind)]
    if not isinstance(thresholds, Mapping):
        raise BadRequestError(
            f"alarms: {kind.name} takes thresholds by name, of {', '.join(known)}, or None; got {thresholds!r}"
        )
    values = cast("Mapping[Any, Any]", thresholds)
    for name in values:
        if name not in known:
            raise BadRequestError(f"alarms: {kind.name} has no threshold {name!r}{_hint(name, known)}")
    return kind(**values)


def _hint(name: object, known: list[str]) -> str:
    near = closest_name(name, known) if isinstance(name, str) else None
    return f". Did you mean {near!r}?" if near else f"; there are {', '.join(known)}"


class Alarms:
    """Watches the steps of one run. What it says depends on the figures of the steps alone: a run that goes on shows it
    the earlier ones first."""

    def __init__(self, settings: object = "default", other_names: Mapping[str, str] | None = None) -> None:
        """`other_names`: what the algorithm calls the settings that the rules name as GRPO does."""
        self._other_names = other_names or {}
        self._watches = [Watch(rule) for rule in make_rules(settings)]
        self._steps: list[StepFigures] = []

    def see(self, figures: StepFigures) -> list[Alarm]:
        """Return the alarms that a step begins or ends."""
        self._steps.append(figures)
        seen = [alarm for watch in self._watches if (alarm := watch.see(self._steps)) is not None]
        return [dataclasses.replace(alarm, what_to_try=self._named(alarm.what_to_try)) for alarm in seen]

    def _named(self, what_to_try: str) -> str:
        """Return the text with the names that the algorithm has; two that are one here are named once."""
        for name, own in self._other_names.items():
            what_to_try = re.sub(rf"\b{name}\b", own, what_to_try)
        return re.sub(r"\b(\w+) and \1\b", r"\1", what_to_try)

    @property
    def raised(self) -> dict[str, int]:
        """The conditions that last, with the step since which each does."""
        return {watch.rule.name: watch.since for watch in self._watches if watch.since is not None}
