"""Candidates on tasks: results of rollouts, scores, and what the evaluator enqueues, keeps and cancels."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.evaluation.statistics import interval_of
from agentlightning.prompt_search import evaluation
from agentlightning.prompt_search.evaluation import (
    CandidateEvaluator,
    RolloutResult,
    interval,
    read_results,
    score_of,
    sign_test,
)
from agentlightning.types import Rollout, RolloutConfig, Span
from tests.prompt_search.parts import resources
from tests.stubs.model_server import ModelServer

# --- results ---------------------------------------------------------------------------------------------------------


def test_a_result_has_the_task_the_reward_and_the_conversation_of_the_latest_attempt_cut_to_size() -> None:
    """Earlier attempts and endless texts are excluded; a conversation of several calls is shown once."""
    attempts: list[int] = []

    @agl.rollout
    def agent(task: str, llm: agl.LLM, main_prompt: agl.PromptTemplate) -> float:
        import openai

        attempts.append(1)
        with openai.OpenAI(base_url=llm.endpoint, api_key="k") as client:
            messages: list[Any] = [{"role": "user", "content": f"try {len(attempts)} {task} " + "x" * 9000}]
            for _ in range(2):
                reply = client.chat.completions.create(model=llm.model, messages=messages)
                messages.append(reply.choices[0].message.model_dump(include={"role", "content"}))
                messages.append({"role": "user", "content": "go on"})
        if len(attempts) == 1:
            raise ConnectionError("away")
        return 0.25

    results: list[RolloutResult] = []

    @agl.algo
    async def reads(*, store: agl.LightningStore, initial_resources: Any, llm_proxy: agl.LLMProxy) -> None:
        await llm_proxy.start()
        await store.update_resources("r", initial_resources)
        config = RolloutConfig(max_attempts=2, retry_condition=["failed"])
        rollout = await store.enqueue_rollout("the task", "train", resources_id="r", config=config)
        ended = await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=30)
        await llm_proxy.stop()
        results.extend(await read_results(store, ended, agl.TraceToMessages()))

    with ModelServer(lambda request: "fine") as server:
        proxy = agl.LLMProxy(model_list=[server.entry("policy")])
        given = resources(llm=proxy.as_resource())
        agl.Trainer(algorithm=reads, strategy="shm", llm_proxy=proxy, initial_resources=given).fit(agent)
    [result] = results
    assert (result["task"], result["status"], result["final_reward"], result["failure"]) == (
        "the task", "succeeded", 0.25, None,
    )  # fmt: skip
    [conversation] = result["messages"]
    assert [message["role"] for message in conversation["messages"]] == ["user", "assistant", "user", "assistant"]
    assert conversation["messages"][0]["content"].startswith("try 2 the task")
    assert len(conversation["messages"][0]["content"]) == 2000
    assert all("try 1" not in str(span) for span in result["spans"])


async def test_a_rollout_that_failed_says_why(store: agl.LightningStore) -> None:
    await store.enqueue_rollout({"n": 1})
    claimed = await store.dequeue_rollout()
    assert claimed is not None
    ids = {"rollout_id": claimed.rollout_id, "attempt_id": claimed.attempt.attempt_id}
    await store.add_span(Span.from_attributes(attributes={"long": "y" * 9000}, sequence_id=1, name="work", **ids))
    await store.update_attempt(**ids, status="failed")
    [result] = await read_results(store, await store.query_rollouts(), agl.TraceToMessages())
    assert (result["status"], result["final_reward"], result["messages"]) == ("failed", None, [])
    assert result["failure"]
    assert len(result["spans"][0]["attributes"]["long"]) == 2000


# --- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("missing", "mean"), [("skip", 0.75), ("retry", 0.75), ("zero", 0.375)])
def test_a_fault_counts_as_the_policy_says_and_in_the_coverage(missing: Any, mean: float) -> None:
    score = score_of([1.0, 0.5, None, None], missing)
    assert (score.mean, score.tasks, score.scored, score.coverage) == (mean, 4, 2, 0.5)
    assert score_of([None]).mean is None


def test_the_interval_is_wilsons_and_a_few_equal_rewards_are_not_certain() -> None:
    expected = interval_of([1.0, 1.0, 0.0, 1.0])
    assert interval([1.0, 1.0, 0.0, 1.0]) == pytest.approx((expected.mean, expected.low, expected.high))
    mean, low, high = interval([0.5] * 4)
    assert (mean, low < 0.3, high > 0.7) == (0.5, True, True)
    assert interval([0.5] * 400)[1] > low


def test_rewards_beyond_one_and_none_at_all() -> None:
    mean, low, high = interval([-1.0, 2.0, 3.0])
    assert mean is not None
    assert low < mean < high
    assert interval([]) == (None, -math.inf, math.inf)


def test_the_sign_test_excludes_what_one_side_did_not_earn() -> None:
    before: list[float | None] = [*[0.0] * 6, None]
    assert sign_test(before, [1.0] * 7) == 2 * 0.5**6
    assert sign_test(before, before) == 1.0


# --- the evaluator ---------------------------------------------------------------------------------------------------


@pytest.fixture
async def store() -> agl.LightningStore:
    return agl.InMemoryLightningStore()


def evaluator_of(store: agl.LightningStore, **settings: Any) -> CandidateEvaluator:
    async def read(rollouts: Sequence[Rollout]) -> list[RolloutResult]:
        return await read_results(store, rollouts, agl.TraceToMessages())

    given: dict[str, Any] = {"name": "apo", "run": "r", "resources": resources(), "timeout_seconds": 30.0}
    return CandidateEvaluator(store, read, **{**given, **settings})


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
    monkeypatch.setattr(evaluation, "MOST_WITH_MESSAGES", 2)
    evaluator = evaluator_of(store)
    async with served(store, {"a": 0.1, "b": 0.2, "c": 0.3}):
        first, again = [await evaluator.evaluate("v0", prompts("x"), ["a", "b", "c"], "train") for _ in range(2)]
    assert all(result["spans"] for result in first)
    assert [bool(result["spans"]) for result in again] == [False, True, True]
    assert rewards_in(again) == [0.11, 0.21, 0.31]
    assert evaluator.rollouts == 3


async def test_what_is_asked_for_together_is_enqueued_together_and_once(store: agl.LightningStore) -> None:
    evaluator = evaluator_of(store)
    async with served(store, {"a": 0.1, "b": 0.2, "c": 0.3}):
        results = await asyncio.gather(
            evaluator.evaluate("v0", prompts("x"), ["a", "b"], "val"),
            evaluator.evaluate("v1", prompts("yy"), ["a"], "val"),
            evaluator.evaluate("v0", prompts("x"), ["b", "b", "c"], "val"),
        )
        assert [rewards_in(each) for each in results] == [[0.11, 0.21], [0.12], [0.21, 0.21, 0.31]]
        assert evaluator.rollouts == 4
        assert len({rollout.start_time for rollout in await store.query_rollouts()}) == 1, "made in one call"
        await evaluator.evaluate("v0", prompts("x"), ["c", "a"], "val")
        assert evaluator.rollouts == 4
        await evaluator.evaluate("v0", prompts("x"), ["a"], "train")
    assert evaluator.rollouts == 5, "another mode runs again"
    assert {rollout.resources_id for rollout in await store.query_rollouts()} == {"apo-r-v0", "apo-r-v1"}
    assert len(evaluator.known(prompts("x"), "val")) == 3


@pytest.mark.parametrize("missing", ["retry", "skip"])
async def test_a_caller_whose_tasks_have_ended_does_not_wait_for_those_of_others(
    store: agl.LightningStore, missing: str
) -> None:
    """The critique of one prompt begins while another prompt still runs."""
    evaluator = evaluator_of(store, missing=missing)
    async with served(store, {"a": 0.1, "b": None}):
        quick = asyncio.create_task(evaluator.evaluate("v0", prompts("x"), ["a"], "train"))
        faulty = asyncio.create_task(evaluator.evaluate("v1", prompts("yy"), ["a", "b"], "train"))
        slow = asyncio.create_task(evaluator.evaluate("v2", prompts("zzz"), ["a", "hangs"], "train"))
        [result] = await quick
        assert (result["final_reward"], bool(result["spans"])) == (pytest.approx(0.11), True)
        assert not slow.done()
        if missing == "skip":
            assert rewards_in(await faulty) == [0.12, None]
        assert faulty.done() == (missing == "skip"), "else its failure runs once more, with the round"
        assert evaluator.rollouts == 5, "all were enqueued at once, and each task once"
        slow.cancel()
        faulty.cancel()
        await asyncio.wait([slow, faulty])
        assert [each.status for each in await store.query_rollouts() if each.input == "hangs"] == ["cancelled"]


async def test_a_failure_is_kept_apart_and_tried_again_the_next_time(store: agl.LightningStore) -> None:
    rewards: dict[Any, float | None] = {"a": None, "b": 0.5}
    evaluator = evaluator_of(store, missing="skip")
    async with served(store, rewards):
        first = await evaluator.evaluate("v0", prompts("x"), ["a", "b"], "val")
        assert (rewards_in(first), first[0]["failure"]) == ([None, 0.51], "RuntimeError: broken")
        assert len(evaluator.known(prompts("x"), "val")) == 2
        rewards["a"] = 0.4
        assert rewards_in(await evaluator.evaluate("v0", prompts("x"), ["a", "b"], "val")) == [0.41, 0.51]
    assert evaluator.rollouts == 3


@pytest.mark.parametrize("settings", [{"timeout_seconds": 0.3}, {"seconds_left": lambda: 0.3}])
async def test_what_is_late_is_cancelled(store: agl.LightningStore, settings: dict[str, Any]) -> None:
    evaluator = evaluator_of(store, missing="skip", config=RolloutConfig(timeout_seconds=600), **settings)
    async with served(store, {"a": 0.5}):
        results = await evaluator.evaluate("v0", prompts("x"), ["a", "hangs"], "val")
    assert [(r["status"], r["final_reward"] is None) for r in results] == [("succeeded", False), ("cancelled", True)]


async def test_what_nobody_waits_for_any_more_is_cancelled(store: agl.LightningStore) -> None:
    """As when a run is interrupted; as long as one waits, it goes on."""
    evaluator = evaluator_of(store)
    waiting = [asyncio.create_task(evaluator.evaluate(name, prompts(name), ["a"], "val")) for name in ("v0", "v1")]
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

    evaluator = evaluator_of(Broken())
    both = [evaluator.evaluate(name, prompts(name), ["a"], "val") for name in ("v0", "v1")]
    errors = await asyncio.gather(*both, return_exceptions=True)
    assert [type(error) for error in errors] == [ConnectionError, ConnectionError]


async def test_a_caller_after_one_that_gave_up_at_once_is_answered(store: agl.LightningStore) -> None:
    evaluator = evaluator_of(store)
    gave_up = asyncio.create_task(evaluator.evaluate("v0", prompts("x"), ["a"], "val"))
    await asyncio.sleep(0)
    gave_up.cancel()
    await asyncio.wait([gave_up])
    async with served(store, {"a": 0.1}):
        assert rewards_in(await asyncio.wait_for(evaluator.evaluate("v0", prompts("x"), ["a"], "val"), 30)) == [0.11]
