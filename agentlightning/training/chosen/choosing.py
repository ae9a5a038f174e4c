"""Which rollouts are trained: by hand, by a threshold of their reward, the best of each task, the best of all. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from agentlightning.types import Rollout

LeftOut = Literal["not_named", "not_picked", "below_min_reward", "not_best_of_task", "not_in_top_share"]
"""Why a rollout with a reward is not chosen: its id was not given; the function said no; or by its reward."""
Pick: TypeAlias = Callable[[Rollout, float], bool]
"""Says of a rollout and its reward whether it may be chosen."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One rollout that can be chosen."""

    rollout_id: str
    task: object
    """Equal for the rollouts of one task; hashable."""
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a rollout must be to be chosen; the parts apply one after the other, each to what the last one has left."""

    min_reward: float | None = None
    best_per_task: int | None = None
    top_share: float | None = None


def left_out(candidates: Sequence[Candidate], rule: Rule) -> dict[str, LeftOut]:
    """Return why each rollout that is not chosen is left out, by its id. Of equal rewards the first ones count."""
    reasons: dict[str, LeftOut] = {}
    rest = list(candidates)
    if rule.min_reward is not None:
        rest = _keep(
            rest, {i for i, one in enumerate(rest) if one.reward >= rule.min_reward}, "below_min_reward", reasons
        )
    if rule.best_per_task is not None:
        of_task: Counter[object] = Counter()
        best: set[int] = set()
        for i in _by_reward(rest):
            of_task[rest[i].task] += 1
            if of_task[rest[i].task] <= rule.best_per_task:
                best.add(i)
        rest = _keep(rest, best, "not_best_of_task", reasons)
    if rule.top_share is not None and rest:
        count = max(1, round(rule.top_share * len(rest)))
        _keep(rest, set(_by_reward(rest)[:count]), "not_in_top_share", reasons)
    return reasons


def counts_text(reasons: Mapping[str, str]) -> str:
    """Return how many rollouts each reason leaves out, in words."""
    return ", ".join(f"{count} {reason}" for reason, count in Counter(reasons.values()).most_common()) or "none"


def _by_reward(candidates: Sequence[Candidate]) -> list[int]:
    return sorted(range(len(candidates)), key=lambda i: -candidates[i].reward)


def _keep(
    candidates: Sequence[Candidate], chosen: set[int], reason: LeftOut, reasons: dict[str, LeftOut]
) -> list[Candidate]:
    reasons |= {one.rollout_id: reason for i, one in enumerate(candidates) if i not in chosen}
    return [one for i, one in enumerate(candidates) if i in chosen]
