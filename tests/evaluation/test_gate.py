"""The rules of promotion, one by one: candidates that pass, candidates that fail, and the reasons."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.evaluation.gate import PromotionRules, judge_promotion
from agentlightning.evaluation.paired import Stopping
from agentlightning.evaluation.result import EvaluatedRollout, EvaluatedTask, EvaluationResult


def result(rewards: Sequence[float | None], slices: Sequence[str] = (), **figures: Any) -> EvaluationResult:
    """One sample of each task."""
    tasks = (
        EvaluatedTask(
            number,
            (EvaluatedRollout(f"ro-{number}", "scored" if reward is not None else "fault", reward, 2.0, **figures),),
            (slices[number],) if slices else (),
        )
        for number, reward in enumerate(rewards)
    )
    return EvaluationResult(tuple(tasks))


def failed(before: EvaluationResult, after: EvaluationResult, **rules: Any) -> list[str]:
    """The rules that the candidate fails."""
    promotion = judge_promotion(before, after, PromotionRules(**rules))
    assert promotion.promoted == (not promotion.reasons)
    return [rule.rule for rule in promotion.rules if not rule.passed]


@pytest.mark.parametrize(
    ("rewards", "rules", "broken"),
    [
        ([0.0] * 10, {}, ["better", "significant"]),
        ([1.0] * 4 + [0.0] * 6, {}, ["significant"]),
        ([1.0] * 6 + [0.0] * 4, {}, []),
        ([1.0] * 6 + [0.0] * 4, {"significance": 0.01}, ["significant"]),
        ([1.0] * 6 + [0.0] * 4, {"min_difference": 0.6}, ["better"]),
        ([1.0] * 6 + [0.0] * 4, {"min_difference": 0.59}, []),
        ([-1.0] * 10, {}, ["better"]),  # significant, and worse
        ([1.0] * 9 + [None], {}, ["missing"]),
        ([1.0] * 9 + [None], {"max_missing": 0.1}, []),
        ([None] * 10, {}, ["better", "significant", "missing"]),
    ],
)
def test_the_whole_table_of_rules(rewards: list[float | None], rules: dict[str, Any], broken: list[str]) -> None:
    assert failed(result([0.0] * 10), result(rewards), **rules) == broken


SLICES = ["easy"] * 40 + ["hard"] * 10


def test_a_slice_that_is_worse_stops_a_candidate_that_is_better_on_the_whole() -> None:
    before, after = result([0.0] * 40 + [1.0] * 10, SLICES), result([1.0] * 40 + [0.0] * 10, SLICES)
    promotion = judge_promotion(before, after)
    assert promotion.reasons == ["slices: worse slices: hard; limit: p below 0.05 (Holm, 2 slices)"]
    assert [(part.name, part.worse, part.p_value) for part in promotion.slices] == [
        ("easy", False, pytest.approx(2 * 2 / 2**40)),
        ("hard", True, pytest.approx(2 / 2**10)),
    ]
    assert failed(before, after, check_slices=False) == []
    assert failed(before, after, slice_significance=0.001) == []


def test_a_slice_that_falls_too_far_is_named_even_if_it_could_be_chance() -> None:
    before, after = result([0.0] * 40 + [1.0] * 10, SLICES), result([1.0] * 48 + [0.0] * 2, SLICES)
    assert failed(before, after) == []
    assert failed(before, after, max_slice_drop=0.1) == ["slices"]
    assert failed(before, after, max_slice_drop=0.2) == []


def test_of_many_slices_none_is_worse_by_chance_alone() -> None:
    """Six losses of six have p = 0.03: enough of one slice, not of twenty."""
    lost = [1.0] * 6
    names = [f"s{number // 6:02}" for number in range(120)]
    both = result([0.5] * 114 + lost, names), result([0.5] * 114 + [0.0] * 6, names)
    assert "slices" not in failed(*both)
    assert "slices" in failed(*both, max_slice_drop=0.5)
    alone = result(lost, names[-6:]), result([0.0] * 6, names[-6:])
    assert "slices" in failed(*alone)


def test_dimensions_have_floors_and_ceilings() -> None:
    before = result([0.0] * 10, dimensions={"safe": 1.0, "cost": 0.1}, tokens=100)
    after = result([1.0] * 10, dimensions={"safe": 0.9, "cost": 0.2}, tokens=400)
    limits = {"floors": {"safe": 0.95, "reward": 1.0}, "ceilings": {"cost": 0.2, "seconds": 2.0, "tokens": 300}}
    assert failed(before, after, **limits) == ["floor safe", "ceiling tokens"]
    promotion = judge_promotion(before, after, PromotionRules(**limits))  # type: ignore[arg-type]
    assert "ceiling tokens: mean 400 of 10 values; at most 300" in promotion.reasons
    assert [part.name for part in promotion.dimensions] == ["safe", "cost"]


def test_a_dimension_and_a_figure_of_rollouts_of_one_name_are_distinguished() -> None:
    before = result([0.0] * 10)
    after = result([1.0] * 10, dimensions={"seconds": 9.0}, tokens=400)  # of each rollout 2 seconds
    with pytest.raises(ValueError, match=r"For the ceiling, use 'reward\.seconds' or 'rollout\.seconds'"):
        failed(before, after, ceilings={"seconds": 5.0})
    assert failed(before, after, ceilings={"reward.seconds": 5.0, "rollout.seconds": 5.0}) == ["ceiling reward.seconds"]
    assert failed(before, after, ceilings={"tokens": 400, "rollout.tokens": 399}) == ["ceiling rollout.tokens"]


def test_slices_that_did_not_fit_into_the_record_do_not_pass_silently() -> None:
    before, after = result([0.0] * 10), result([1.0] * 10)
    assert failed(before, after) == []
    assert failed(before, replace(after, left_out=("samples",))) == []
    assert failed(before, replace(after, left_out=("samples", "slices"))) == ["slices"]
    assert failed(replace(before, left_out=("slices",)), after) == ["slices"]
    assert failed(before, replace(after, left_out=("slices",)), check_slices=False) == []


def test_samples_that_failed_count_as_missing_and_not_as_low_rewards() -> None:
    def sampled(*rewards: float | None) -> EvaluatedTask:
        rollouts = (EvaluatedRollout("", "scored" if r is not None else "fault", r, 1.0) for r in rewards)
        return EvaluatedTask("task", tuple(rollouts))

    before = EvaluationResult((sampled(0.0, 0.0),) * 10)
    after = EvaluationResult((sampled(1.0, None),) * 10)
    promotion = judge_promotion(before, after)
    assert promotion.after is not None
    assert promotion.after.mean == 1.0
    [reason] = promotion.reasons
    assert reason.startswith("missing: 50.0% of the candidate's samples on the 10 tasks that the baseline scored have")


def test_tasks_are_paired_by_their_content_and_those_that_the_candidate_lacks_are_missing() -> None:
    before = result([0.0] * 20)
    after = result([1.0] * 20)
    shuffled = list(after.tasks)
    random.Random(0).shuffle(shuffled)
    assert judge_promotion(before, EvaluationResult(tuple(shuffled))).promoted
    fewer = EvaluationResult(after.tasks[:10])
    assert failed(before, fewer) == ["missing"]
    stopped = EvaluationResult(after.tasks[:10], stopping=Stopping("better", 0.01, 10, 10, "baseline"))
    promotion = judge_promotion(before, stopped)
    assert promotion.comparison.method == "sequential test"
    assert "missing" not in [rule.rule for rule in promotion.rules if not rule.passed]
    # if the baseline was stopped early, a candidate without its tasks still lacks them
    base = EvaluationResult(before.tasks[:10], stopping=Stopping("worse", 0.01, 10, 10, "threshold 0.8"))
    assert failed(base, after) == []
    assert failed(base, EvaluationResult(after.tasks[:9])) == ["missing"]


@given(st.lists(st.sampled_from([None, 0.0, 0.25, 1.0]), min_size=1, max_size=40), st.randoms())
@settings(max_examples=60, deadline=None)
def test_nothing_is_promoted_over_itself_and_the_json_is_json(rewards: list[float | None], rng: random.Random) -> None:
    names = [rng.choice("ab") for _ in rewards]
    promotion = judge_promotion(result(rewards, names), result(rewards, names))
    assert not promotion.promoted
    assert not any(part.worse for part in promotion.slices)
    report = json.loads(json.dumps(promotion.as_json(), allow_nan=False))
    assert report["tasks"] == {"before": len(rewards), "after": len(rewards), "shared": len(rewards)}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"significance": 5}, "significance=5"),
        ({"slice_significance": 0.0}, "slice_significance=0.0"),
        ({"min_difference": -0.1}, "min_difference=-0.1"),
        ({"max_slice_drop": float("nan")}, "max_slice_drop=nan"),
        ({"max_missing": 5}, "max_missing=5"),
        ({"floors": {"a": float("inf")}}, "limit of 'a'"),
    ],
)
def test_rules_that_cannot_be_are_refused(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromotionRules(**rules)


@pytest.mark.parametrize(
    ("after", "rules", "message"),
    [
        (
            result([0.0] * 3, dimensions={"safe": 1.0}),
            {"floors": {"saef": 1.0}},
            "no metric 'saef' .*; did you mean 'safe'",
        ),
        (result([0.0] * 3), {"ceilings": {"tokens": 1.0}}, "has no recorded 'tokens' for the ceiling"),
        (EvaluationResult((EvaluatedTask("other", ()),)), {}, "of 3 and 1 task have no task in common"),
        (result([1.7e308] * 3), {}, r"rewards must be at most 1e\+100.*; got 1.7e\+308"),
        (result([1.0] * 3, dimensions={"cost": -1e101}), {}, r"rewards must be at most 1e\+100.*; got -1e\+101"),
    ],
)
def test_evaluations_that_cannot_be_judged_are_refused(
    after: EvaluationResult, rules: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        judge_promotion(result([0.0] * 3), after, PromotionRules(**rules))
