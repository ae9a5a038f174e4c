"""Baseline with agents that fail, hang or ask for resources."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.algorithm.fast import BaselineResult


def _fit(agent: Any, train: list[Any], *, trainer: dict[str, Any] | None = None, **settings: Any) -> BaselineResult:
    made = agl.Trainer(algorithm=agl.Baseline(**settings), strategy="shm", **(trainer or {}))
    made.fit(agent, train_dataset=train)
    return made.result


def test_a_fault_of_the_policy_earns_what_was_said_and_a_crash_earns_nothing() -> None:
    @agl.rollout
    def agent(task: str) -> float:
        raise agl.PolicyFault("nonsense", reward=-1.0) if task == "fault" else RuntimeError("out of order")

    result = _fit(agent, ["fault", "crash"])
    assert result.rewards == [-1.0, None]
    assert result.outcomes == {"policy_fault": 1, "infrastructure_fault": 1}
    assert result.mean_reward == -1.0


def test_without_any_reward_there_is_no_mean() -> None:
    result = _fit(agl.rollout(lambda task: None), ["a"])
    assert result.mean_reward is None
    assert str(result) == "1 rollouts (1 unscored), no reward"


def test_initial_resources_reach_the_agent() -> None:
    @agl.rollout
    def agent(task: str, prompt_template: agl.PromptTemplate) -> float:
        return float(prompt_template.format(name=task) == "Hello, Ada!")

    prompt = agl.PromptTemplate(template="Hello, {name}!", engine="f-string")
    assert _fit(agent, ["Ada", "Grace"], trainer={"initial_resources": {"p": prompt}}).rewards == [1.0, 0.0]


def test_no_more_rollouts_wait_in_the_queue_than_allowed() -> None:
    seen: list[int] = []
    store = agl.InMemoryLightningStore()

    @agl.rollout
    async def agent(task: int) -> float:
        seen.append(len(await store.query_rollouts(status_in=["queuing"])))
        return 1.0

    _fit(agent, list(range(9)), trainer={"store": store}, max_queue_length=3)
    assert max(seen) <= 3


def test_a_task_that_never_ends_is_cancelled_and_the_next_one_is_run() -> None:
    @agl.rollout
    async def agent(task: str) -> float:
        await (asyncio.Event().wait() if task == "hangs" else asyncio.sleep(0))
        return 1.0

    result = _fit(agent, ["hangs", "quick"], timeout_seconds=0.5, max_queue_length=1)
    assert result.rewards == [None, 1.0]


def test_the_ids_come_first_in_each_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="agentlightning.algorithm.fast"):
        _fit(agl.rollout(lambda task: 0.5), ["a"])
    lines = [record.getMessage() for record in caplog.records if record.name == "agentlightning.algorithm.fast"]
    assert all(line.startswith("[Rollout ro-") for line in lines[:-1])
    assert lines[-1] == "1 rollouts (1 scored), mean reward 0.500"


def test_a_limit_of_no_time_is_refused() -> None:
    with pytest.raises(agl.BadRequestError, match="timeout_seconds must be above 0; got 0"):
        agl.Baseline(timeout_seconds=0)
