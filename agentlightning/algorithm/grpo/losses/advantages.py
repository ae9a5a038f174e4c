"""Advantages of rollouts relative to their group, as pure functions.

A group holds the rollouts of one task under one version of the weights. The statistics are taken over rollouts, never
over token rows: a rollout that was split into several rows counts once, and all its rows get its advantage.

Departures from the papers: the standard deviation is that of the population (divided by G, not G - 1), so that a group
of one is defined (and gives zero), and a group whose rewards are all equal gives exact zeros.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Literal

ScaleRewards = Literal["group", "none"]


def relative_advantages(
    rewards: Sequence[float], *, scale_rewards: ScaleRewards = "group", eps: float = 1e-6
) -> list[float]:
    """Return how much better each rollout of one group did than the group's mean.

    `scale_rewards="group"` is GRPO: `A_i = (r_i - mean(r)) / (std(r) + eps)` (DeepSeekMath, arXiv:2402.03300, section
    4.1.2).
    `scale_rewards="none"` is Dr. GRPO: `A_i = r_i - mean(r)` (arXiv:2503.20783, section 3.2), which does not give hard
    and easy tasks more weight than the others.

    Shapes: rewards: (G,), result: (G,).

    Raises:
        ValueError: A reward is NaN or infinite, or `scale_rewards` is unknown.
    """
    if scale_rewards not in ("group", "none"):
        raise ValueError(f"scale_rewards must be 'group' (GRPO) or 'none' (Dr. GRPO), not {scale_rewards!r}")
    for position, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise ValueError(f"reward {position} of the group is {reward}: exclude rollouts without a finite reward")
    if not rewards or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if scale_rewards == "none":
        return centred
    std = math.sqrt(math.fsum(value * value for value in centred) / len(centred))
    return [value / (std + eps) for value in centred]


def group_advantages(
    rewards: Sequence[float], groups: Sequence[Hashable], *, scale_rewards: ScaleRewards = "group", eps: float = 1e-6
) -> list[float]:
    """Return the advantage of each rollout within its own group.

    Shapes: rewards: (N,) one per rollout, groups: (N,) its group's key (the task), result: (N,).

    Raises:
        ValueError: The lengths differ, or as in `relative_advantages`.
    """
    if len(rewards) != len(groups):
        raise ValueError(f"one group per reward is needed: {len(rewards)} rewards, {len(groups)} groups")
    members: defaultdict[Hashable, list[int]] = defaultdict(list)
    for position, group in enumerate(groups):
        members[group].append(position)
    advantages = [0.0] * len(rewards)
    for positions in members.values():
        values = relative_advantages([rewards[p] for p in positions], scale_rewards=scale_rewards, eps=eps)
        for position, value in zip(positions, values, strict=True):
            advantages[position] = value
    return advantages
