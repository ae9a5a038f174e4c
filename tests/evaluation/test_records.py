"""An evaluation as a record of its run, read again, and paired with those of another run."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.algorithm.evaluator import SequentialStop
from agentlightning.evaluation import records
from agentlightning.evaluation.records import last_evaluations, record_of, result_of, same_tasks
from agentlightning.evaluation.result import EvaluationResult
from agentlightning.evaluation.tasks import tasks_of
from agentlightning.types.runs import RunRecord

TASKS = [{"n": n, "level": n % 2} for n in range(12)]


def agent(task: dict[str, int], rollout: agl.Rollout) -> None:
    """Two dimensions; the last task fails."""
    if task["n"] == 11:
        raise ConnectionError("gone")
    agl.emit_reward({"right": float(task["level"]), "speed": task["n"] / 10}, primary_key="right")


def data_of(store: agl.LightningStore, result: EvaluationResult) -> dict[str, Any]:
    """The data of the record that the run of a result has of it."""
    [record] = asyncio.run(store.query_run_records(result.run_id or "", kind_in=["evaluation"]))
    return record.data


def read_again(data: dict[str, Any], run_id: str | None = None) -> EvaluationResult:
    stored_result = result_of(data, run_id)
    assert stored_result is not None
    return stored_result


@pytest.fixture(scope="module")
def recorded() -> tuple[EvaluationResult, dict[str, Any]]:
    """A result, and the data of the record that its run has of it."""
    store = agl.InMemoryLightningStore()
    result = agl.Trainer(store=store, strategy="shm", n_runners=2).evaluate(agent, TASKS, n_samples=2, slices="level")
    return result, data_of(store, result)


def test_a_record_is_read_again_as_the_same_result(recorded: tuple[EvaluationResult, dict[str, Any]]) -> None:
    first, data = recorded
    again = read_again(data, first.run_id)
    assert again.rollouts == first.rollouts
    assert (again.rewards, again.outcomes, again.failures) == (first.rewards, first.outcomes, first.failures)
    assert list(again.slices) == ["level=0", "level=1"]
    assert [task.input for task in again.tasks] == data["tasks"]
    compared = first.compare(again)
    assert (compared.pairs, compared.unpaired, compared.p_value) == (11, 1, 1.0)


def test_figures_are_in_the_record_for_other_readers_and_no_task(
    recorded: tuple[EvaluationResult, dict[str, Any]],
) -> None:
    first, data = recorded
    interval = first.interval()
    assert interval is not None
    assert data["interval"] == {"mean": interval.mean, "low": interval.low, "high": interval.high, "method": "wilson"}
    assert set(data["dimensions"]) == {"right", "speed"}
    assert (data["value"], data["failures"]) == (first.mean_reward, {"ConnectionError": 2})
    assert data["slices"][:2] == [["level=0"], ["level=1"]]
    assert "'n'" not in str(data)


def test_equal_tasks_are_compared_with_those_of_their_place_after_stopping_early() -> None:
    """The verdict at the end of a dataset that holds a task many times is that of its comparison, read again too."""

    def noisy(level: float) -> Callable[[str, agl.Rollout], float]:
        def agent(task: str, rollout: agl.Rollout) -> float:
            rng = random.Random(rollout.rollout_id)  # equal tasks do not earn the same
            return min(1.0, max(0.0, level + rng.uniform(-0.3, 0.3)))

        return agent

    store = agl.InMemoryLightningStore()
    trainer = agl.Trainer(store=store, strategy="shm")
    before = trainer.evaluate(noisy(0.35), ["a", "b"] * 60)
    after = trainer.evaluate(noisy(0.6), ["a", "b"] * 60, stop_early=SequentialStop(before))
    assert after.stopping is not None
    assert after.stopping.tasks_saved > 0
    again = read_again(data_of(store, after))
    assert again.stopping == after.stopping
    for other in (after, again):
        compared = before.compare(other)
        assert (compared.verdict, compared.p_value) == (after.stopping.verdict, pytest.approx(after.stopping.p_value))


def test_a_record_that_is_too_large_holds_rewards_by_task_or_figures_alone(
    recorded: tuple[EvaluationResult, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, data = recorded
    monkeypatch.setattr(records, "MOST_BYTES", len(json.dumps(data["samples"])))
    smaller = record_of(first, data["tasks"])
    again = read_again(smaller)
    assert smaller["left_out"] == ["samples"]
    assert (again.rewards, again.left_out) == (first.rewards, ("samples",))
    monkeypatch.setattr(records, "MOST_BYTES", 10)
    smallest = record_of(first, data["tasks"])
    assert smallest["left_out"] == ["samples", "slices", "tasks", "rewards"]
    assert result_of(smallest) is None
    assert smallest["interval"] == data["interval"]


@pytest.mark.parametrize("data", [{}, {"value": 1.0}, {"rewards": [1.0]}, {"tasks": ["a"], "rewards": None}])
def test_a_record_without_rewards_by_task_is_no_result(data: dict[str, Any]) -> None:
    assert result_of(data) is None


def test_a_record_of_another_algorithm_is_read() -> None:
    again = read_again({"rewards": [1.0, None], "tasks": ["a", "b"], "rollout_ids": ["ro-1", "ro-2"], "seconds": [1]})
    assert [rollout.rollout_id for rollout in again.rollouts] == ["ro-1", "ro-2"]
    assert again.rewards == [1.0, None]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"rewards": ["x"]}, "not readable: 0: "),
        ({"rewards": [1.0, 2.0]}, "2 rewards, 1 task"),
        ({"samples": [[{"outcome": 1}]]}, r"not readable: 0\.0\."),
        ({"samples": 7}, "not readable"),
        ({"slices": [["a", 3]]}, "not readable"),
        ({"stopping": {"verdict": "perhaps"}}, "not readable"),
        ({"rewards": [1.7e308]}, r"rewards must be at most 1e\+100.*got 1.7e\+308"),
    ],
)
def test_a_damaged_record_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        result_of({"rewards": [1.0], "tasks": ["a"], **data})


# --- pairs of runs ---------------------------------------------------------------------------------------------------


def evaluation(name: str, tasks: range, step: int = 0, **data: Any) -> RunRecord:
    own = {"rewards": [1.0] * len(tasks), "tasks": tasks_of(tasks), **data}
    return RunRecord(kind="evaluation", name=name, step=step, data=own)


def search(*values: float | None, named: bool) -> list[RunRecord]:
    """The evaluations of the versions of a prompt, with names of their own (as GEPA) or not (as APO)."""
    names = [f"validation of v{step}" if named and step else "validation" for step in range(len(values))]
    return [
        evaluation(name, range(5), step, version=f"v{step}", value=value)
        for step, (name, value) in enumerate(zip(names, values, strict=True))
    ]


def test_evaluations_of_one_name_are_compared_and_the_later_ones() -> None:
    run = [evaluation("held_out_sampled", range(5)), evaluation("held_out_greedy", range(5), 3)]
    run.append(evaluation("held_out_sampled", range(5), 4))
    one, other = same_tasks(run, run[:2])
    assert (one.name, one.step, other.name, other.step) == ("held_out_sampled", 4, "held_out_sampled", 0)
    assert [each.step for each in last_evaluations(run)] == [4, 3]


def test_runs_of_two_kinds_are_compared_by_the_tasks_that_they_share() -> None:
    trained = [evaluation("held_out_sampled", range(5, 15)), evaluation("train", range(100, 140))]
    one, other = same_tasks(trained, [evaluation("evaluation", range(10))])
    assert (one.name, other.name) == ("held_out_sampled", "evaluation")


@pytest.mark.parametrize(
    ("one", "other", "name", "steps"),
    [
        (search(0.5, 0.9, 0.7, None, named=False), search(0.5, 0.6, named=False), None, (1, 1)),
        (search(0.5, 0.9, 0.7, named=True), search(0.5, 0.6, named=True), None, (1, 1)),
        (search(0.5, 0.6, 0.9, named=True), search(0.5, 0.4, named=True), "validation", (2, 0)),
        (search(0.5, 0.6, 0.9, named=True), search(0.5, 0.4, named=True), "validation of v1", (1, 1)),
    ],
)
def test_searches_over_prompts_are_compared_by_their_best_versions(
    one: list[RunRecord], other: list[RunRecord], name: str | None, steps: tuple[int, int]
) -> None:
    assert tuple(each.step for each in same_tasks(one, other, name=name)) == steps


@pytest.mark.parametrize(
    ("records", "name", "message"),
    [
        ([RunRecord(kind="step", step=1)], None, "run a cannot be compared task by task: it has no evaluation. Record"),
        (
            [RunRecord(kind="evaluation", step=0, name="score", data={"value": 1.0})],
            None,
            r"it has no reward per task in its evaluations \(score\)",
        ),
        ([evaluation("x", range(50, 60))], None, r"have no task in common: run a has x \(tasks: 10\); run b"),
        ([evaluation("held", range(5))], "hold", "run a has no evaluation 'hold' with a reward per task; did you mean"),
        ([evaluation("held", range(5), rewards=["x"])], None, "run a, evaluation 'held': .* not readable"),
    ],
)
def test_runs_that_cannot_be_paired_say_why(records: list[RunRecord], name: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        same_tasks(records, [evaluation("held", range(5))], name=name, runs=("a", "b"))
