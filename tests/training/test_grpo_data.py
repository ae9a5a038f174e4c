"""What a run makes of its data: rewards keep their precision, tasks their form, and every rollout is trained."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from tests.algorithm.parts import ask, rollouts_of, say, two_turns
from tests.training.test_grpo_records import entries_of_step, run_grpo


async def test_rewards_that_differ_in_their_seventh_digit_give_their_advantages(
    untrained_model: Path, tmp_path: Path
) -> None:
    """In bfloat16 they would all be 100, and no step would learn."""

    @agl.rollout
    def agent(task: str, llm: agl.LLM, rollout: agl.Rollout) -> float:
        ask(llm, [say(task)])
        return 100 + (rollout.metadata or {})["sample"] / 10_000

    store, result = await run_grpo(agent, untrained_model, tmp_path, ["one"], max_steps=1, batch_size=1)
    entries: list[Any] = list(await entries_of_step(store, 1))
    rewards = [100 + sample / 10_000 for sample in range(4)]
    assert sorted(entry["reward"] for entry in entries) == rewards
    middle, spread = statistics.mean(rewards), statistics.stdev(rewards)
    for entry in entries:
        wanted = (entry["reward"] - middle) / (spread + 1e-6)
        assert [call["advantage"] for call in entry["calls"]] == [pytest.approx(wanted, abs=1e-6)]
    assert result.metrics[0].calls_trained == 4


async def test_the_reward_of_a_rollout_without_a_model_call_is_kept_and_moves_no_group(
    untrained_model: Path, tmp_path: Path
) -> None:
    """Nothing of it can be learned; the others are compared with one another."""

    @agl.rollout
    def agent(task: str, llm: agl.LLM, rollout: agl.Rollout) -> float:
        sample = (rollout.metadata or {})["sample"]
        if sample == 3:
            return 9.0
        ask(llm, [say(task)])
        return float(sample)

    store, result = await run_grpo(agent, untrained_model, tmp_path, ["one"], max_steps=1, batch_size=1)
    found_entries: list[Any] = list(await entries_of_step(store, 1))
    entries = {entry["reward"]: entry["calls"] for entry in found_entries}
    assert entries[9.0] == []
    found = {reward: call["advantage"] for reward, calls in entries.items() for call in calls}
    assert found == {0.0: pytest.approx(-1, abs=1e-5), 1.0: 0.0, 2.0: pytest.approx(1, abs=1e-5)}
    assert result.metrics[0].mean_reward == 1.0  # of those that are learned from


async def test_the_last_mini_batch_is_smaller_and_is_trained(untrained_model: Path, tmp_path: Path) -> None:
    """Eight rollouts in mini-batches of three are three optimizer steps."""

    @agl.rollout
    def agent(task: str, llm: agl.LLM, rollout: agl.Rollout) -> float:
        return two_turns(task, llm) + (rollout.metadata or {})["sample"] * 10

    settings: dict[str, Any] = {"max_steps": 1, "batch_size": 2, "minibatch_rollouts": 3}
    store, result = await run_grpo(agent, untrained_model, tmp_path, **settings)
    assert result.metrics[0].update["steps"] == 3
    entries: list[Any] = list(await entries_of_step(store, 1))
    assert len(entries) == 8
    assert {call["ending"] for entry in entries for call in entry["calls"]} == {"trained"}


async def test_tasks_of_different_forms_train_and_are_evaluated_together(untrained_model: Path, tmp_path: Path) -> None:
    """No table is made of them; more held-out tasks than a batch has are all measured, once each."""
    tasks: list[Any] = [
        {"question": "1"},
        {"text": "two", "hints": [{"at": 1, "of": None}, "three"]},
        "a string",
        ["a", {"list": True}],
        7,
    ]
    seen = list[Any]()

    @agl.rollout
    def agent(task: Any, llm: agl.LLM, rollout: agl.Rollout) -> float:
        seen.append(task)
        ask(llm, [say(str(task))])
        return float((rollout.metadata or {}).get("sample") or 0)

    store, result = await run_grpo(agent, untrained_model, tmp_path, tasks, max_steps=3, val_dataset=tasks)
    assert all(task in tasks for task in seen)
    assert [rollout.input in tasks for rollout in await rollouts_of(store)] == [True] * 24
    assert {str(rollout.input) for rollout in await rollouts_of(store)} == set(map(str, tasks))
    for evaluation in result.evaluations:
        assert len(evaluation.rewards) == len(tasks)
    held_out = await rollouts_of(store, "val")
    assert [rollout.input for rollout in held_out] == tasks * len(result.evaluations)
