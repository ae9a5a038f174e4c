"""Whole runs with held-out tasks: the figure is the mean of the reward with a paired test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.cli.main import main
from agentlightning.training.alarms import Alarms
from agentlightning.training.result import GRPOResult
from agentlightning.types import AttemptedRollout
from tests.algorithm.parts import ask, fit, metrics_of, say

TASKS = [f"held out {number}" for number in range(8)]


def earning(reward: Callable[[int, int], float]) -> Any:
    """An agent that earns on held-out tasks what `reward` says for the steps before and the number of the task."""

    @agl.rollout
    def agent(task: str, llm: agl.LLM, rollout: AttemptedRollout) -> float:
        ask(llm, [say(task)])
        where = rollout.metadata or {}
        return reward(where["step"], where["task"]) if rollout.mode == "val" else 0.0

    return agent


def run(reward: Callable[[int, int], float], model: Path, folder: Path, **settings: Any) -> GRPOResult:
    given: dict[str, Any] = {"max_steps": 2, "eval_steps": 1, "val_dataset": TASKS, "trainer_run_id": "r", **settings}
    return fit(earning(reward), ["one", "two"], model=model, output_dir=folder, **given)


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
    found = await store.get_run_by_id("r")
    assert found is not None
    assert found.best is not None
    assert (found.best.name, found.best.value, found.best.step) == ("held_out_sampled", 5.0, 0)
    records = await store.query_run_records("r", kind_in=["evaluation"])
    sampled = [record.data for record in records if record.name == "held_out_sampled"]
    assert [data["value"] for data in sampled] == [5.0, pytest.approx(3.4375), 1.0]
    assert not any("solved" in data for data in sampled), "1 is the worst reward of this run"
    [alarm] = [r for r in await store.query_run_records("r", kind_in=["alarm"]) if r.name == "held_out_drop"]
    assert (alarm.step, alarm.data["state"], alarm.data["value"]) == (1, "raised", pytest.approx(1.5625))
    assert "its best was 5" in alarm.data["text"]
    assert "p = 0.0078" in alarm.data["text"]
    shown = f"{capsys.readouterr().out}\n{result}"
    assert "held-out 1.000  rollouts" in shown
    assert "8 held-out tasks, sampled: mean reward 5.000 -> 1.000; worse, p = 0.0078 (exact sign test)" in shown
    assert "solved" not in shown
    assert result.evaluations[-1].accuracy is None
    assert result.evaluations[-1].solved is None


async def test_the_share_solved_stands_beside_the_mean_for_rewards_of_0_and_1_and_with_a_threshold(
    untrained_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def right(step: int, task: int) -> float:
        return float(task < 2 + 3 * step)

    def points(step: int, task: int) -> float:
        return 4.0 if right(step, task) else 1.0

    for reward, settings, means in ((right, {}, "0.250 -> 1.000"), (points, {"solved_above": 3}, "1.750 -> 4.000")):
        store, folder = agl.InMemoryLightningStore(), tmp_path / means[0]
        result = run(reward, untrained_model, folder, store=store, progress="plain", **settings)
        assert [line["held_out_solved"] for line in metrics_of(result)] == [0.625, 1.0]
        assert [e.accuracy for e in result.evaluations if e.sampling == "sampled"] == [0.25, 0.625, 1.0]
        records = await store.query_run_records("r", kind_in=["evaluation"])
        assert [r.data["solved"] for r in records if r.name == "held_out_sampled"] == [2, 5, 8]
        shown = f"{capsys.readouterr().out}\n{result}"
        assert "(62.5% solved)  rollouts" in shown
        assert f"mean reward {means} (25.0% -> 100.0% solved); better, p = 0.031 (exact sign test)" in shown
        alarms = await store.query_run_records("r", kind_in=["alarm"])
        assert "held_out_drop" not in {record.name for record in alarms}


def test_two_runs_are_listed_and_compared_by_the_mean(
    untrained_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = f"{tmp_path}/runs.db"
    for name, level in (("low", 1.0), ("high", 4.0)):
        settings = {"trainer_run_id": name, "store": f"sqlite:///{place}"}
        run(lambda step, task, by=level: by + task / 8, untrained_model, tmp_path / name, **settings)
    assert main(["runs", "list", "--store", place]) == 0
    listed = capsys.readouterr().out
    assert "4.4375 held_out_sampled (step 0)" in listed
    assert "1.4375 held_out_sampled (step 0)" in listed
    assert main(["runs", "compare", "low", "high", "--store", place]) == 0
    compared = capsys.readouterr().out
    assert "1.4375" in compared
    assert "better: 8 tasks gained, 0 lost of 8 pairs" in compared


def test_a_fall_that_the_paired_test_does_not_find_raises_no_alarm(untrained_model: Path, tmp_path: Path) -> None:
    lost = {0: {0}, 1: {1, 2}, 2: {1, 2}}  # of eight tasks one is gained and two are lost: p = 1
    result = run(lambda step, task: float(task not in lost[step]), untrained_model, tmp_path)
    assert [line["held_out_change"]["change"] for line in metrics_of(result)] == [-0.125, -0.125]
    assert _alarms(result) == []


def test_with_few_tasks_no_test_can_tell_and_the_limit_alone_decides(untrained_model: Path, tmp_path: Path) -> None:
    result = run(lambda step, task: 5.0 - 2 * step, untrained_model, tmp_path, val_dataset=TASKS[:2])
    assert _alarms(result) == [1]


def _alarms(result: GRPOResult) -> list[int]:
    """Return the steps after which the alarm of held-out tasks is raised."""
    alarms = Alarms()
    return [a.step for figures in result.metrics for a in alarms.see(figures) if a.name == "held_out_drop"]
