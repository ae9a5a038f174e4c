"""The rollouts that the evaluator enqueues, keeps and cancels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.prompt_search import evaluator
from agentlightning.prompt_search.evaluator import CandidateEvaluator
from agentlightning.prompt_search.results import RolloutResult, read_results
from agentlightning.types import Rollout, RolloutConfig
from tests.prompt_search.parts import resources


@pytest.fixture
async def store() -> agl.LightningStore:
    return agl.InMemoryLightningStore()


def evaluator_of(store: agl.LightningStore, **settings: Any) -> CandidateEvaluator:
    async def read(rollouts: Sequence[Rollout]) -> list[RolloutResult]:
        return await read_results(store, rollouts, agl.TraceToMessages())

    defaults: dict[str, Any] = {"name": "apo", "run": "r", "resources": resources(), "timeout_seconds": 30.0}
    return CandidateEvaluator(store, read, **{**defaults, **settings})


def prompts(text: str) -> dict[str, agl.PromptTemplate]:
    return {"main_prompt": agl.PromptTemplate(template=text, engine="f-string")}


def rewards_in(results: Sequence[RolloutResult]) -> Any:
    return [reward if (reward := result["final_reward"]) is None else pytest.approx(reward) for result in results]


@asynccontextmanager
async def served(store: agl.LightningStore, rewards: dict[Any, float | None]) -> AsyncGenerator[None]:
    """Run an agent meanwhile: the reward of a task, and a hundredth for each letter of the prompt. None fails, a task
    without an entry hangs."""

    @agl.rollout
    async def agent(task: Any, main_prompt: agl.PromptTemplate) -> float:
        if task not in rewards:
            await asyncio.sleep(600)
        reward = rewards[task]
        if reward is None:
            raise RuntimeError("broken")
        return reward + len(main_prompt.template) / 100

    runner = agl.LitAgentRunner[Any](agl.OtelTracer(), concurrency=8)

    async def run() -> None:
        with runner.run_context(agent=agent, store=store):
            await runner.iter()

    running = asyncio.create_task(run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_messages_of_training_tasks_are_kept_of_the_last_ones_only(
    store: agl.LightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluator, "MOST_WITH_MESSAGES", 2)
    runs = evaluator_of(store)
    async with served(store, {"a": 0.1, "b": 0.2, "c": 0.3}):
        first, again = [await runs.evaluate("v0", prompts("x"), ["a", "b", "c"], "train") for _ in range(2)]
    assert all(result["spans"] for result in first)
    assert [bool(result["spans"]) for result in again] == [False, True, True]
    assert rewards_in(again) == [0.11, 0.21, 0.31]
    assert runs.rollouts == 3


async def test_what_is_asked_for_together_is_enqueued_together_and_once(store: agl.LightningStore) -> None:
    runs = evaluator_of(store)
    async with served(store, {"a": 0.1, "b": 0.2, "c": 0.3}):
        results = await asyncio.gather(
            runs.evaluate("v0", prompts("x"), ["a", "b"], "val"),
            runs.evaluate("v1", prompts("yy"), ["a"], "val"),
            runs.evaluate("v0", prompts("x"), ["b", "b", "c"], "val"),
        )
        assert [rewards_in(each) for each in results] == [[0.11, 0.21], [0.12], [0.21, 0.21, 0.31]]
        assert runs.rollouts == 4
        assert len({rollout.start_time for rollout in await store.query_rollouts()}) == 1, "made in one call"
        await runs.evaluate("v0", prompts("x"), ["c", "a"], "val")
        assert runs.rollouts == 4
        await runs.evaluate("v0", prompts("x"), ["a"], "train")
    assert runs.rollouts == 5, "another mode runs again"
    assert {rollout.resources_id for rollout in await store.query_rollouts()} == {"apo-r-v0", "apo-r-v1"}
    assert len(runs.known(prompts("x"), "val")) == 3


@pytest.mark.parametrize("missing", ["retry", "skip"])
async def test_a_caller_whose_tasks_have_ended_does_not_wait_for_those_of_others(
    store: agl.LightningStore, missing: str
) -> None:
    """The critique of one prompt begins while another prompt still runs."""
    runs = evaluator_of(store, missing=missing)
    async with served(store, {"a": 0.1, "b": None}):
        quick = asyncio.create_task(runs.evaluate("v0", prompts("x"), ["a"], "train"))
        faulty = asyncio.create_task(runs.evaluate("v1", prompts("yy"), ["a", "b"], "train"))
        slow = asyncio.create_task(runs.evaluate("v2", prompts("zzz"), ["a", "hangs"], "train"))
        [result] = await quick
        assert (result["final_reward"], bool(result["spans"])) == (pytest.approx(0.11), True)
        assert not slow.done()
        if missing == "skip":
            assert rewards_in(await faulty) == [0.12, None]
        assert faulty.done() == (missing == "skip"), "else its failure runs once more, with the round"
        assert runs.rollouts == 5, "all were enqueued at once, and each task once"
        slow.cancel()
        faulty.cancel()
        await asyncio.wait([slow, faulty])
        assert [each.status for each in await store.query_rollouts() if each.input == "hangs"] == ["cancelled"]


async def test_a_failure_is_kept_apart_and_tried_again_the_next_time(store: agl.LightningStore) -> None:
    rewards: dict[Any, float | None] = {"a": None, "b": 0.5}
    runs = evaluator_of(store, missing="skip")
    async with served(store, rewards):
        first = await runs.evaluate("v0", prompts("x"), ["a", "b"], "val")
        assert (rewards_in(first), first[0]["failure"]) == ([None, 0.51], "RuntimeError: broken")
        assert len(runs.known(prompts("x"), "val")) == 2
        rewards["a"] = 0.4
        assert rewards_in(await runs.evaluate("v0", prompts("x"), ["a", "b"], "val")) == [0.41, 0.51]
    assert runs.rollouts == 3


async def test_with_retry_a_failure_runs_once_more(store: agl.LightningStore) -> None:
    rewards: dict[Any, float | None] = {"a": None, "b": 0.5}
    runs = evaluator_of(store)

    class Flaky(dict[Any, float | None]):
        def __getitem__(self, task: Any) -> float | None:
            reward, rewards[task] = rewards[task], 0.4
            return reward

    async with served(store, Flaky(rewards)):
        assert rewards_in(await runs.evaluate("v0", prompts("x"), ["a", "b"], "train")) == [0.41, 0.51]
    assert runs.rollouts == 3


@pytest.mark.parametrize("settings", [{"timeout_seconds": 0.3}, {"seconds_left": lambda: 0.3}])
async def test_what_is_late_is_cancelled(store: agl.LightningStore, settings: dict[str, Any]) -> None:
    runs = evaluator_of(store, missing="skip", config=RolloutConfig(timeout_seconds=600), **settings)
    async with served(store, {"a": 0.5}):
        results = await runs.evaluate("v0", prompts("x"), ["a", "hangs"], "val")
    assert [(r["status"], r["final_reward"] is None) for r in results] == [("succeeded", False), ("cancelled", True)]


async def test_what_nobody_waits_for_any_more_is_cancelled(store: agl.LightningStore) -> None:
    """An interrupted run cancels its rollouts; they continue as long as one caller waits."""
    runs = evaluator_of(store)
    waiting = [asyncio.create_task(runs.evaluate(name, prompts(name), ["a"], "val")) for name in ("v0", "v1")]
    while len(await store.query_rollouts()) < 2:  # noqa: ASYNC110 -- nobody tells
        await asyncio.sleep(0.01)
    for task, status in zip(waiting, ("queuing", "cancelled"), strict=True):
        task.cancel()
        await asyncio.wait([task])
        assert {rollout.status for rollout in await store.query_rollouts()} == {status}


async def test_an_error_of_the_store_reaches_everybody_who_waits() -> None:
    class Broken(agl.InMemoryLightningStore):
        async def enqueue_many_rollouts(self, *args: Any, **more: Any) -> Any:
            raise ConnectionError("the store is away")

    runs = evaluator_of(Broken())
    both = [runs.evaluate(name, prompts(name), ["a"], "val") for name in ("v0", "v1")]
    errors = await asyncio.gather(*both, return_exceptions=True)
    assert [type(error) for error in errors] == [ConnectionError, ConnectionError]


async def test_a_caller_after_one_that_gave_up_at_once_is_answered(store: agl.LightningStore) -> None:
    runs = evaluator_of(store)
    gave_up = asyncio.create_task(runs.evaluate("v0", prompts("x"), ["a"], "val"))
    await asyncio.sleep(0)
    gave_up.cancel()
    await asyncio.wait([gave_up])
    async with served(store, {"a": 0.1}):
        assert rewards_in(await asyncio.wait_for(runs.evaluate("v0", prompts("x"), ["a"], "val"), 30)) == [0.11]
