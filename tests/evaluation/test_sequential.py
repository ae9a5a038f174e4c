"""The sequential test: its errors stay below the significance however often one looks, and it finds what is there."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.evaluation.betting import judge
from agentlightning.evaluation.result import EvaluatedRollout, EvaluatedTask, EvaluationResult
from agentlightning.evaluation.sequential import SequentialStop, check_baseline


def result(*rewards: float | None) -> EvaluationResult:
    rollouts = (EvaluatedRollout("", "scored", reward, 1.0) for reward in rewards)
    return EvaluationResult(tuple(EvaluatedTask(n, (rollout,)) for n, rollout in enumerate(rollouts)))


def looks(rule: SequentialStop, changes: list[float], batch: int = 10) -> tuple[str, int]:
    """Look after each batch; return the verdict and the number of tasks."""
    bets = rule.bets()
    for start in range(0, len(changes), batch):
        verdict, _ = judge(bets, changes[start : start + batch], rule.significance)
        if verdict != "no evidence":
            return verdict, start + batch
    return "no evidence", len(changes)


@pytest.mark.heavy
@pytest.mark.parametrize("mean", [0.2, 0.5, 0.8])
def test_a_threshold_that_is_the_mean_is_rarely_passed_however_often_one_looks(mean: float) -> None:
    rng, rule = random.Random(0), SequentialStop(threshold=mean)
    runs = [looks(rule, [(rng.random() < mean) - mean for _ in range(500)])[0] for _ in range(400)]
    assert sum(verdict != "no evidence" for verdict in runs) <= 0.05 * 400 + 13  # three deviations


def test_what_is_better_is_found_with_fewer_tasks() -> None:
    rng, rule = random.Random(0), SequentialStop(threshold=0.5)
    found = [looks(rule, [(rng.random() < 0.7) - 0.5 for _ in range(1000)]) for _ in range(40)]
    assert {verdict for verdict, _ in found} == {"better"}
    assert sum(tasks for _, tasks in found) / 40 < 160
    assert looks(rule, [(rng.random() < 0.3) - 0.5 for _ in range(1000)])[0] == "worse"


@given(st.lists(st.floats(-1, 1), max_size=40), st.randoms())
def test_the_order_of_tasks_and_batches_does_not_matter(changes: list[float], rng: random.Random) -> None:
    rule = SequentialStop(baseline=result(1.0))
    shuffled = rng.sample(changes, len(changes))
    bets = rule.bets()
    for change in shuffled[:-1]:
        judge(bets, [change], 0.05)
    assert judge(bets, shuffled[-1:], 0.05)[1] == pytest.approx(judge(rule.bets(), changes, 0.05)[1])


@given(st.lists(st.floats(0, 1), max_size=30), st.floats(0.05, 0.95))
def test_a_range_of_other_units_gives_the_same_verdict(rewards: list[float], threshold: float) -> None:
    one, ten = SequentialStop(threshold=threshold), SequentialStop(threshold=10 * threshold, reward_range=(0, 10))
    p_values = [
        judge(rule.bets(), [scale * (reward - threshold) for reward in rewards], 0.05)[1]
        for rule, scale in ((one, 1), (ten, 10))
    ]
    assert p_values[0] == pytest.approx(p_values[1])


def test_no_reward_can_cost_more_than_the_capital() -> None:
    rule = SequentialStop(threshold=0.5)
    assert judge(rule.bets(), [-0.5] * 2000, 0.05) == ("worse", pytest.approx(0.0, abs=1e-12))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "either a baseline or a threshold"),
        ({"baseline": result(1.0), "threshold": 0.5}, "either a baseline or a threshold"),
        ({"threshold": 1.0}, "must lie inside"),
        ({"threshold": 0.5, "reward_range": (1.0, 0.0)}, "lower one first"),
        ({"threshold": 0.5, "reward_range": (0.0, float("inf"))}, "two finite numbers"),
        ({"threshold": 0.5, "significance": 1.5}, "significance=1.5"),
        ({"threshold": 0.5, "batch": 0}, "batch=0"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SequentialStop(**settings)  # type: ignore[arg-type]


def test_a_baseline_of_other_tasks_is_refused() -> None:
    rule = SequentialStop(baseline=result(1.0, 0.0))
    check_baseline(rule, [0, 1])
    with pytest.raises(ValueError, match="it has 2 tasks, here are 3"):
        check_baseline(rule, [0, 1, 2])
    with pytest.raises(ValueError, match="the same in the same order"):
        check_baseline(rule, [1, 0])
    with pytest.raises(TypeError, match="SequentialStop; got float"):
        check_baseline(0.8, [0, 1])
