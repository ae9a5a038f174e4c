"""What is made of a rollout's reward before it is compared: dimensions, length, divergence. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping


def weighted_reward(dimensions: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Return the weighted sum of the reward dimensions that have a weight.

    Raises:
        KeyError: a dimension with a weight is not there.
    """
    return sum(weight * dimensions[name] for name, weight in weights.items())


def overlong_penalty(length: int, max_length: int, cache: int) -> float:
    """Return what is added to the reward of a completion of `length` tokens: 0 up to `max_length - cache`, then falling
    in a line to -1 at `max_length`, and -1 beyond (DAPO, arXiv:2503.14476, equation 13)."""
    return -min(1.0, max(0.0, (length - (max_length - cache)) / cache))
