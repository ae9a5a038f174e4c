"""Advantages: hand-computed values and invariants."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.training.losses.advantages import rollout_advantages, several_advantages

ALL = ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]


def test_advantages_of_a_hand_computed_group() -> None:
    # mean 0.25, deviation of the sample sqrt((0.75**2 + 3 * 0.25**2) / 3) = 0.5
    one = [1.0, 0.0, 0.0, 0.0]
    assert rollout_advantages(one, "aaaa", eps=0.0) == pytest.approx([1.5, -0.5, -0.5, -0.5])
    assert rollout_advantages(one, "aaaa", scale_rewards="none") == [0.75, -0.25, -0.25, -0.25]
    # less the mean of the three others
    assert rollout_advantages(one, "aaaa", advantage="rloo") == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


def test_a_batch_is_scaled_by_the_deviation_of_all_its_rewards() -> None:
    rewards = [1.0, 0.0, 5.0, 3.0]
    found = rollout_advantages(rewards, "aabb", scale_rewards="batch", eps=0.0)
    assert found == pytest.approx([x / statistics.stdev(rewards) for x in (0.5, -0.5, 1.0, -1.0)])


def test_whitened_rewards_count_each_token_once() -> None:
    found = rollout_advantages([1.0, 0.0], "ab", advantage="reinforce_plus_plus", tokens=[3, 1])
    spread = [1.0, 1.0, 1.0, 0.0]
    expected = [(x - 0.75) / math.sqrt(statistics.variance(spread) + 1e-8) for x in (1.0, 0.0)]
    assert found == pytest.approx(expected)
    baseline = rollout_advantages(
        [5.0, 4.0, 1.0, 0.0], "aabb", advantage="reinforce_plus_plus_baseline", tokens=[1, 1, 1, 1]
    )
    assert baseline == pytest.approx([math.sqrt(3) / 2, -math.sqrt(3) / 2] * 2)
    with pytest.raises(ValueError, match="needs the tokens"):
        rollout_advantages([1.0, 0.0], "ab", advantage="reinforce_plus_plus")


def test_several_dimensions_are_compared_each_by_itself() -> None:
    rewards = [{"right": 1.0, "cost": 900.0}, {"right": 0.0, "cost": 100.0}, {"right": 0.0, "cost": 500.0}]
    found = several_advantages(rewards, {"right": 1.0, "cost": -1.0}, "aaa", eps=0.0)
    right, cost = (rollout_advantages([r[name] for r in rewards], "aaa", eps=0.0) for name in ("right", "cost"))
    sums = [a - b for a, b in zip(right, cost, strict=True)]
    assert found == pytest.approx([x / statistics.stdev(sums) for x in sums])


@pytest.mark.parametrize("advantage", ALL)
def test_rewards_without_differences_have_no_advantage(advantage: Any) -> None:
    assert rollout_advantages([0.1, 0.1, 0.1], "aaa", advantage=advantage, tokens=[1, 2, 3]) == [0.0, 0.0, 0.0]
    assert rollout_advantages([3.0], "a", advantage=advantage, tokens=[5]) == [0.0]
    assert rollout_advantages([], "", advantage=advantage, tokens=[]) == []


def test_groups_do_not_see_each_other() -> None:
    found = rollout_advantages([1.0, 5.0, 0.0, 5.0], ["a", "b", "a", "b"], eps=0.0)
    assert found == pytest.approx([math.sqrt(0.5), 0.0, -math.sqrt(0.5), 0.0])
    with pytest.raises(ValueError, match="one group per reward"):
        rollout_advantages([1.0], [])
    with pytest.raises(ValueError, match="finite"):
        rollout_advantages([math.nan, 1.0], [0, 0])
    with pytest.raises(ValueError, match="advantage must be one of 'grpo', 'rloo'"):
        rollout_advantages([1.0], [0], advantage="gae")  # type: ignore[arg-type]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12), st.randoms(), st.sampled_from(ALL))
def test_advantages_sum_to_zero_and_follow_the_rollouts(rewards: list[float], rng: Any, advantage: Any) -> None:
    tokens = [1 + i % 3 for i in range(len(rewards))]
    found = rollout_advantages(rewards, [0] * len(rewards), advantage=advantage, tokens=tokens)
    weights = tokens if "plus" in advantage else [1] * len(rewards)
    assert sum(a * w for a, w in zip(found, weights, strict=True)) == pytest.approx(0.0, abs=1e-5)
    order = list(range(len(rewards)))
    rng.shuffle(order)
    again = rollout_advantages(
        [rewards[i] for i in order], [0] * len(order), advantage=advantage, tokens=[tokens[i] for i in order]
    )
    assert again == pytest.approx([found[i] for i in order], abs=1e-5)
