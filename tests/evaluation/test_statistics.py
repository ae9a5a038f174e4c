"""The paired comparison: exact p-values, intervals, verdicts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.evaluation.statistics import clopper_pearson, compare, holm, mcnemar_exact, proportion


@pytest.mark.parametrize(
    ("gained", "lost", "p_value"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (5, 0, 0.0625),
        (6, 0, 0.03125),
        (10, 2, 2 * (1 + 12 + 66) / 4096),
        (4, 4, 1.0),
    ],
)
def test_the_p_value_is_that_of_a_fair_coin(gained: int, lost: int, p_value: float) -> None:
    assert mcnemar_exact(gained, lost) == pytest.approx(p_value, rel=1e-15)
    assert mcnemar_exact(lost, gained) == mcnemar_exact(gained, lost)


@pytest.mark.parametrize("differing", range(1, 12))
def test_the_p_value_counts_all_splits_that_are_at_least_as_uneven(differing: int) -> None:
    for gained in range(differing + 1):
        uneven = abs(2 * gained - differing)
        outcomes = itertools.product((0, 1), repeat=differing)
        as_uneven = sum(abs(2 * sum(outcome) - differing) >= uneven for outcome in outcomes)
        assert mcnemar_exact(gained, differing - gained) == pytest.approx(as_uneven / 2**differing)


def test_thousands_of_tasks_are_no_trouble() -> None:
    assert 0.0 < mcnemar_exact(5_300, 4_700) < 1e-8
    assert mcnemar_exact(20_000, 0) == 0.0


def test_the_verdict_needs_evidence() -> None:
    before = [False] * 20 + [True] * 10
    better = compare(before, [True] * 15 + [False] * 5 + [True] * 10)
    assert (better.gained, better.lost, better.verdict) == (15, 0, "better")
    assert better.p_value == 2 / 2**15
    assert compare(before, before).verdict == "no evidence"
    assert compare([True] * 30, [False] * 10 + [True] * 20).verdict == "worse"


def test_a_stricter_significance_asks_for_more() -> None:
    before, after = [False] * 6, [True] * 6
    assert compare(before, after).verdict == "better"
    assert compare(before, after, significance=0.01).verdict == "no evidence"


def test_the_shares_come_with_wilsons_interval() -> None:
    share = proportion([True] * 8 + [False] * 2)
    assert (share.successes, share.count, share.mean) == (8, 10, 0.8)
    assert (share.low, share.high) == (pytest.approx(0.4901625, abs=1e-6), pytest.approx(0.9433178, abs=1e-6))


def test_an_interval_stays_between_nothing_and_all() -> None:
    none, everything = proportion([False] * 5), proportion([True] * 5)
    assert none.low == 0.0
    assert everything.high == pytest.approx(1.0)
    assert none.high == pytest.approx(0.4344825, abs=1e-6)
    assert everything.low == pytest.approx(1 - none.high)


@pytest.mark.parametrize(
    ("before", "after", "significance", "said"),
    [
        ([True], [True, False], 0.05, "1 before, 2 after"),
        ([], [], 0.05, "at least one task"),
        ([True], [True], 5, "significance=5"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    before: list[bool], after: list[bool], significance: float, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        compare(before, after, significance=significance)


def test_negative_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        mcnemar_exact(-1, 3)


def test_an_impossible_confidence_is_refused() -> None:
    with pytest.raises(ValueError, match="confidence"):
        proportion([True], confidence=1.0)


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"),
    [
        (0, 5, 0.0, 0.5218237501),
        (3, 7, 0.0989882784, 0.8159484324),
        (8, 10, 0.4439045377, 0.9747892736),
        (10, 10, 0.6915028922, 1.0),
        (437, 1000, 0.4059815065, 0.4683904385),
    ],
)
def test_the_exact_interval_is_that_of_scipy(hits: int, count: int, low: float, high: float) -> None:
    """`scipy.stats.binomtest(hits, count).proportion_ci(method="exact")`."""
    share = clopper_pearson([True] * hits + [False] * (count - hits))
    assert (share.low, share.high) == (pytest.approx(low, abs=1e-8), pytest.approx(high, abs=1e-8))


def test_p_values_of_several_tests_are_those_of_statsmodels() -> None:
    """`statsmodels.stats.multitest.multipletests(..., method="holm")`."""
    assert holm([0.01, 0.04, 0.03, 0.005, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.025, 0.5])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]


@given(st.lists(st.floats(0, 1), max_size=20))
def test_holm_keeps_the_order_and_is_never_bolder_than_one_test_nor_more_timid_than_bonferroni(p: list[float]) -> None:
    adjusted = holm(p)
    assert sorted(range(len(p)), key=p.__getitem__) == sorted(range(len(p)), key=lambda i: (adjusted[i], p[i], i))
    assert all(one <= found <= min(1.0, len(p) * one) + 1e-12 for one, found in zip(p, adjusted, strict=True))
