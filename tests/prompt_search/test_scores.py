"""Weak points 7, 8 and 12: means, intervals, coverage."""

from __future__ import annotations

import math

import pytest

from agentlightning.evaluation.statistics import interval_of
from agentlightning.prompt_search.scores import check_missing, interval, score_of, sign_test
from tests.prompt_search.test_cases import result


def test_a_fault_counts_as_the_policy_says_and_in_the_coverage() -> None:
    """Weak points 7 and 8."""
    results = [result(reward) for reward in (1.0, 0.5, None, None)]
    for policy, mean in (("skip", 0.75), ("retry", 0.75), ("zero", 0.375)):
        score = score_of(results, policy)  # type: ignore[arg-type]
        assert (score.mean, score.tasks, score.scored, score.failures) == (mean, 4, 2, 2)
        assert (score.coverage, score.failure_rate) == (0.5, 0.5)
    assert score_of([result(None)]).mean is None


def test_the_interval_is_wilsons_for_zeros_and_ones() -> None:
    """Weak point 12: the choice knows how sure a mean is."""
    wilson = interval_of([1.0, 1.0, 0.0, 1.0], method="wilson")
    assert wilson is not None
    assert interval([1.0, 1.0, 0.0, 1.0]) == pytest.approx((wilson.mean, wilson.low, wilson.high))


def test_a_few_equal_rewards_are_not_certain() -> None:
    mean, low, high = interval([0.5] * 4)
    assert mean == 0.5
    assert low < 0.3
    assert high > 0.7
    assert interval([0.5] * 400)[1] > low


def test_rewards_beyond_one_and_none_at_all() -> None:
    mean, low, high = interval([-1.0, 2.0, 3.0])
    assert mean is not None
    assert low < mean < high
    assert interval([]) == (None, -math.inf, math.inf)


def test_the_sign_test_leaves_out_what_one_side_did_not_earn() -> None:
    before = [result(0.0) for _ in range(6)] + [result(None)]
    after = [result(1.0) for _ in range(7)]
    assert sign_test(before, after) == 2 * 0.5**6
    assert sign_test(before, before) == 1.0


@pytest.mark.parametrize(("policy", "coverage"), [("drop", 0.5), ("zero", -1), ("zero", True), ("zero", "half")])
def test_wrong_settings_are_refused(policy: object, coverage: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        check_missing(policy, coverage)
