"""An evaluation as a record of its run, and read again: the same figures, and clear words where it is not readable."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.evaluation import records
from agentlightning.evaluation.records import record_of, result_of
from agentlightning.evaluation.result import EvaluatedRollout, EvaluatedTask, EvaluationResult
from agentlightning.evaluation.sequential import SequentialStop

TASKS = [{"n": n, "level": n % 2} for n in range(12)]


def agent(task: dict[str, int], rollout: agl.Rollout) -> None:
    """Two dimensions; the last task fails."""
    if task["n"] == 11:
        raise ConnectionError("gone")
    agl.emit_reward({"right": float(task["level"]), "speed": task["n"] / 10}, primary_key="right")


@pytest.fixture(scope="module")
def recorded() -> tuple[EvaluationResult, dict[str, Any]]:
    """A result, and the data of the record that its run has of it."""
    store = agl.InMemoryLightningStore()
    found = agl.Trainer(store=store, strategy="shm", n_runners=2).evaluate(agent, TASKS, n_samples=2, slices="level")
    [record] = asyncio.run(store.query_run_records(found.run_id or "", kind_in=["evaluation"]))
    return found, record.data


def test_a_record_is_read_again_as_the_same_result(recorded: tuple[EvaluationResult, dict[str, Any]]) -> None:
    found, data = recorded
    again = result_of(data, found.run_id)
    assert again is not None
    assert again.rollouts == found.rollouts
    assert (again.rewards, again.outcomes, again.failures) == (found.rewards, found.outcomes, found.failures)
    assert again.interval() == found.interval()
    assert list(again.slices) == ["level=0", "level=1"]
    assert again.dimension("speed").mean_reward == found.dimension("speed").mean_reward
    assert (again.pass_at(2), again.variance) == (found.pass_at(2), found.variance)
    assert [task.input for task in again.tasks] == data["tasks"]
    compared = found.compare(again)
    assert (compared.pairs, compared.unpaired, compared.p_value) == (11, 1, 1.0)


def test_figures_stand_in_the_record_for_other_readers(recorded: tuple[EvaluationResult, dict[str, Any]]) -> None:
    found, data = recorded
    interval = found.interval()
    assert interval is not None
    assert data["interval"] == {"mean": interval.mean, "low": interval.low, "high": interval.high, "method": "wilson"}
    assert set(data["dimensions"]) == {"right", "speed"}
    assert data["value"] == found.mean_reward
    assert data["failures"] == {"ConnectionError": 2}
    assert data["slices"][:2] == [["level=0"], ["level=1"]]


def test_no_task_can_be_read_from_a_record(recorded: tuple[EvaluationResult, dict[str, Any]]) -> None:
    assert "'n'" not in str(recorded[1])


def test_stopping_early_is_recorded() -> None:
    def right(task: int) -> float:
        return 1.0

    store = agl.InMemoryLightningStore()
    rule = SequentialStop(threshold=0.5)
    found = agl.Trainer(store=store, strategy="shm").evaluate(right, range(100), stop_early=rule)  # type: ignore[arg-type]
    [record] = asyncio.run(store.query_run_records(found.run_id or "", kind_in=["evaluation"]))
    again = result_of(record.data)
    assert again is not None
    assert again.stopping == found.stopping
    assert again.stopping is not None
    assert again.stopping.tasks_saved > 60


def test_equal_tasks_are_compared_with_those_of_their_place_after_stopping_early() -> None:
    """The verdict at the end of a dataset that holds a task many times is that of its comparison, read again too."""

    def play(level: float) -> Callable[[str, agl.Rollout], float]:
        def agent(task: str, rollout: agl.Rollout) -> float:
            rng = random.Random(rollout.rollout_id)  # equal tasks do not earn the same
            return min(1.0, max(0.0, level + rng.uniform(-0.3, 0.3)))

        return agent

    store = agl.InMemoryLightningStore()
    trainer = agl.Trainer(store=store, strategy="shm")
    before = trainer.evaluate(play(0.35), ["a", "b"] * 60)
    after = trainer.evaluate(play(0.6), ["a", "b"] * 60, stop_early=SequentialStop(before))
    assert after.stopping is not None
    assert after.stopping.tasks_saved > 0
    [record] = asyncio.run(store.query_run_records(after.run_id or "", kind_in=["evaluation"]))
    again = result_of(record.data)
    assert again is not None
    for found in (after, again):
        compared = before.compare(found)
        assert (compared.verdict, compared.p_value) == (after.stopping.verdict, pytest.approx(after.stopping.p_value))


def test_of_very_many_samples_the_record_holds_rewards_by_task(
    recorded: tuple[EvaluationResult, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = record_of(recorded[0], recorded[1]["tasks"])
    whole = len(json.dumps(data["samples"]))
    monkeypatch.setattr(records, "MOST_BYTES", whole)
    data = record_of(recorded[0], recorded[1]["tasks"])
    assert data["left_out"] == ["samples"]
    again = result_of(data)
    assert again is not None
    assert again.rewards == recorded[0].rewards
    assert again.left_out == ("samples",)
    monkeypatch.setattr(records, "MOST_BYTES", 10)
    data = record_of(recorded[0], recorded[1]["tasks"])
    assert data["left_out"] == ["samples", "slices", "tasks", "rewards"]
    assert result_of(data) is None
    assert data["interval"] == recorded[1]["interval"]


def test_a_record_of_rewards_too_large_to_be_compared_is_not_readable() -> None:
    with pytest.raises(ValueError, match=r"rewards of at most 1e\+100 can be compared.*got 1.7e\+308"):
        result_of({"rewards": [1.7e308, 1.0], "tasks": ["a", "b"]})


@pytest.mark.parametrize("data", [{}, {"value": 1.0}, {"rewards": [1.0]}, {"tasks": ["a"], "rewards": None}])
def test_a_record_without_rewards_by_task_is_no_result(data: dict[str, Any]) -> None:
    assert result_of(data) is None


def test_a_record_of_another_algorithm_is_read() -> None:
    again = result_of({"rewards": [1.0, None], "tasks": ["a", "b"], "rollout_ids": ["ro-1", "ro-2"], "seconds": [1, 2]})
    assert again is not None
    assert [rollout.rollout_id for rollout in again.rollouts] == ["ro-1", "ro-2"]
    assert again.rewards == [1.0, None]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"rewards": ["x"], "tasks": ["a"]}, "not readable: 0: "),
        ({"rewards": [1.0, 2.0], "tasks": ["a"]}, "2 rewards, 1 tasks"),
        ({"rewards": [1.0], "tasks": ["a"], "samples": [[{"outcome": 1}]]}, r"not readable: 0\.0\."),
        ({"rewards": [1.0], "tasks": ["a"], "samples": 7}, "not readable"),
        ({"rewards": [1.0], "tasks": ["a"], "slices": [["a", 3]]}, "not readable"),
        ({"rewards": [1.0], "tasks": ["a"], "stopping": {"verdict": "perhaps"}}, "not readable"),
    ],
)
def test_a_damaged_record_is_told(data: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        result_of(data)


def test_a_reward_that_is_too_large_counts_as_none() -> None:
    def of(*rewards: float) -> EvaluatedTask:
        samples = (EvaluatedRollout("", "scored", each, 1.0, dimensions={"r": each, "s": 1.0}) for each in rewards)
        return EvaluatedTask("task", tuple(samples))

    result = EvaluationResult((of(1.0, 1e308), of(-1e308, 1e200), of(0.0, 1.0)))
    assert result.rewards == [1.0, None, 0.5]
    assert result.failures == {"invalid_reward": 3}
    assert result.mean_reward == 0.75
    assert result.variance == EvaluationResult((of(1.0), of(0.0, 1.0))).variance
    assert "1e+308" not in str(result)
    assert result.compare(result).verdict == "no evidence"
    assert record_of(result, ["a", "b", "c"])["rewards"] == [1.0, None, 0.5]
