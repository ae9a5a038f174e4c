"""Baseline: runs every task, logs its rollouts, and returns their rewards; also if agents fail or hang."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.algorithm.fast import BaselineResult

LOGGER = "agentlightning.algorithm.fast"


@agl.rollout
def agent(task: int) -> float | None:
    if task < 0:
        raise LookupError("a negative task")
    return None if task == 0 else float(task)


def fit(
    agent: Any, train: list[Any], val: Any = None, *, trainer: dict[str, Any] | None = None, **settings: Any
) -> BaselineResult:
    made = agl.Trainer(algorithm=agl.Baseline(**settings), strategy="shm", **(trainer or {}))
    made.fit(agent, train_dataset=train, val_dataset=val)
    return made.result


def test_rewards_are_in_order_with_the_outcomes_and_epochs_repeat_both_datasets() -> None:
    result = fit(agent, [1, -1, 3], [0], max_queue_length=2)
    assert result.rewards == [1.0, None, 3.0, None]
    assert result.outcomes == {"scored": 2, "infrastructure_fault": 1, "unscored": 1}
    assert result.mean_reward == 2.0
    assert len(result.seconds) == 4
    assert result.first_error == "LookupError: a negative task"
    assert str(result) == "4 rollouts (1 infrastructure_fault, 2 scored, 1 unscored), mean reward 2.000"
    assert fit(agent, [1], [2], n_epochs=2).rewards == [1.0, 2.0, 1.0, 2.0]


def test_a_fault_of_the_policy_earns_its_reward_and_without_any_reward_there_is_no_mean() -> None:
    @agl.rollout
    def faulty(task: str) -> float:
        raise agl.PolicyFault("nonsense", reward=-1.0)

    result = fit(faulty, ["a"])
    assert (result.rewards, result.outcomes, result.mean_reward) == ([-1.0], {"policy_fault": 1}, -1.0)
    result = fit(agent, [0])
    assert (str(result), result.mean_reward) == ("1 rollout (1 unscored), no reward", None)


def test_initial_resources_reach_the_agent() -> None:
    @agl.rollout
    def greets(task: str, prompt_template: agl.PromptTemplate) -> float:
        return float(prompt_template.format(name=task) == "Hello, Ada!")

    prompt = agl.PromptTemplate(template="Hello, {name}!", engine="f-string")
    assert fit(greets, ["Ada", "Grace"], trainer={"initial_resources": {"p": prompt}}).rewards == [1.0, 0.0]


def test_no_more_rollouts_wait_in_the_queue_than_allowed() -> None:
    counts: list[int] = []
    store = agl.InMemoryLightningStore()

    @agl.rollout
    async def counting(task: int) -> float:
        counts.append(len(await store.query_rollouts(status_in=["queuing"])))
        return 1.0

    fit(counting, list(range(9)), trainer={"store": store}, max_queue_length=3)
    assert max(counts) <= 3


def test_a_task_that_never_ends_is_cancelled_and_the_next_one_is_run() -> None:
    @agl.rollout
    async def hanging(task: str) -> float:
        await (asyncio.Event().wait() if task == "hangs" else asyncio.sleep(0))
        return 1.0

    assert fit(hanging, ["hangs", "quick"], timeout_seconds=0.5, max_queue_length=1).rewards == [None, 1.0]


@pytest.mark.parametrize(
    ("verbosity", "shown", "hidden"),
    [
        ("keys", "['agentlightning.reward", "{'agentlightning"),
        ("key_values", ": 1.0", "]["),
        ("none", "scored", "Span "),
    ],
)
def test_the_log_shows_as_much_of_each_span_as_its_verbosity_says(
    verbosity: Any, shown: str, hidden: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        fit(agent, [1, -1], span_verbosity=verbosity)
    lines = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    text = "\n".join(lines)
    assert hidden not in text
    for part in (shown, "| Attempt at-", "LookupError: a negative task"):
        assert part in text
    assert all(line.startswith("[Rollout ro-") for line in lines[:-1])
    assert lines[-1] == "2 rollouts (1 infrastructure_fault, 1 scored), mean reward 1.000"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_epochs": 0}, "n_epochs"),
        ({"max_queue_length": 0}, "max_queue_length"),
        ({"span_verbosity": "all"}, "span_verbosity"),
        ({"timeout_seconds": 0}, "timeout_seconds must be above 0; got 0"),
        ({"late_rollouts": "kill"}, "late_rollouts must be drop, wait or resubmit"),
        ({}, "Baseline needs tasks"),
    ],
)
def test_a_wrong_setting_or_no_task_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(agl.BadRequestError, match=message):
        fit(agent, [], **settings)


@pytest.mark.parametrize("settings", [{"train_split": 0.5}, {"polling_interval": 5.0}])
def test_settings_without_an_effect_say_so(settings: dict[str, Any]) -> None:
    with pytest.warns(DeprecationWarning, match="has no effect"):
        assert isinstance(agl.Baseline(**settings), agl.FastAlgorithm)
