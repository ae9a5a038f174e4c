"""The bootstrap interval and the permutation test against SciPy 1.17, and what must hold for any rewards."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentlightning.evaluation.resampling import bootstrap_interval, differing, sign_flip_test
from agentlightning.evaluation.statistics import mcnemar_exact

SKEWED = [0.0, 0.1, 0.1, 0.2, 0.9, 1.0, 0.3, 0.05, 0.0, 0.4, 0.15, 0.6]
GRADED = [(-1) ** (number % 3 == 0) * ((number * 7) % 11) / 10 for number in range(1, 60)]
quarters = st.lists(st.integers(-4, 4).map(lambda part: part / 4), min_size=1, max_size=10)


def test_the_bootstrap_interval_is_that_of_scipy() -> None:
    """`scipy.stats.bootstrap(..., n_resamples=200000, method="BCa")`; the percentile method gives 0.146 to 0.517."""
    mean, low, high = bootstrap_interval(SKEWED, resamples=20_000)
    assert mean == pytest.approx(0.316667, abs=1e-6)
    assert (low, high) == (pytest.approx(0.1625, abs=0.006), pytest.approx(0.55, abs=0.015))


def test_the_same_seed_draws_the_same_interval() -> None:
    assert bootstrap_interval(SKEWED, seed=3) == bootstrap_interval(SKEWED, seed=3)
    assert bootstrap_interval(SKEWED, seed=3) != bootstrap_interval(SKEWED, seed=4)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
@example([0.0, 2.4846318678610106e-160])
@settings(max_examples=60, deadline=None)
def test_a_bootstrap_interval_lies_within_the_values(values: list[float]) -> None:
    mean, low, high = bootstrap_interval(values, resamples=100)
    if len(values) == 1:
        assert (low, high) == (-math.inf, math.inf)
        return
    slack = 1e-6 * max(map(abs, values))
    assert min(values) - slack <= low <= high <= max(values) + slack
    assert min(values) - slack <= mean <= max(values) + slack


@pytest.mark.parametrize(
    ("changes", "p_value", "method"),
    [
        ([0.5, -0.25, 0.75, 0.1, 0.3, -0.05, 0.2, 0.4], 0.078125, "exact permutation test"),
        ([0.5] * 6, 2 / 2**6, "exact sign test"),
        ([0.0, 0.0], 1.0, "exact sign test"),
        ([], 1.0, "exact sign test"),
    ],
)
def test_few_differences_are_counted_exactly(changes: list[float], p_value: float, method: str) -> None:
    """The first is `scipy.stats.permutation_test(..., permutation_type="samples", n_resamples=numpy.inf)`."""
    assert sign_flip_test(changes) == (pytest.approx(p_value), method)


def test_of_many_differences_signs_are_drawn() -> None:
    """SciPy with 400,000 draws: 0.0622; 10,000 draws have a deviation of 0.0024."""
    p_value, method = sign_flip_test(GRADED)
    assert p_value == pytest.approx(0.0622, abs=0.0085)
    assert method == "permutation test, 10,000 draws"
    assert sign_flip_test(GRADED, seed=1) != sign_flip_test(GRADED)
    assert sign_flip_test([1.0 + number / 100 for number in range(100)])[0] == 1 / 10_001


@given(quarters)
@settings(max_examples=100, deadline=None)
def test_the_exact_test_counts_every_assignment_of_signs(changes: list[float]) -> None:
    seen = abs(sum(changes))
    sums = [abs(sum(map(math.copysign, changes, signs))) for signs in itertools.product((1, -1), repeat=len(changes))]
    assert sign_flip_test(changes)[0] == pytest.approx(sum(found >= seen - 1e-12 for found in sums) / len(sums))


@given(st.integers(0, 30), st.integers(0, 30), st.floats(0.01, 100))
@settings(deadline=None)
def test_changes_of_one_size_give_mcnemars_test(gained: int, lost: int, size: float) -> None:
    assert sign_flip_test([size] * gained + [-size] * lost)[0] == mcnemar_exact(gained, lost)


@given(quarters)
@settings(deadline=None)
def test_the_direction_does_not_matter(changes: list[float]) -> None:
    assert sign_flip_test(changes)[0] == pytest.approx(sign_flip_test([-change for change in changes])[0])


@pytest.mark.heavy
def test_where_nothing_changed_one_p_value_in_twenty_is_below_a_twentieth() -> None:
    rng = random.Random(0)
    low = sum(sign_flip_test([rng.gauss(0, 1) for _ in range(25)], flips=400)[0] < 0.05 for _ in range(1500))
    assert low == pytest.approx(75, abs=34)


def test_what_rounding_makes_of_equal_rewards_is_no_change() -> None:
    assert differing([0.1 + 0.2 - 0.3, 0.5]) == [0.5]
    assert sign_flip_test([0.1 + 0.2 - 0.3] * 20) == (1.0, "exact sign test")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: bootstrap_interval([]), "at least one value"),
        (lambda: bootstrap_interval([1.0], confidence=95), "confidence=95"),
        (lambda: bootstrap_interval([1.0], resamples=9), "resamples=9"),
        (lambda: sign_flip_test([1.0], flips=0), "flips=0"),
    ],
)
def test_what_cannot_be_drawn_is_refused(call: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()  # type: ignore[operator]
