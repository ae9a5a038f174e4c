"""Advantages: hand-computed values and invariants."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.training.losses.advantages import rollout_advantages, turn_advantages, weighted_reward

ALL = ["grpo", "rloo", "maxrl", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]


def test_advantages_of_a_hand_computed_group() -> None:
    # mean 0.25, deviation of the sample sqrt((0.75**2 + 3 * 0.25**2) / 3) = 0.5
    one = [1.0, 0.0, 0.0, 0.0]
    assert rollout_advantages(one, "aaaa", eps=0.0) == pytest.approx([1.5, -0.5, -0.5, -0.5])
    assert rollout_advantages(one, "aaaa", scale_rewards="none") == [0.75, -0.25, -0.25, -0.25]
    # less the mean of the three others
    assert rollout_advantages(one, "aaaa", advantage="rloo") == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    # divided by the mean: one success in four weighs as much as three together lose
    assert rollout_advantages(one, "aaaa", advantage="maxrl") == pytest.approx([3.0, -1.0, -1.0, -1.0])


@pytest.mark.parametrize("advantage", ALL)
def test_rewards_without_differences_have_no_advantage(advantage: Any) -> None:
    assert rollout_advantages([0.1, 0.1, 0.1], "aaa", advantage=advantage, tokens=[1, 2, 3]) == [0.0, 0.0, 0.0]
    assert rollout_advantages([3.0], "a", advantage=advantage, tokens=[5]) == [0.0]
    assert rollout_advantages([], "", advantage=advantage, tokens=[]) == []


def test_groups_do_not_see_each_other() -> None:
    advantages = rollout_advantages([1.0, 5.0, 0.0, 5.0], ["a", "b", "a", "b"], eps=0.0)
    assert advantages == pytest.approx([math.sqrt(0.5), 0.0, -math.sqrt(0.5), 0.0])


@pytest.mark.parametrize(
    ("rewards", "groups", "settings", "says"),
    [
        ([1.0], [], {}, "Expected one group per reward"),
        ([math.nan, 1.0], [0, 0], {}, "finite"),
        ([1.0], [0], {"advantage": "gae"}, "advantage must be one of 'grpo', 'rloo'"),
        ([1.0], [0], {"advantage": "reinforce_plus_plus"}, "requires the number of tokens"),
        ([1.0, -0.5], [0, 0], {"advantage": "maxrl"}, "rewards must be 0 or more; got -0.5"),
    ],
)
def test_rewards_that_cannot_be_compared_are_refused(rewards: Any, groups: Any, settings: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rollout_advantages(rewards, groups, **settings)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12), st.randoms(), st.sampled_from(ALL))
def test_advantages_sum_to_zero_and_follow_the_rollouts(rewards: list[float], rng: Any, advantage: Any) -> None:
    rewards = [abs(reward) for reward in rewards] if advantage == "maxrl" else rewards
    tokens = [1 + i % 3 for i in range(len(rewards))]
    advantages = rollout_advantages(rewards, [0] * len(rewards), advantage=advantage, tokens=tokens)
    weights = tokens if "plus" in advantage else [1] * len(rewards)
    assert sum(a * w for a, w in zip(advantages, weights, strict=True)) == pytest.approx(0.0, abs=1e-5)
    order = list(range(len(rewards)))
    rng.shuffle(order)
    again = rollout_advantages(
        [rewards[i] for i in order], [0] * len(order), advantage=advantage, tokens=[tokens[i] for i in order]
    )
    assert again == pytest.approx([advantages[i] for i in order], abs=1e-5)


def test_returns_of_calls_are_discounted_and_compared_with_those_of_the_same_key() -> None:
    # returns with gamma 0.5: 1 + 0.5 * 2 = 2 and 2; 0 + 0.5 * 0 = 0 and 0; a third rollout ended after one call: 4
    rewards, keys = [[1.0, 2.0], [0.0, 0.0], [4.0]], ["ab", "ab", "a"]
    none = turn_advantages(rewards, keys, gamma=0.5, scale_rewards="none")
    assert none == [pytest.approx([0.0, 1.0]), pytest.approx([-2.0, -1.0]), pytest.approx([2.0])]
    scaled = turn_advantages(rewards, keys, gamma=0.5, eps=0.0)  # deviations 2 and sqrt(2)
    assert scaled == [pytest.approx([0.0, 0.5**0.5]), pytest.approx([-1.0, -(0.5**0.5)]), pytest.approx([1.0])]
    assert turn_advantages(rewards, keys, gamma=0.0, scale_rewards="none")[0] == pytest.approx([-2 / 3, 1.0])
    loo = turn_advantages(rewards, ["ab", "cd", "e"], advantage="rloo", scale_rewards="none")
    assert loo == [[0.0, 0.0], [0.0, 0.0], [0.0]]  # no key is that of two calls
    assert turn_advantages([], []) == []


def test_only_dimensions_with_a_weight_count() -> None:
    assert weighted_reward({"right": 1.0, "short": 0.5, "seconds": 900.0}, {"right": 2.0, "short": -1.0}) == 1.5
    with pytest.raises(KeyError, match="short"):
        weighted_reward({"right": 1.0}, {"right": 1.0, "short": 1.0})
