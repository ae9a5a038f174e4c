"""Results of rollouts, and scores over them."""

from __future__ import annotations

import math
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.evaluation.statistics import interval_of
from agentlightning.prompt_search.results import RolloutResult, interval, read_results, score_of, sign_test
from agentlightning.types import RolloutConfig, Span
from tests.prompt_search.parts import resources
from tests.stubs.model_server import ModelServer


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
        initial = resources(llm=proxy.as_resource())
        agl.Trainer(algorithm=reads, strategy="shm", llm_proxy=proxy, initial_resources=initial).fit(agent)
    [result] = results
    assert (result["task"], result["status"], result["final_reward"], result["failure"]) == (
        "the task", "succeeded", 0.25, None,
    )  # fmt: skip
    [conversation] = result["messages"]
    assert [message["role"] for message in conversation["messages"]] == ["user", "assistant", "user", "assistant"]
    assert conversation["messages"][0]["content"].startswith("try 2 the task")
    assert len(conversation["messages"][0]["content"]) == 2000
    assert all("try 1" not in str(span) for span in result["spans"])


async def test_a_rollout_that_failed_says_why() -> None:
    store = agl.InMemoryLightningStore()
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
