"""Rows of many lengths with recorded log-probabilities, as engines return them."""

from __future__ import annotations

import random

from agentlightning.adapter.rows.samples import Sample


def make_rows(count: int, vocabulary: int, *, seed: int = 0, shortest: int = 4, longest: int = 40) -> list[Sample]:
    """Return rows of `count / 2` rollouts, each with two stretches of trained tokens."""
    rng = random.Random(seed)
    rows: list[Sample] = []
    for number in range(count):
        length = rng.randint(shortest, longest)
        mask = [0, 0, *(int(position % 5 > 1) for position in range(length - 2))]
        logprobs = [-rng.uniform(2, 6) * bit for bit in mask]
        tokens = [rng.randrange(vocabulary) for _ in range(length)]
        rows.append(Sample(f"rollout-{number // 2}", "a", tokens, mask, logprobs, [], []))
    return rows


def make_advantages(count: int) -> list[float]:
    """Return one advantage per row, the same for the rows of a rollout."""
    return [(-1.0) ** (number // 2) * (1 + number // 4) / 4 for number in range(count)]
