"""Alarms of whole runs: real conditions are told of once, recorded with what to try, and told to be over."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.cli import main
from agentlightning.errors import BadRequestError
from tests.algorithm.parts import ask, fit, say, wants_digits
from tests.trackers.parts import Remembers

TASKS = ["one", "two", "three", "four"]
ROLLOUTS = 8
"""Of a step."""


def rewarded_by(reward: Callable[[int], float]) -> Any:
    """An agent that makes a call and earns what `reward` says for the step in which it runs, 1 being the first."""
    count, lock = 0, threading.Lock()

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        nonlocal count
        with lock:
            number, count = count, count + 1
        ask(llm, [say(task)])
        return reward(number // ROLLOUTS + 1) + number % 3 / 100

    return agent


@agl.rollout
def pleased(task: str, llm: agl.LLM) -> float:
    ask(llm, [say(task)])
    return 1.0


async def told(store: agl.LightningStore, *names: str) -> list[tuple[str, str, int, int]]:
    """The alarm records with these names: name, state, step, since; in the order of their steps."""
    records = [record for record in await store.query_run_records("watched", kind_in=["alarm"]) if record.name in names]
    return [(record.name, record.data["state"], record.step, record.data["since"]) for record in records]


def run(agent: Any, model: Path, folder: Path, store: Any, **settings: Any) -> Any:
    return fit(
        agent, TASKS, **{"store": store, "model": model, "output_dir": folder, "trainer_run_id": "watched", **settings}
    )


async def test_equal_rewards_and_steps_without_training_are_told_of_once_with_what_to_try(
    untrained_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = agl.InMemoryLightningStore()
    with caplog.at_level(logging.INFO):
        run(pleased, untrained_model, tmp_path / "run", store, max_steps=6)
    assert await told(store, "equal_rewards", "nothing_trained") == [
        ("nothing_trained", "raised", 2, 2), ("equal_rewards", "raised", 3, 3),
    ]  # fmt: skip
    [record] = [r for r in await store.query_run_records("watched", kind_in=["alarm"]) if r.name == "equal_rewards"]
    assert record.data["value"] == 1.0
    assert record.data["threshold"] == 0.9
    assert record.data["text"] == "in 2 of 2 groups all rewards are equal, mean reward 1 (limit 90%)"
    assert "harder ones" in record.data["what_to_try"]
    lines = [r for r in caplog.records if "alarm equal_rewards" in r.getMessage()]
    assert [(line.levelname, line.getMessage().count("\n")) for line in lines] == [("WARNING", 0)]


async def test_a_reward_that_jumps_is_told_of_and_over_once_it_has_a_new_level(
    untrained_model: Path, tmp_path: Path
) -> None:
    store = agl.InMemoryLightningStore()
    agent = rewarded_by(lambda step: 0.9 if step > 6 else 0.1)
    run(agent, untrained_model, tmp_path / "run", store, max_steps=13)
    assert await told(store, "reward_jump") == [("reward_jump", "raised", 7, 7), ("reward_jump", "over", 12, 7)]


async def test_a_learning_rate_that_destroys_the_policy_is_told_of_after_its_first_update(
    untrained_model: Path, tmp_path: Path
) -> None:
    store = agl.InMemoryLightningStore()
    settings: dict[str, Any] = {"max_steps": 3, "num_generations": 8, "batch_size": 4, "learning_rate": 0.3}
    result = run(wants_digits, untrained_model, tmp_path / "run", store, **settings)
    assert (await told(store, "policy_shift"))[0] == ("policy_shift", "raised", 1, 1)
    first = result.metrics[0].update
    assert first["update_kl"] > 1.0 > first["approx_kl"], "before its only optimizer step an update has moved nothing"


async def test_a_reward_that_falls_in_the_second_step_is_told_of_at_once(untrained_model: Path, tmp_path: Path) -> None:
    store = agl.InMemoryLightningStore()
    agent = rewarded_by(lambda step: 0.9 if step == 1 else 0.1)
    run(agent, untrained_model, tmp_path / "run", store, max_steps=2)
    assert await told(store, "early_fall") == [("early_fall", "raised", 2, 2)]


async def test_rollouts_that_all_fail_are_told_of_and_over_when_they_succeed_again(
    untrained_model: Path, tmp_path: Path
) -> None:
    def reward(step: int) -> float:
        if step == 2:
            raise ConnectionError("the database of the agent is away")
        return 0.5

    store = agl.InMemoryLightningStore()
    run(rewarded_by(reward), untrained_model, tmp_path / "run", store, max_steps=4)
    assert await told(store, "infrastructure") == [("infrastructure", "raised", 2, 2), ("infrastructure", "over", 3, 2)]


async def test_a_policy_that_is_driven_to_one_answer_collapses_and_is_told_of(
    untrained_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "agl.db"
    settings: dict[str, Any] = {"max_steps": 16, "num_generations": 8, "learning_rate": 5e-2, "batch_size": 4}
    store = agl.SQLiteLightningStore(place)
    run(wants_digits, untrained_model, tmp_path / "run", store, **settings, alarms={"entropy_collapse": {"share": 0.5}})
    found = await told(store, "entropy_collapse")
    await store.close()
    assert [state for _, state, _, _ in found[:1]] == ["raised"]
    step = found[0][2]

    assert await asyncio.to_thread(main, ["runs", "show", "watched", "--store", str(place)]) == 0
    shown = capsys.readouterr().out
    assert f"alarm entropy_collapse after step {step}, raised: entropy is " in shown
    assert "to try: entropy_coef" in shown


async def test_without_alarms_nothing_is_told_of_and_a_rule_can_be_switched_off(
    untrained_model: Path, tmp_path: Path
) -> None:
    for alarms, expected in (("none", set[str]()), ({"cut_off": None}, {"nothing_trained"})):
        store = agl.InMemoryLightningStore()
        run(pleased, untrained_model, tmp_path / str(len(expected)), store, max_steps=2, alarms=alarms)
        found = {record.name for record in await store.query_run_records("watched", kind_in=["alarm"])}
        assert found == expected


async def test_trackers_are_told_of_steps_evaluations_alarms_and_the_model(
    untrained_model: Path, tmp_path: Path
) -> None:
    tracker = Remembers()
    settings: dict[str, Any] = {"val_dataset": ["five"], "trainer_trackers": [tracker]}
    run(pleased, untrained_model, tmp_path / "run", agl.InMemoryLightningStore(), max_steps=2, **settings)
    found = {(kind, step, name) for kind, step, name in tracker.told}
    assert {("step", 1, ""), ("step", 2, ""), ("evaluation", 2, "held_out_sampled")} <= found
    assert ("alarm", 2, "nothing_trained") in found
    assert "ledger" not in {kind for kind, _, _ in found}
    assert tracker.endings[0].model_path == str(tmp_path / "run/model")
    assert tracker.runs[0].config["algorithm"]["max_steps"] == 2


def test_a_wrong_threshold_is_told_when_the_algorithm_is_made(untrained_model: Path) -> None:
    with pytest.raises(BadRequestError, match="Did you mean 'entropy_collapse'"):
        agl.GRPO(untrained_model, alarms={"entropy_colapse": {"share": 0.1}})


async def test_a_run_that_goes_on_does_not_tell_again_and_tells_the_end(untrained_model: Path, tmp_path: Path) -> None:
    store = agl.SQLiteLightningStore(tmp_path / "agl.db")
    settings: dict[str, Any] = {"save_steps": 1, "store": store}
    settings |= {"model": untrained_model, "output_dir": tmp_path / "run", "trainer_run_id": "watched"}
    fit(pleased, TASKS, max_steps=4, **settings)
    fit(rewarded_by(lambda step: 0.5), TASKS, max_steps=7, **settings)
    found = await told(store, "equal_rewards", "nothing_trained")
    await store.close()
    assert found == [
        ("nothing_trained", "raised", 2, 2), ("equal_rewards", "raised", 3, 3),
        ("nothing_trained", "over", 6, 2), ("equal_rewards", "over", 7, 3),
    ]  # fmt: skip
