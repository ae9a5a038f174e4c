"""Whole runs of GRPO: a gateway that serves again, parallel calls, tasks and rewards unchanged."""

from __future__ import annotations

import asyncio
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from tests.algorithm.parts import ask, calls_of, fit, metrics_of, rollouts_of, say, two_turns, wants_digits
from tests.training.conformance import cases

TASKS = ["one", "two", "three", "four"]


async def test_a_gateway_that_served_a_run_before_stamps_from_zero_again_and_gets_its_models_back(
    untrained_model: Path, tmp_path: Path
) -> None:
    judge: Any = {"model_name": "judge", "litellm_params": {"model": "hosted_vllm/j", "api_base": "http://127.0.0.1:9"}}
    proxy = agl.LLMProxy(model_list=[judge])
    for name in ("first", "second"):
        settings: Any = {"model": untrained_model, "output_dir": tmp_path / name, "trainer_llm_proxy": proxy}
        store = agl.InMemoryLightningStore()
        await asyncio.to_thread(fit, two_turns, TASKS, store=store, **settings)
    assert {call.weight_version for call in await calls_of(store, await rollouts_of(store))} == {0, 1}
    assert proxy.model_list == [judge]
    assert not proxy.is_running()


def test_the_same_seed_and_one_runner_give_the_same_rewards(untrained_model: Path, tmp_path: Path) -> None:
    def rewards(name: str) -> list[float | None]:
        settings: dict[str, Any] = {"max_steps": 3, "seed": 5, "trainer_runner": None}
        result = fit(wants_digits, TASKS, model=untrained_model, output_dir=tmp_path / name, **settings)
        return [figures.mean_reward for figures in result.metrics]

    assert rewards("first") == rewards("second")


def test_two_hundred_parallel_calls_of_one_attempt_are_answered_and_trained(
    untrained_model: Path, tmp_path: Path
) -> None:
    rewards = iter((0.0, 1.0))  # a group of equal rewards would train nothing

    @agl.rollout
    def many(task: str, llm: agl.LLM) -> float:
        with ThreadPoolExecutor(200) as pool:
            texts = list(pool.map(lambda number: ask(llm, [say(f"{task} {number}")])["content"], range(200)))
        assert len(texts) == 200
        return next(rewards)

    settings: dict[str, Any] = {"max_steps": 1, "batch_size": 1, "num_generations": 2, "max_completion_length": 2}
    settings |= {"model": untrained_model, "max_rows_per_rollout": None}  # each of the calls begins a row
    result = fit(many, ["one"], output_dir=tmp_path, **settings)
    [line] = metrics_of(result)
    assert (line["calls_captured"], line["calls_trained"], line["calls_excluded"]) == (400, 400, {})


def test_rewards_that_differ_in_their_seventh_digit_give_their_advantages(
    untrained_model: Path, tmp_path: Path
) -> None:
    """In bfloat16 all rewards would be 100, and no step would learn."""

    @agl.rollout
    def agent(task: str, llm: agl.LLM, rollout: agl.Rollout) -> float:
        ask(llm, [say(task)])
        return 100 + (rollout.metadata or {})["sample"] / 10_000

    result = cases.fit(cases.GRPO, agent, untrained_model, tmp_path, tasks=["one"], max_steps=1)
    entries = [record.data for record in cases.read(tmp_path).of("ledger")]
    rewards = [100 + sample / 10_000 for sample in range(4)]
    assert sorted(entry["reward"] for entry in entries) == rewards
    middle, spread = statistics.mean(rewards), statistics.stdev(rewards)
    for entry in entries:
        expected = (entry["reward"] - middle) / (spread + 1e-6)
        assert [call["advantage"] for call in entry["calls"]] == [pytest.approx(expected, abs=1e-6)]
    assert result.metrics[0].calls_trained == 4


def test_tasks_of_different_forms_train_and_are_evaluated_together(untrained_model: Path, tmp_path: Path) -> None:
    """No table is made of them; more held-out tasks than a batch has are all measured, once each."""
    tasks: list[Any] = [
        {"question": "1"},
        {"text": "two", "hints": [{"at": 1, "of": None}, "three"]},
        "a string",
        ["a", {"list": True}],
        7,
    ]
    inputs = list[Any]()

    @agl.rollout
    def agent(task: Any, llm: agl.LLM, rollout: agl.Rollout) -> float:
        inputs.append(task)
        ask(llm, [say(str(task))])
        return float((rollout.metadata or {}).get("sample") or 0)

    settings: dict[str, Any] = {"max_steps": 3, "batch_size": 2, "eval_steps": 0}
    result = cases.fit(cases.GRPO, agent, untrained_model, tmp_path, tasks=tasks, held_out=tasks, **settings)
    books = cases.read(tmp_path)
    assert all(task in tasks for task in inputs)
    assert [rollout.input in tasks for rollout in books.rollouts] == [True] * 24
    assert {str(rollout.input) for rollout in books.rollouts} == set(map(str, tasks))
    for evaluation in result.evaluations:
        assert len(evaluation.rewards) == len(tasks)
    assert [rollout.input for rollout in books.held_out] == tasks * len(result.evaluations)
