"""What is made of a reward before it is compared."""

from __future__ import annotations

import pytest

from agentlightning.training.losses.advantages import overlong_penalty, weighted_reward


def test_a_penalty_falls_in_a_line_over_the_last_tokens() -> None:
    assert [overlong_penalty(length, 20, 4) for length in (0, 16, 17, 18, 20, 25)] == [0, 0, -0.25, -0.5, -1, -1]


def test_only_dimensions_with_a_weight_count() -> None:
    assert weighted_reward({"right": 1.0, "short": 0.5, "seconds": 900.0}, {"right": 2.0, "short": -1.0}) == 1.5
    with pytest.raises(KeyError, match="short"):
        weighted_reward({"right": 1.0}, {"right": 1.0, "short": 1.0})
