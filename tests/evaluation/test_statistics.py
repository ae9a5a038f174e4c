"""Means with intervals, and p-values, against SciPy 1.17 and statsmodels, and by counting."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentlightning.evaluation.statistics import Interval, holm, interval_of, mcnemar_exact

SKEWED = [0.0, 0.1, 0.1, 0.2, 0.9, 1.0, 0.3, 0.05, 0.0, 0.4, 0.15, 0.6]


def interval(values: list[float], **settings: Any) -> Interval:
    bounds = interval_of(values, **settings)
    assert bounds is not None
    return bounds


@pytest.mark.parametrize("differing", range(12))
def test_mcnemars_p_value_counts_all_splits_that_are_at_least_as_uneven(differing: int) -> None:
    for gained in range(differing + 1):
        uneven = abs(2 * gained - differing)
        outcomes = itertools.product((0, 1), repeat=differing)
        as_uneven = sum(abs(2 * sum(outcome) - differing) >= uneven for outcome in outcomes)
        assert mcnemar_exact(gained, differing - gained) == pytest.approx(as_uneven / 2**differing, rel=1e-15)


def test_thousands_of_tasks_are_no_trouble() -> None:
    assert 0.0 < mcnemar_exact(5_300, 4_700) < 1e-8
    assert mcnemar_exact(20_000, 0) == 0.0


@pytest.mark.parametrize(
    ("values", "method", "used", "low", "high"),
    [
        ([1.0] * 8 + [0.0] * 2, None, "wilson", 0.4901625, 0.9433178),
        ([0.0] * 5, None, "wilson", 0.0, 0.4344825),
        ([1.0] * 5, None, "wilson", 1 - 0.4344825, 1.0),
        ([0.0] * 5, "exact", "exact", 0.0, 0.5218237501),
        ([1.0] * 3 + [0.0] * 4, "exact", "exact", 0.0989882784, 0.8159484324),
        ([1.0] * 10, "exact", "exact", 0.6915028922, 1.0),
        ([1.0] * 437 + [0.0] * 563, "exact", "exact", 0.4059815065, 0.4683904385),
        ([0.1, 0.2, 0.3, 0.4], None, "student", 0.0446, 0.4554),
        ([0.2, 0.5], None, "student", 0.0, 1.0),
        ([0.2, 0.5], "student", "student", 0.0, 1.0),
        ([0.5] * 4, None, "wilson", 0.1500390, 0.8499610),
        ([0.1, 0.2, 0.3, 0.4], "bootstrap", "bootstrap", 0.15, 0.35),
        (SKEWED, "bootstrap", "bootstrap", 0.1625, 0.55),
    ],
)
def test_the_intervals_are_those_of_scipy(values: list[float], method: Any, used: str, low: float, high: float) -> None:
    """`binomtest(...).proportion_ci(method="exact")`; `bootstrap(..., n_resamples=200000, method="BCa")`."""
    bounds = interval(values, method=method)
    slack = {"wilson": 1e-6, "exact": 1e-8, "student": 2e-3, "bootstrap": 0.025}[used]
    assert bounds.mean == pytest.approx(sum(values) / len(values))
    assert (bounds.method, bounds.low, bounds.high) == (
        used,
        pytest.approx(low, abs=slack),
        pytest.approx(high, abs=slack),
    )


@pytest.mark.parametrize("method", [None, "bootstrap"])
def test_nothing_has_no_interval_and_one_value_a_mean_only(method: Any) -> None:
    assert interval_of([], method=method) is None
    assert interval([0.25], method=method).text() == "0.250"


@given(st.lists(st.floats(0, 1), min_size=2, max_size=12))
@settings(max_examples=60, deadline=None)
def test_rewards_in_0_to_1_have_an_interval_in_0_to_1(values: list[float]) -> None:
    bounds = interval(values)
    assert 0.0 <= bounds.low <= bounds.mean + 1e-9
    assert bounds.mean - 1e-9 <= bounds.high <= 1.0
    assert interval([5.0, 5.0]).text() == "5.000"  # of unknown range, so nothing is known of it


def test_the_same_seed_draws_the_same_interval() -> None:
    first, again, other = (interval(SKEWED, method="bootstrap", seed=seed) for seed in (3, 3, 4))
    assert first == again != other


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
@example([0.0, 2.4846318678610106e-160])
@settings(max_examples=40, deadline=None)
def test_a_bootstrap_interval_lies_within_the_values(values: list[float]) -> None:
    bounds, slack = interval(values, method="bootstrap"), 1e-6 * max(map(abs, values))
    assert min(values) - slack <= bounds.low <= bounds.high <= max(values) + slack


@pytest.mark.parametrize(
    ("values", "settings", "message"),
    [
        ([0.5], {"method": "wilson"}, "requires rewards of 0 and 1; got 0.5"),
        ([0.5], {"method": "normal"}, "must be one of wilson, exact, student, bootstrap"),
        ([1.0], {"confidence": 0.0}, r"confidence=0\.0"),
        ([], {"confidence": 95}, "confidence=95 must be between 0 and 1"),
    ],
)
def test_a_method_that_does_not_fit_is_refused(values: list[float], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        interval_of(values, **settings)


def test_p_values_of_several_tests_are_those_of_statsmodels() -> None:
    """`statsmodels.stats.multitest.multipletests(..., method="holm")`."""
    assert holm([0.01, 0.04, 0.03, 0.005, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.025, 0.5])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]
