"""Whole runs of GRPO: a gateway that serves again, turns in one row, many calls at once."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.training.result import GRPOResult
from tests.algorithm.parts import ask, calls_of, fit, metrics_of, rollouts_of, say, two_turns, wants_digits

TASKS = ["one", "two", "three", "four"]


async def test_a_gateway_that_served_a_run_before_stamps_from_zero_again_and_gets_its_models_back(
    untrained_model: Path, tmp_path: Path
) -> None:
    judge: Any = {"model_name": "judge", "litellm_params": {"model": "hosted_vllm/j", "api_base": "http://127.0.0.1:9"}}
    proxy = agl.LLMProxy(model_list=[judge])
    await _run(untrained_model, tmp_path / "first", trainer_llm_proxy=proxy)
    store, _ = await _run(untrained_model, tmp_path / "second", trainer_llm_proxy=proxy)
    assert {call.weight_version for call in await calls_of(store, await rollouts_of(store))} == {0, 1}
    assert proxy.model_list == [judge]
    assert not proxy.is_running()


async def test_turns_that_continue_each_other_are_one_row_and_the_first_ratio_is_one(
    untrained_model: Path, tmp_path: Path
) -> None:
    _, result = await _run(untrained_model, tmp_path)
    for figures in result.metrics:
        assert figures.update["rows"] < figures.calls_trained
        assert figures.update["first_ratio_error"] < 1e-3
        assert figures.update["rows"] == sum(figures.seams.values())


def test_the_same_seed_and_one_runner_give_the_same_rewards(untrained_model: Path, tmp_path: Path) -> None:
    def rewards(name: str) -> list[float | None]:
        settings: dict[str, Any] = {"max_steps": 3, "seed": 5, "trainer_runner": None}
        result = fit(wants_digits, TASKS, model=untrained_model, output_dir=tmp_path / name, **settings)
        return [figures.mean_reward for figures in result.metrics]

    assert rewards("first") == rewards("second")


async def _run(model: Path, folder: Path, **settings: Any) -> tuple[agl.InMemoryLightningStore, GRPOResult]:
    """Run `two_turns` in a thread, so that the store can be asked from here afterwards."""
    store = agl.InMemoryLightningStore()
    result = await asyncio.to_thread(fit, two_turns, TASKS, store=store, model=model, output_dir=folder, **settings)
    return store, result


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

    settings = {"max_steps": 1, "batch_size": 1, "num_generations": 2, "max_completion_length": 2}
    result = fit(many, ["one"], model=untrained_model, output_dir=tmp_path, **settings)
    [line] = metrics_of(result)
    assert (line["calls_captured"], line["calls_trained"], line["calls_excluded"]) == (400, 400, {})
