"""pass@k, the variance between and within tasks, and rewards that cannot be used."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.evaluation.records import record_of
from agentlightning.evaluation.result import EvaluatedRollout, EvaluatedTask, EvaluationResult


def result(*groups: Sequence[float]) -> EvaluationResult:
    """A result with the samples of each task."""
    samples = ([EvaluatedRollout("", "scored", reward, 1.0) for reward in group] for group in groups)
    return EvaluationResult(tuple(EvaluatedTask(number, tuple(own)) for number, own in enumerate(samples)))


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_choices_with_a_success(figures: tuple[int, int, int]) -> None:
    samples, successes, k = figures
    choices = list(itertools.combinations(range(samples), k))
    share = sum(any(sample < successes for sample in choice) for choice in choices) / len(choices)
    estimate = result([1.0] * successes + [0.0] * (samples - successes)).pass_at(k)
    assert estimate.interval is not None
    assert estimate.interval.mean == pytest.approx(share)


@pytest.mark.parametrize(
    ("groups", "components"),
    [
        ([[1, 2, 3], [4, 5, 6], [7, 8, 9]], (26 / 3, 1.0)),  # MS between 27, MS within 1, so (27 - 1) / 3 between
        ([[0.0, 1.0], [1.0, 0.0]], (0.0, 0.5)),  # a negative estimate is 0
        ([], None),
        ([[1.0, 2.0]], None),
        ([[1.0], [2.0]], None),
        ([[], []], None),
    ],
)
def test_the_variance_of_known_tables(groups: list[list[float]], components: tuple[float, float] | None) -> None:
    variance = result(*groups).variance
    assert (variance and (variance.between, variance.within)) == (components and pytest.approx(components))


def test_the_components_are_found_again() -> None:
    rng = random.Random(1)
    centres = [rng.gauss(0, 2) for _ in range(3000)]
    variance = result(*([rng.gauss(c, 0.5) for _ in range(rng.randint(1, 5))] for c in centres)).variance
    assert variance is not None
    assert (variance.between, variance.within) == (pytest.approx(4.0, rel=0.08), pytest.approx(0.25, rel=0.06))


def test_a_reward_that_is_too_large_counts_as_none() -> None:
    def of(*rewards: float) -> EvaluatedTask:
        samples = (EvaluatedRollout("", "scored", each, 1.0, dimensions={"r": each, "s": 1.0}) for each in rewards)
        return EvaluatedTask("task", tuple(samples))

    evaluation = EvaluationResult((of(1.0, 1e308), of(-1e308, 1e200), of(0.0, 1.0)))
    assert evaluation.rewards == [1.0, None, 0.5]
    assert evaluation.failures == {"invalid_reward": 3}
    assert evaluation.mean_reward == 0.75
    assert evaluation.variance == EvaluationResult((of(1.0), of(0.0, 1.0))).variance
    assert "1e+308" not in str(evaluation)
    assert evaluation.compare(evaluation).verdict == "no evidence"
    assert record_of(evaluation, ["a", "b", "c"])["rewards"] == [1.0, None, 0.5]
