"""Advantages of the rollouts of a step, as pure functions.

A group holds the rollouts of one task under one version of the weights. Statistics are taken over rollouts, never over
token rows: a rollout that was split into several rows counts once, and all its rows get its advantage. Standard
deviations are those of a sample (divided by G - 1).

Difference from the papers: a group of one, and a group whose rewards are all equal, have advantages of exactly zero;
such groups are excluded from the step with a reason (`rows.py`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import fmean
from typing import get_args

from agentlightning.errors import BadRequestError
from agentlightning.training.loss_settings import Advantage, ScaleRewards

_SMALLEST = 1e-100
"""Smallest divisor of `maxrl`."""
_LARGEST = 1e100
"""Largest weighted reward: squares of larger ones, and their sums, are not finite."""


def rollout_advantages(
    rewards: Sequence[float],
    groups: Sequence[Hashable],
    *,
    advantage: Advantage = "grpo",
    scale_rewards: ScaleRewards = "group",
    tokens: Sequence[int] | None = None,
    eps: float = 1e-6,
) -> list[float]:
    """Return the advantage of each rollout of a step.

    - `grpo`: `A = (r - mean(group)) / (std + eps)`, std that of the `group` or of all rewards (`batch`), or 1 for
      `none` (DeepSeekMath, arXiv:2402.03300, section 4.1.2; Dr. GRPO, arXiv:2503.20783, section 3.2; Lite PPO,
      arXiv:2508.08221, section on normalization).
    - `rloo`: `A = r - mean(others of the group)` (arXiv:2402.14740, section on RLOO).
    - `maxrl`: `A = (r - mean(group)) / mean(group)` (MaxRL, arXiv:2602.02710: an unbiased estimate of the gradient of
      the log-likelihood of success, up to the order of the group's size).
    - `reinforce_plus_plus`: rewards minus their mean over the step, divided by their deviation over the step; with
      `_baseline` the group's mean is subtracted first (REINFORCE++, arXiv:2501.03262). As in VERL, each token counts
      once in these two statistics, so a rollout's weight is its length.

    Shapes: rewards: (N,) one per rollout; groups: (N,) the key of its group (the task); tokens: (N,) number of its
    trained tokens, for the last two; result: (N,).

    Args:
        eps: added to the deviation; VERL uses 1e-6, TRL 1e-4.

    Raises:
        ValueError: the lengths differ, a reward is NaN or its square is not finite, a reward is negative (`maxrl`), or
            `advantage` is unknown.
    """
    if advantage not in get_args(Advantage):
        raise ValueError(f"advantage must be one of {', '.join(map(repr, get_args(Advantage)))}; got {advantage!r}")
    if len(rewards) != len(groups):
        raise ValueError(f"Expected one group per reward; got {len(rewards)} rewards and {len(groups)} groups")
    for position, reward in enumerate(rewards):
        if not abs(reward) <= _LARGEST:
            raise ValueError(f"Reward {position} is {reward}. Exclude rollouts without a finite reward")
    if advantage == "grpo":
        if scale_rewards == "group":
            return _by_group(rewards, groups, lambda values: _divided(_centred(values), _deviation(values) + eps))
        centred = _by_group(rewards, groups, _centred)
        return _divided(centred, _deviation(rewards) + eps) if scale_rewards == "batch" else centred
    if advantage == "rloo":
        return _by_group(rewards, groups, _less_the_others)
    if advantage == "maxrl":
        if min(rewards, default=0.0) < 0:
            raise BadRequestError(
                f"advantage='maxrl' divides by the mean reward of a group, so rewards must be 0 or more; got "
                f"{min(rewards)}. Add a constant to the rewards, or use advantage='grpo'"
            )
        return _by_group(rewards, groups, _relative)
    if tokens is None or len(tokens) != len(rewards):
        raise ValueError(f"{advantage!r} requires the number of tokens of each rollout")
    baseline = advantage == "reinforce_plus_plus_baseline"
    return _whitened(_by_group(rewards, groups, _centred) if baseline else rewards, tokens)


def turn_advantages(
    rewards: Sequence[Sequence[float]],
    turns: Sequence[Sequence[Hashable]],
    *,
    gamma: float = 1.0,
    advantage: Advantage = "grpo",
    scale_rewards: ScaleRewards = "group",
    eps: float = 1e-6,
) -> list[list[float]]:
    """Return the advantage of each model call of the rollouts of a step.

    The return of a call is its reward plus `gamma` times the return of the next call of its rollout; returns with the
    same key are compared as `rollout_advantages` compares the rewards of a group (GiGPO, arXiv:2505.10978, equations 6
    and 7, with equal prompts as keys; turn-level GRPO, arXiv:2505.11821, with the numbers of turns).

    Shapes: rewards, turns: (N,) rollouts, with the reward and the key of each call in order; a call with the key None
        is not compared; result: the same, 0 for these calls.
    """
    returns: list[float] = []
    for own in rewards:
        later, of_rollout = 0.0, list[float]()
        for reward in reversed(own):
            later = reward + gamma * later
            of_rollout.append(later)
        returns += reversed(of_rollout)
    keys = [key for own in turns for key in own]
    pairs = [(value, key) for value, key in zip(returns, keys, strict=True) if key is not None]
    compared, groups = [value for value, _ in pairs], [key for _, key in pairs]
    flat = iter(rollout_advantages(compared, groups, advantage=advantage, scale_rewards=scale_rewards, eps=eps))
    return [[0.0 if key is None else next(flat) for key in own] for own in turns]


def several_advantages(
    dimensions: Sequence[Mapping[str, float]],
    weights: Mapping[str, float],
    groups: Sequence[Hashable],
    *,
    eps: float = 1e-6,
) -> list[float]:
    """Return the advantage of each rollout for rewards with several dimensions, each compared separately.

    Each dimension is scaled within its groups, and the weighted sum of the dimensions over the step (GDPO,
    arXiv:2601.05242), so that a dimension with a large spread does not dominate the others.

    Shapes: dimensions: (N,) rewards by name; groups: (N,); result: (N,).
    """
    sums = [0.0] * len(dimensions)
    for name, weight in weights.items():
        of_dimension = rollout_advantages([each[name] for each in dimensions], groups, eps=eps)
        sums = [total + weight * value for total, value in zip(sums, of_dimension, strict=True)]
    return _divided(_centred(sums), _deviation(sums) + eps)


def _by_group(
    rewards: Sequence[float], groups: Sequence[Hashable], function: Callable[[Sequence[float]], list[float]]
) -> list[float]:
    """Apply a function to each group, with zeros for a group of equal rewards."""
    members: defaultdict[Hashable, list[int]] = defaultdict(list)
    for position, group in enumerate(groups):
        members[group].append(position)
    results = [0.0] * len(rewards)
    for positions in members.values():
        values = [rewards[position] for position in positions]
        if min(values) != max(values):
            for position, value in zip(positions, function(values), strict=True):
                results[position] = value
    return results


def _centred(values: Sequence[float]) -> list[float]:
    mean = math.fsum(values) / max(1, len(values))
    return [value - mean for value in values]


def _less_the_others(values: Sequence[float]) -> list[float]:
    return [value * len(values) / (len(values) - 1) for value in _centred(values)]


def _relative(values: Sequence[float]) -> list[float]:
    return _divided(_centred(values), max(_SMALLEST, fmean(values)))


def _deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of a sample; 0 for fewer than two values."""
    return math.sqrt(math.fsum(value * value for value in _centred(values)) / max(1, len(values) - 1))


def _divided(values: Sequence[float], by: float) -> list[float]:
    return [value / by for value in values]


def _whitened(values: Sequence[float], tokens: Sequence[int]) -> list[float]:
    """Return the values minus their mean and divided by their deviation over all tokens; zeros if they are equal."""
    total = sum(tokens)
    if total < 2 or min(values) == max(values):
        return [0.0] * len(values)
    mean = math.fsum(value * count for value, count in zip(values, tokens, strict=True)) / total
    squares = math.fsum((value - mean) ** 2 * count for value, count in zip(values, tokens, strict=True))
    return _divided([value - mean for value in values], math.sqrt(squares / (total - 1) + 1e-8))


def weighted_reward(dimensions: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Return the weighted sum of the reward dimensions that have a weight."""
    return sum(weight * dimensions[name] for name, weight in weights.items())


def overlong_penalty(length: int, max_length: int, cache: int) -> float:
    """Return the term added to the reward of a completion of `length` tokens: 0 up to `max_length - cache`, then a
    linear fall to -1 at `max_length`, and -1 beyond (DAPO, arXiv:2503.14476, equation 13)."""
    return -min(1.0, max(0.0, (length - (max_length - cache)) / cache))
