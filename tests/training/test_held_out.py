"""Whole runs with held-out tasks: the figure is the mean of the reward with a paired test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.training.alarms import Alarms
from agentlightning.training.result import GRPOResult
from agentlightning.types import AttemptedRollout
from tests.algorithm.parts import ask, fit, metrics_of, say

TASKS = [f"held out {number}" for number in range(8)]


def earning(reward: Callable[[int, int], float]) -> Any:
    """An agent whose reward on held-out tasks is `reward` of the number of the step and of the task."""

    @agl.rollout
    def agent(task: str, llm: agl.LLM, rollout: AttemptedRollout) -> float:
        ask(llm, [say(task)])
        where = rollout.metadata or {}
        return reward(where["step"], where["task"]) if rollout.mode == "val" else 0.0

    return agent


def run(reward: Callable[[int, int], float], model: Path, folder: Path, **settings: Any) -> GRPOResult:
    base: dict[str, Any] = {"max_steps": 2, "eval_steps": 1, "val_dataset": TASKS, "trainer_run_id": "r", **settings}
    return fit(earning(reward), ["one", "two"], model=model, output_dir=folder, **base)


async def test_the_best_step_and_the_alarm_follow_the_mean_of_graded_rewards(
    untrained_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = agl.InMemoryLightningStore()
    result = run(
        lambda step, task: (5.0, 3.0 + task / 8, 1.0)[step], untrained_model, tmp_path, store=store, progress="plain"
    )
    lines = metrics_of(result)
    assert [line["held_out"] for line in lines] == [pytest.approx(3.4375), 1.0]
    assert [line["held_out_solved"] for line in lines] == [None, None]
    change = lines[1]["held_out_change"]
    assert change == {"best": 5.0, "updates": 0, "change": -4.0, "range": 4.0, "p_value": 2 / 2**8, "pairs": 8}
    stored_run = await store.get_run_by_id("r")
    assert stored_run is not None
    assert stored_run.best is not None
    assert (stored_run.best.name, stored_run.best.value, stored_run.best.step) == ("held_out_sampled", 5.0, 0)
    records = await store.query_run_records("r", kind_in=["evaluation"])
    sampled = [record.data for record in records if record.name == "held_out_sampled"]
    assert [data["value"] for data in sampled] == [5.0, pytest.approx(3.4375), 1.0]
    assert not any("solved" in data for data in sampled), "1 is the worst reward of this run"
    [alarm] = [r for r in await store.query_run_records("r", kind_in=["alarm"]) if r.name == "held_out_drop"]
    assert (alarm.step, alarm.data["state"], alarm.data["value"]) == (1, "raised", pytest.approx(1.5625))
    assert "the best was 5" in alarm.data["text"]
    assert "p = 0.0078" in alarm.data["text"]
    shown = f"{capsys.readouterr().out}\n{result}"
    assert "held-out 1.000 (8 tasks, p = 0.0078 against the best before)  rollouts" in shown
    assert "sampled: mean reward 5.000, 8 tasks" in shown, "equal rewards of unknown range have no interval"
    ended = "mean reward 5.000 -> 1.000, difference -4.000; worse, p = 0.0078 (exact sign test)"
    assert f"8 held-out tasks, sampled: {ended}" in shown
    assert "solved" not in shown
    assert result.evaluations[-1].accuracy is None
    assert result.evaluations[-1].solved is None


def right(step: int, task: int) -> float:
    return float(task < 2 + 3 * step)


@pytest.mark.parametrize(
    ("reward", "settings", "means"),
    [
        (right, {}, "0.250 -> 1.000"),
        (lambda step, task: 1 + 3 * right(step, task), {"solved_above": 3}, "1.750 -> 4.000"),
    ],
)
async def test_the_share_solved_stands_beside_the_mean_for_rewards_of_0_and_1_and_with_a_threshold(
    untrained_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], reward: Any, settings: Any, means: str
) -> None:
    store = agl.InMemoryLightningStore()
    result = run(reward, untrained_model, tmp_path, store=store, progress="plain", **settings)
    assert [line["held_out_solved"] for line in metrics_of(result)] == [0.625, 1.0]
    assert [e.accuracy for e in result.evaluations if e.sampling == "sampled"] == [0.25, 0.625, 1.0]
    records = await store.query_run_records("r", kind_in=["evaluation"])
    assert [r.data["solved"] for r in records if r.name == "held_out_sampled"] == [2, 5, 8]
    shown = f"{capsys.readouterr().out}\n{result}"
    assert "(8 tasks, 62.5% solved, p = 0.25 against the best before)  rollouts" in shown
    assert f"mean reward {means} (25.0% -> 100.0% solved), difference +" in shown
    assert "; better, p = 0.031 (exact sign test)" in shown
    assert _alarms(result) == []


@pytest.mark.parametrize(
    ("reward", "tasks", "alarms"),
    [
        # of eight tasks one is gained and two are lost: p = 1
        (lambda step, task: float(task not in ({1, 2} if step else {0})), TASKS, []),
        (lambda step, task: 5.0 - 2 * step, TASKS[:2], [1]),  # of so few no test can tell: the limit alone decides
    ],
)
def test_a_fall_raises_an_alarm_if_the_paired_test_confirms_it_or_cannot_tell(
    untrained_model: Path, tmp_path: Path, reward: Any, tasks: list[str], alarms: list[int]
) -> None:
    result = run(reward, untrained_model, tmp_path, val_dataset=tasks)
    assert [line["held_out_change"]["change"] < 0 for line in metrics_of(result)] == [True, True]
    assert _alarms(result) == alarms


def _alarms(result: GRPOResult) -> list[int]:
    """Return the steps after which the alarm of held-out tasks is raised."""
    alarms = Alarms()
    return [a.step for figures in result.metrics for a in alarms.see(figures) if a.name == "held_out_drop"]
