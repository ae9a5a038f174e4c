"""pass@k and the variance between and within tasks."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.evaluation.sampling import pass_at_k, variance_components


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_choices_with_a_success(figures: tuple[int, int, int]) -> None:
    samples, successes, k = figures
    chosen = list(itertools.combinations(range(samples), k))
    share = sum(any(sample < successes for sample in each) for each in chosen) / len(chosen)
    assert pass_at_k(samples, successes, k) == pytest.approx(share)


def test_pass_at_k_of_the_paper() -> None:
    """Chen et al. 2021, figure 3: `1 - prod(1 - k / arange(n - c + 1, n + 1))`, here n=200, c=10, k=10."""
    product = 1.0
    for number in range(191, 201):
        product *= 1 - 10 / number
    assert pass_at_k(200, 10, 10) == pytest.approx(1 - product)
    assert pass_at_k(10_000, 3, 100) == pytest.approx(0.0297, abs=1e-4)


def test_the_variance_of_a_known_table() -> None:
    """Means 2, 5, 8 of three each: MS between 27, MS within 1, so (27 - 1) / 3 between."""
    found = variance_components([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    assert found is not None
    assert (found.between, found.within) == (pytest.approx(26 / 3), pytest.approx(1.0))


def test_the_components_are_found_again() -> None:
    rng = random.Random(1)
    centres = [rng.gauss(0, 2) for _ in range(3000)]
    found = variance_components([[rng.gauss(c, 0.5) for _ in range(rng.randint(1, 5))] for c in centres])
    assert found is not None
    assert found.between == pytest.approx(4.0, rel=0.08)
    assert found.within == pytest.approx(0.25, rel=0.06)


@pytest.mark.parametrize("groups", [[], [[1.0, 2.0]], [[1.0], [2.0]], [[], []]])
def test_too_little_has_no_components(groups: list[list[float]]) -> None:
    assert variance_components(groups) is None


def test_a_negative_estimate_is_none_at_all() -> None:
    found = variance_components([[0.0, 1.0], [1.0, 0.0]])
    assert found is not None
    assert found.between == 0.0


@pytest.mark.parametrize(("samples", "successes", "k"), [(3, 1, 4), (3, 1, 0), (3, 4, 1), (3, -1, 1)])
def test_impossible_counts_are_refused(samples: int, successes: int, k: int) -> None:
    with pytest.raises(ValueError, match="between"):
        pass_at_k(samples, successes, k)
