"""Two runs side by side: the evaluations that are compared with each other."""

from __future__ import annotations

from typing import Any

from agentlightning.evaluation.compare import compare_runs
from agentlightning.evaluation.tasks import tasks_of
from agentlightning.types.runs import Run, RunRecord

TASKS = tasks_of(range(8))


def run(name: str) -> Run:
    return Run(run_id=name, start_time=0.0)


def evaluation(name: str, step: int, reward: float, **data: Any) -> RunRecord:
    own = {"rewards": [reward] * len(TASKS), "tasks": TASKS, "value": reward, **data}
    return RunRecord(kind="evaluation", name=name, step=step, data=own)


def test_two_searches_are_compared_by_the_versions_that_they_ended_with() -> None:
    """Whether a version has a name of its own (GEPA) or not (APO), and neither by the seeds nor by the last of each."""
    gepa = [evaluation("validation", 0, 0.0, version="v0")]
    gepa += [evaluation(f"validation of v{step}", step, 1 / step, version=f"v{step}") for step in (1, 2)]
    apo = [evaluation("validation", step, reward, version=f"v{step}") for step, reward in enumerate((0.0, 0.25, 0.1))]
    [line] = compare_runs(run("a"), run("b"), gepa, apo).evaluations
    assert (line["name"], line["steps"]) == ("validation of v1 and validation", (1, 1))
    assert (line["values"], line["verdict"], line["lost"]) == ((1.0, 0.25), "worse", 8)


def test_evaluations_of_one_name_are_compared_and_the_last_of_each() -> None:
    first = [evaluation("held_out", 0, 0.0), evaluation("held_out", 4, 0.5), evaluation("other", 4, 0.0)]
    [line] = compare_runs(run("a"), run("b"), first, [evaluation("held_out", 2, 1.0)]).evaluations
    assert (line["name"], line["steps"], line["values"], line["verdict"]) == ("held_out", (4, 2), (0.5, 1.0), "better")


def test_a_search_and_an_evaluation_of_its_tasks_are_compared_by_its_best() -> None:
    search = [evaluation("validation", step, reward, version=f"v{step}") for step, reward in enumerate((0.0, 0.5, 0.2))]
    [line] = compare_runs(run("a"), run("b"), search, [evaluation("evaluation", 0, 1.0)]).evaluations
    assert (line["name"], line["steps"], line["values"]) == ("validation and evaluation", (1, 0), (0.5, 1.0))
