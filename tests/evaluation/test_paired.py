"""Paired tests against SciPy 1.17 and by counting, and the errors of the sequential one however often one looks."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.evaluation.paired import SIGN_FLIP_TEST, PairedComparison, SequentialTest, compare_rewards
from agentlightning.evaluation.statistics import mcnemar_exact

GRADED = [(-1) ** (number % 3 == 0) * ((number * 7) % 11) / 10 for number in range(1, 60)]
quarters = st.lists(st.integers(-4, 4).map(lambda part: part / 4), min_size=1, max_size=10)


def changed(changes: list[float], seed: int = 0) -> PairedComparison:
    """Compare rewards of 0 with these."""
    return compare_rewards([0.0] * len(changes), changes, seed=seed)


@pytest.mark.parametrize(
    ("changes", "p_value", "verdict", "method"),
    [
        ([0.5, -0.25, 0.75, 0.1, 0.3, -0.05, 0.2, 0.4], 0.078125, "no evidence", f"{SIGN_FLIP_TEST}, exact"),
        ([0.5] * 6, 2 / 2**6, "better", "exact sign test"),
        ([-0.5] * 6, 2 / 2**6, "worse", "exact sign test"),
        ([0.0, 0.0], 1.0, "no evidence", "exact sign test"),
        ([], 1.0, "no evidence", "exact sign test"),
        ([0.1 + 0.2 - 0.3] * 20, 1.0, "no evidence", "exact sign test"),  # what rounding makes of equal rewards
    ],
)
def test_few_differences_are_counted_exactly(changes: list[float], p_value: float, verdict: str, method: str) -> None:
    """The first is `scipy.stats.permutation_test(..., permutation_type="samples", n_resamples=numpy.inf)`."""
    comparison = changed(changes)
    assert (comparison.p_value, comparison.verdict, comparison.method) == (pytest.approx(p_value), verdict, method)


def test_of_many_differences_signs_are_drawn() -> None:
    """SciPy with 400,000 draws: 0.0622; 10,000 draws have a deviation of 0.0024."""
    comparison = changed(GRADED)
    assert comparison.p_value == pytest.approx(0.0622, abs=0.0085)
    assert comparison.method == "sign-flip permutation test, 10,000 draws"
    assert changed(GRADED, seed=1).p_value != comparison.p_value
    assert changed([1.0 + number / 100 for number in range(100)]).p_value == 1 / 10_001


@given(quarters)
@settings(max_examples=100, deadline=None)
def test_the_exact_test_counts_every_assignment_of_signs_in_both_directions(changes: list[float]) -> None:
    observed = abs(sum(changes))
    sums = [abs(sum(map(math.copysign, changes, signs))) for signs in itertools.product((1, -1), repeat=len(changes))]
    share = sum(total >= observed - 1e-12 for total in sums) / len(sums)
    assert changed(changes).p_value == pytest.approx(share)
    assert changed([-change for change in changes]).p_value == pytest.approx(share)


@given(st.integers(0, 30), st.integers(0, 30), st.floats(0.01, 100))
@settings(deadline=None)
def test_changes_of_one_size_give_mcnemars_test(gained: int, lost: int, size: float) -> None:
    assert changed([size] * gained + [-size] * lost).p_value == mcnemar_exact(gained, lost)


@pytest.mark.heavy
def test_if_nothing_changed_one_p_value_in_twenty_is_below_a_twentieth() -> None:
    rng = random.Random(0)
    low = sum(changed([rng.gauss(0, 1) for _ in range(25)]).p_value < 0.05 for _ in range(1500))
    assert low == pytest.approx(75, abs=34)


def test_tasks_without_a_reward_are_no_pairs_and_other_lengths_are_refused() -> None:
    comparison = compare_rewards([0.0, None, 1.0], [1.0, 1.0, None])
    assert (comparison.pairs, comparison.unpaired, comparison.gained, comparison.lost) == (1, 2, 1, 0)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        compare_rewards([1.0], [])
    with pytest.raises(ValueError, match="significance=5"):
        compare_rewards([1.0], [1.0], significance=5)


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ([0.0] * 6, [1.0] * 6, "+1.000 (+0.292 to +1.000, Bonett-Price)"),
        ([0.0, 1.0, 1.0], [1.0, 1.0, 1.0], "+0.333 (-0.456 to +0.856, Bonett-Price)"),
        ([0.0, 1.0, 1.0], [0.0, 1.0, 1.0], "+0.000 (-0.554 to +0.554, Bonett-Price)"),
        ([0.25] * 6, [0.75] * 6, "+0.500 (-0.003 to +0.753, Bonett-Price)"),
        ([0.25, 0.5], [0.5, 1.0], "+0.375 (-1.000 to +1.000, Student's t)"),
        ([5.0, 5.0], [1.0, 1.0], "-4.000"),
        ([0.0], [1.0], "+1.000"),
    ],
)
def test_a_difference_of_rewards_in_0_to_1_has_an_interval_in_its_range(
    before: list[float], after: list[float], text: str
) -> None:
    difference = compare_rewards(before, after).difference
    assert difference is not None
    assert difference.text(signed=True, named=True) == text


@pytest.mark.heavy
@pytest.mark.parametrize("tasks", [4, 6, 10, 50])
@pytest.mark.parametrize(("gain", "loss"), [(0.05, 0.02), (0.3, 0.1), (0.9, 0.0)])
def test_the_interval_of_a_difference_holds_the_true_one_also_for_few_tasks(
    tasks: int, gain: float, loss: float
) -> None:
    rng, held = random.Random(0), 0
    for _ in range(1000):
        kinds = rng.choices([(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)], [gain, loss, 1.0 - gain - loss], k=tasks)
        difference = compare_rewards(*map(list, zip(*kinds, strict=True))).difference
        held += difference is not None and difference.low - 1e-9 <= gain - loss <= difference.high + 1e-9
    assert held >= 935


# --- the sequential test ---------------------------------------------------------------------------------------------


def looks(test: SequentialTest, changes: list[float], batch: int = 10) -> tuple[str, int]:
    """Look after each batch; return the verdict and the number of tasks."""
    for start in range(0, len(changes), batch):
        verdict, _ = test.add(changes[start : start + batch], 0.05)
        if verdict != "no evidence":
            return verdict, start + batch
    return "no evidence", len(changes)


@pytest.mark.heavy
@pytest.mark.parametrize("mean", [0.2, 0.5, 0.8])
def test_a_threshold_that_is_the_mean_is_rarely_passed_however_often_one_looks(mean: float) -> None:
    rng = random.Random(0)
    runs = [
        looks(SequentialTest(mean, 1 - mean), [(rng.random() < mean) - mean for _ in range(500)])[0] for _ in range(400)
    ]
    assert sum(verdict != "no evidence" for verdict in runs) <= 0.05 * 400 + 13  # three deviations


def test_a_better_candidate_needs_fewer_tasks() -> None:
    rng = random.Random(0)
    endings = [looks(SequentialTest(0.5, 0.5), [(rng.random() < 0.7) - 0.5 for _ in range(1000)]) for _ in range(40)]
    assert {verdict for verdict, _ in endings} == {"better"}
    assert sum(tasks for _, tasks in endings) / 40 < 160


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=40), st.randoms())
def test_neither_the_order_of_tasks_nor_batches_nor_units_matter(changes: list[float], rng: random.Random) -> None:
    in_turn, tenfold = SequentialTest(1, 1), SequentialTest(10, 10)
    for change in rng.sample(changes, len(changes)):
        _, p_value = in_turn.add([change], 0.05)
    assert p_value == pytest.approx(SequentialTest(1, 1).add(changes, 0.05)[1])
    assert p_value == pytest.approx(tenfold.add([10 * change for change in changes], 0.05)[1])


def test_no_reward_can_cost_more_than_the_capital() -> None:
    assert SequentialTest(0.5, 0.5).add([-0.5] * 2000, 0.05) == ("worse", pytest.approx(0.0, abs=1e-12))
