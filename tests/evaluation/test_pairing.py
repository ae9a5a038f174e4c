"""Which evaluations of two runs are compared, whatever kind of run each is."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.evaluation.pairing import last_evaluations, same_tasks
from agentlightning.evaluation.tasks import tasks_of
from agentlightning.types.runs import RunRecord


def evaluation(name: str, tasks: range, step: int = 0, **data: Any) -> RunRecord:
    own = {"rewards": [1.0] * len(tasks), "tasks": tasks_of(tasks), **data}
    return RunRecord(kind="evaluation", name=name, step=step, data=own)


def test_of_equal_tasks_those_of_one_name_are_compared_and_the_later_ones() -> None:
    run = [evaluation("held_out_sampled", range(5)), evaluation("held_out_greedy", range(5), 3)]
    run.append(evaluation("held_out_sampled", range(5), 4))
    one, other = same_tasks(run, run[:2])
    assert (one.name, one.step, other.name, other.step) == ("held_out_sampled", 4, "held_out_sampled", 0)
    assert [each.step for each in last_evaluations(run)] == [4, 3]


def test_runs_of_two_kinds_are_compared_by_the_tasks_that_they_share() -> None:
    trained = [evaluation("held_out_sampled", range(5, 15)), evaluation("train", range(100, 140))]
    evaluated = [evaluation("evaluation", range(10))]
    one, other = same_tasks(trained, evaluated)
    assert (one.name, other.name) == ("held_out_sampled", "evaluation")


def test_of_a_search_over_prompts_the_best_version_counts() -> None:
    found = [(0, 0.5), (1, 0.9), (2, 0.7), (3, None)]
    search = [evaluation("validation", range(5), step, version=f"v{step}", value=value) for step, value in found]
    [best] = last_evaluations(search)
    assert best.step == 1


def test_versions_with_evaluations_of_their_own_names_are_one_search() -> None:
    """As GEPA records them: two searches are compared by what each ended with, and not by their equal seeds."""

    def search(*values: float) -> list[RunRecord]:
        names = ["validation", *(f"validation of v{number}" for number in range(1, len(values)))]
        return [
            evaluation(name, range(5), step, version=f"v{step}", value=value)
            for step, (name, value) in enumerate(zip(names, values, strict=True))
        ]

    one, other = same_tasks(search(0.5, 0.9, 0.7), search(0.5, 0.6))
    assert (one.name, other.name) == ("validation of v1", "validation of v1")
    one, other = same_tasks(search(0.5, 0.6, 0.9), search(0.5, 0.4), name="validation")
    assert (one.name, other.name) == ("validation of v2", "validation")
    one, other = same_tasks(search(0.5, 0.6, 0.9), search(0.5, 0.4), name="validation of v1")
    assert (one.name, other.name) == ("validation of v1", "validation of v1")


STEP = RunRecord(kind="step", step=1, data={"mean_reward": 1.0})


@pytest.mark.parametrize(
    ("records", "name", "said"),
    [
        ([STEP], None, "run a cannot be compared task by task: it has no evaluation. Record one: Trainer.evaluate"),
        (
            [RunRecord(kind="evaluation", step=0, name="score", data={"value": 1.0})],
            None,
            r"it has no rewards by task in its evaluations \(score\)",
        ),
        (
            [evaluation("x", range(50, 60))],
            None,
            r"have a task in common: run a has x \(10 tasks\); run b",
        ),
        ([evaluation("held", range(5))], "hold", "run a has no evaluation 'hold' with rewards by task; did you mean"),
        ([evaluation("held", range(5), rewards=["x"])], None, "run a, evaluation 'held': .* not readable"),
    ],
)
def test_what_is_missing_is_said(records: list[RunRecord], name: str | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        same_tasks(records, [evaluation("held", range(5))], name=name, runs=("a", "b"))
