"""What a run makes of its data: rewards keep their precision, tasks their form, and every rollout is trained."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from tests.algorithm.parts import ask, say, two_turns
from tests.training.conformance.cases import GRPO, fit, read


def test_rewards_that_differ_in_their_seventh_digit_give_their_advantages(
    untrained_model: Path, tmp_path: Path
) -> None:
    """In bfloat16 they would all be 100, and no step would learn."""

    @agl.rollout
    def agent(task: str, llm: agl.LLM, rollout: agl.Rollout) -> float:
        ask(llm, [say(task)])
        return 100 + (rollout.metadata or {})["sample"] / 10_000

    result = fit(GRPO, agent, untrained_model, tmp_path, tasks=["one"], max_steps=1)
    entries = [record.data for record in read(tmp_path).of("ledger")]
    rewards = [100 + sample / 10_000 for sample in range(4)]
    assert sorted(entry["reward"] for entry in entries) == rewards
    middle, spread = statistics.mean(rewards), statistics.stdev(rewards)
    for entry in entries:
        wanted = (entry["reward"] - middle) / (spread + 1e-6)
        assert [call["advantage"] for call in entry["calls"]] == [pytest.approx(wanted, abs=1e-6)]
    assert result.metrics[0].calls_trained == 4


def test_the_last_mini_batch_is_smaller_and_is_trained(untrained_model: Path, tmp_path: Path) -> None:
    """Eight rollouts in mini-batches of three are three optimizer steps."""

    @agl.rollout
    def agent(task: str, llm: agl.LLM, rollout: agl.Rollout) -> float:
        return two_turns(task, llm) + (rollout.metadata or {})["sample"] * 10

    settings: dict[str, Any] = {"max_steps": 1, "batch_size": 2, "minibatch_rollouts": 3}
    result = fit(GRPO, agent, untrained_model, tmp_path, **settings)
    assert result.metrics[0].update["steps"] == 3
    entries = [record.data for record in read(tmp_path).of("ledger")]
    assert len(entries) == 8
    assert {call["ending"] for entry in entries for call in entry["calls"]} == {"trained"}


def test_tasks_of_different_forms_train_and_are_evaluated_together(untrained_model: Path, tmp_path: Path) -> None:
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

    settings: dict[str, Any] = {"max_steps": 3, "batch_size": 2, "eval_steps": 0}
    result = fit(GRPO, agent, untrained_model, tmp_path, tasks=tasks, held_out=tasks, **settings)
    books = read(tmp_path)
    assert all(task in tasks for task in seen)
    assert [rollout.input in tasks for rollout in books.rollouts] == [True] * 24
    assert {str(rollout.input) for rollout in books.rollouts} == set(map(str, tasks))
    for evaluation in result.evaluations:
        assert len(evaluation.rewards) == len(tasks)
    assert [rollout.input for rollout in books.held_out] == tasks * len(result.evaluations)
