"""Advantages: hand-computed values and invariants."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.algorithm.grpo.losses.advantages import group_advantages, relative_advantages


def test_advantages_of_a_hand_computed_group() -> None:
    # mean 0.5, population deviation 0.5
    assert relative_advantages([1.0, 0.0, 1.0, 0.0], eps=0.0) == [1.0, -1.0, 1.0, -1.0]
    # mean 0.25, deviation sqrt(3)/4: (1 - 0.25) / 0.4330 = 1.7321
    found = relative_advantages([1.0, 0.0, 0.0, 0.0], eps=0.0)
    assert found == pytest.approx([math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3)])
    assert relative_advantages([1.0, 0.0, 0.0, 0.0], scale_rewards="none") == [0.75, -0.25, -0.25, -0.25]


def test_a_group_without_differences_has_no_advantage() -> None:
    assert relative_advantages([0.1, 0.1, 0.1]) == [0.0, 0.0, 0.0]
    assert relative_advantages([3.0]) == [0.0]
    assert relative_advantages([]) == []


def test_groups_do_not_see_each_other() -> None:
    assert group_advantages([1.0, 5.0, 0.0, 5.0], ["a", "b", "a", "b"], eps=0.0) == [1.0, 0.0, -1.0, 0.0]
    with pytest.raises(ValueError, match="one group per reward"):
        group_advantages([1.0], [])
    with pytest.raises(ValueError, match="finite"):
        group_advantages([math.nan, 1.0], [0, 0])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12), st.randoms())
def test_advantages_sum_to_zero_and_follow_the_rollouts(rewards: list[float], rng: object) -> None:
    found = relative_advantages(rewards)
    assert sum(found) == pytest.approx(0.0, abs=1e-6)
    order = list(range(len(rewards)))
    rng.shuffle(order)  # type: ignore[attr-defined]
    assert relative_advantages([rewards[i] for i in order]) == pytest.approx([found[i] for i in order], abs=1e-6)
