"""Rules of stopping early: which are refused, and which baselines. Their runs: tests/trainer/test_evaluate.py."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.algorithm.evaluator import SequentialStop, check_baseline
from agentlightning.evaluation.result import EvaluatedRollout, EvaluatedTask, EvaluationResult

BASELINE = EvaluationResult(tuple(EvaluatedTask(n, (EvaluatedRollout("", "scored", 1.0, 1.0),)) for n in range(2)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "either a baseline or a threshold"),
        ({"baseline": BASELINE, "threshold": 0.5}, "either a baseline or a threshold"),
        ({"threshold": 1.0}, "must be inside"),
        ({"threshold": 0.5, "reward_range": (1.0, 0.0)}, "lower one first"),
        ({"threshold": 0.5, "reward_range": (0.0, float("inf"))}, "two finite numbers"),
        ({"threshold": 0.5, "significance": 1.5}, "significance=1.5"),
        ({"threshold": 0.5, "batch": 0}, "batch=0"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequentialStop(**settings)


def test_a_baseline_of_other_tasks_is_refused() -> None:
    rule = SequentialStop(baseline=BASELINE)
    check_baseline(rule, [0, 1])
    with pytest.raises(ValueError, match="baseline has 2 tasks, and this evaluation has 3"):
        check_baseline(rule, [0, 1, 2])
    with pytest.raises(ValueError, match="the same tasks in the same order"):
        check_baseline(rule, [1, 0])
    with pytest.raises(TypeError, match="SequentialStop; got float"):
        check_baseline(0.8, [0, 1])
