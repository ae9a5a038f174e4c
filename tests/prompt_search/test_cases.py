"""Weak point 13: what a critic sees of rollouts."""

from __future__ import annotations

import random
from typing import Any

import agentlightning as agl
from agentlightning.prompt_search.cases import RolloutResult, choose_cases, hidden_secrets, read_results
from agentlightning.types import RolloutConfig, Span
from tests.stubs.model_server import ModelServer


def result(reward: float | None, **more: Any) -> RolloutResult:
    found: dict[str, Any] = {
        "rollout_id": f"ro-{reward}",
        "task": reward,
        "status": "succeeded",
        "final_reward": reward,
        "failure": None if reward is not None else "timeout",
        "messages": [],
        "spans": [],
    }
    return RolloutResult(**{**found, **more})  # type: ignore[typeddict-item]


def test_the_worst_and_the_best_are_shown_the_worst_first() -> None:
    """Weak point 13: a mix, not a random sample."""
    results = [result(reward / 10) for reward in (5, 9, 1, 7, 3, 8)]
    shown = choose_cases(results, 4, random.Random(0))
    assert [case["final_reward"] for case in shown] == [0.1, 0.3, 0.8, 0.9]
    assert [case["final_reward"] for case in choose_cases(results, 1, random.Random(0))] == [0.1]
    assert len(choose_cases(results, 40, random.Random(0))) == 6


def test_one_failure_is_shown_and_more_only_where_too_few_earned_something() -> None:
    """Weak point 13: it may be the prompt that made the agent fail."""
    results = [result(None), result(None), result(None), *(result(reward) for reward in (0.1, 0.2, 0.8, 0.9))]
    rewards = [case["final_reward"] for case in choose_cases(results, 4, random.Random(0))]
    assert rewards == [None, 0.1, 0.2, 0.9]
    assert [case["final_reward"] for case in choose_cases(results[:4], 3, random.Random(0))] == [None, None, 0.1]
    assert [case["final_reward"] for case in choose_cases(results, 2, random.Random(0))] == [0.1, 0.9]


def test_equal_ones_are_drawn_by_the_generator_that_is_given() -> None:
    results = [result(0.0, rollout_id=str(number)) for number in range(20)]
    drawn = [tuple(case["rollout_id"] for case in choose_cases(results, 3, random.Random(seed))) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_keys_do_not_leave_for_a_model_of_somebody_else() -> None:
    key = "sk-test-0123456789abcdefghijklmn"
    shown = hidden_secrets([result(0.5, messages=[{"messages": [{"role": "user", "content": f"my key is {key}"}]}])])
    assert key not in str(shown)


def test_a_result_has_the_task_the_reward_and_the_conversation_of_the_latest_attempt_cut_to_size() -> None:
    """Weak point 13: earlier attempts and endless texts are left out; what several calls share is told once."""
    tries: list[int] = []

    @agl.rollout
    def agent(task: str, llm: agl.LLM, main_prompt: agl.PromptTemplate) -> float:
        import openai

        tries.append(1)
        with openai.OpenAI(base_url=llm.endpoint, api_key="k") as client:
            said: list[Any] = [{"role": "user", "content": f"try {len(tries)} {task} " + "x" * 9000}]
            for _ in range(2):
                reply = client.chat.completions.create(model=llm.model, messages=said)
                said += [
                    reply.choices[0].message.model_dump(include={"role", "content"}),
                    {"role": "user", "content": "go on"},
                ]
        if len(tries) == 1:
            raise ConnectionError("away")
        return 0.25

    found: list[RolloutResult] = []

    @agl.algo
    async def reads(*, store: agl.LightningStore, initial_resources: Any, llm_proxy: agl.LLMProxy) -> None:
        await llm_proxy.start()
        await store.update_resources("r", initial_resources)
        config = RolloutConfig(max_attempts=2, retry_condition=["failed"])
        rollout = await store.enqueue_rollout("the task", "train", resources_id="r", config=config)
        ended = await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=30)
        await llm_proxy.stop()
        found.extend(await read_results(store, ended, agl.TraceToMessages()))

    with ModelServer(lambda request: "fine") as server:
        proxy = agl.LLMProxy(model_list=[server.entry("policy")])
        given: Any = {"main_prompt": agl.PromptTemplate(template="x", engine="f-string"), "llm": proxy.as_resource()}

        trainer = agl.Trainer(algorithm=reads, strategy="shm", llm_proxy=proxy, initial_resources=given)
        trainer.fit(agent)
    [case] = found
    assert (case["task"], case["status"], case["final_reward"], case["failure"]) == (
        "the task",
        "succeeded",
        0.25,
        None,
    )
    [conversation] = case["messages"]
    roles = [message["role"] for message in conversation["messages"]]
    assert roles == ["user", "assistant", "user", "assistant"]
    assert conversation["messages"][0]["content"].startswith("try 2 the task")
    assert len(conversation["messages"][0]["content"]) == 2000
    assert all("try 1" not in str(span) for span in case["spans"])


async def test_a_rollout_that_failed_says_why() -> None:
    store = agl.InMemoryLightningStore()
    await store.enqueue_rollout({"n": 1})
    claimed = await store.dequeue_rollout()
    assert claimed is not None
    await store.add_span(
        Span.from_attributes(
            attributes={"long": "y" * 9000}, rollout_id=claimed.rollout_id, attempt_id=claimed.attempt.attempt_id,
            sequence_id=1, name="work",
        )
    )  # fmt: skip
    await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="failed")
    [rollout] = await store.query_rollouts()
    [case] = await read_results(store, [rollout], agl.TraceToMessages())
    assert (case["status"], case["final_reward"], case["messages"]) == ("failed", None, [])
    assert case["failure"]
    assert len(case["spans"][0]["attributes"]["long"]) == 2000
