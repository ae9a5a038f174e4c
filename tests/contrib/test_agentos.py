"""A policy kernel beside training: violations are recorded, cost reward, or end the attempt."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.contrib.agentos import PolicyWatch, RecorderWatch
from agentlightning.contrib.reward.agentos import PolicyReward
from agentlightning.contrib.runner.agentos import AgentOSRunner
from agentlightning.store import LightningStore
from agentlightning.tracer.scope import MOST_SPANS
from agentlightning.types import Dataset


class Kernel:
    """Refuses statements with a word that is denied."""

    def __init__(self, deny: list[str]) -> None:
        self.deny = deny
        self.callbacks: list[Callable[[Any], None]] = []

    def on_violation(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)

    def execute(self, statement: str) -> str:
        for word in self.deny:
            if word in statement:
                for callback in self.callbacks:
                    callback(f"{word} is denied")
                return "refused"
        return "done"


def agent_of(kernel: Kernel) -> Callable[[list[str]], list[str]]:
    def agent(task: list[str]) -> Any:
        return {"answers": [kernel.execute(statement) for statement in task]}

    return agent


TASKS = [["SELECT 1"], ["DROP a", "SELECT 1", "DELETE b"]]


@pytest.mark.parametrize("strategy", ["shm", {"type": "cs", "server_port": 0}])
def test_violations_cost_reward(strategy: Any) -> None:
    kernel = Kernel(deny=["DROP", "DELETE"])
    runner = AgentOSRunner(kernel)
    trainer = agl.Trainer(runner=runner, reward_fn=PolicyReward(kernel), algorithm="baseline", strategy=strategy)
    for _ in range(2):
        trainer.dev(agent_of(kernel), TASKS)
        assert trainer.result.rewards == [1.0, -1.0]


@agl.algo
async def names_of_spans(*, store: LightningStore, train_dataset: Dataset[Any]) -> list[tuple[str, list[str]]]:
    """Runs every task and returns outcome and violations of each."""
    await store.add_resources({})
    made = [await store.enqueue_rollout(task) for task in train_dataset]
    await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in made], timeout=30)
    rows: list[tuple[str, list[str]]] = []
    for rollout in made:
        attempt = await store.get_latest_attempt(rollout.rollout_id)
        spans = await store.query_spans(rollout.rollout_id)
        assert attempt is not None
        violations = [str(span.attributes["violation"]) for span in spans if "violation" in span.attributes]
        rows.append((str(attempt.outcome), violations))
    return rows


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ("scored", ["DROP is denied", "DELETE is denied"])),
        ({"emit_violations": False}, ("scored", [])),
        ({"fail_on_violation": True}, ("policy_fault", ["DROP is denied"])),
    ],
)
def test_violations_are_recorded_or_end_the_attempt(settings: dict[str, Any], expected: tuple[str, list[str]]) -> None:
    kernel = Kernel(deny=["DROP", "DELETE"])
    trainer = agl.Trainer(
        runner=AgentOSRunner(kernel, **settings),
        reward_fn=PolicyReward(kernel, lambda output, task: len(task)),
        algorithm=names_of_spans,
        strategy="shm",
    )
    trainer.fit(agent_of(kernel), train_dataset=TASKS)
    assert trainer.result == [("scored", []), expected]


def test_the_trainer_builds_one_per_worker_out_of_a_dict() -> None:
    kernel = Kernel(deny=["DROP"])
    runner = {"type": AgentOSRunner, "kernel": kernel}
    trainer = agl.Trainer(runner=runner, strategy="shm", reward_fn=PolicyReward(kernel), max_rollouts=9)
    assert trainer.evaluate(agent_of(kernel), TASKS).rewards == [1.0, 0.0]


def test_what_the_runner_was_given_comes_before_what_the_trainer_says() -> None:
    kernel = Kernel(deny=[])
    with pytest.raises(ValueError, match="max_rollouts of the Trainer would have no effect"):
        agl.Trainer(runner=AgentOSRunner(kernel, max_rollouts=3), max_rollouts=5)


def test_a_kernel_that_tells_of_nothing_is_refused() -> None:
    for part in (AgentOSRunner, PolicyReward):
        with pytest.raises(TypeError, match=r"an object with a method on_violation\(callback\)"):
            part(object())


def test_the_reward_needs_the_runner_that_counts() -> None:
    kernel = Kernel(deny=["DROP"])
    evaluation = agl.Trainer(strategy="shm", reward_fn=PolicyReward(kernel)).evaluate(agent_of(kernel), TASKS[:1])
    assert evaluation.failures == {"RuntimeError": 1}


def test_workers_that_share_a_kernel_count_each_violation_once() -> None:
    kernel = Kernel(deny=["DROP", "DELETE"])
    trainer = agl.Trainer(
        runner=AgentOSRunner(kernel), reward_fn=PolicyReward(kernel), algorithm="baseline", strategy="shm", n_runners=2
    )
    trainer.fit(agent_of(kernel), TASKS * 3)
    assert trainer.result.rewards == [1.0, -1.0] * 3


class DenyList:
    """A policy engine, by the interface of `KernelSpace`."""

    def check_violation(self, agent_role: str, tool_name: str, args: dict[str, Any]) -> str | None:
        return f"{tool_name} is denied" if tool_name == "rm" else None


def test_a_policy_goes_to_other_processes_as_one_object_for_runner_and_reward() -> None:
    policy = PolicyWatch(DenyList())
    runner = AgentOSRunner(policy, reward_fn=PolicyReward(policy))
    again = pickle.loads(pickle.dumps(runner._kernels)), pickle.loads(pickle.dumps((policy, PolicyReward(policy))))
    assert isinstance(again[0].kernel, PolicyWatch)
    assert again[1][0] is again[1][1].kernel
    assert policy.check_violation("a", "rm", {"_syscall": "SYS_EXEC"}) == "rm is denied"
    assert again[1][0].check_violation("a", "ls", {"_syscall": "SYS_EXEC"}) is None


@pytest.mark.slow
def test_an_agent_that_is_refused_without_end_costs_bounded_memory() -> None:
    policy = PolicyWatch(DenyList())

    def agent(task: int) -> Any:
        for _ in range(task):
            policy.check_violation("a", "rm", {"_syscall": "SYS_EXEC"})
        return "done"

    trainer = agl.Trainer(runner=AgentOSRunner(policy), reward_fn=PolicyReward(policy, penalty=0.5), strategy="shm")
    trainer.dev(agent, [MOST_SPANS + 10])
    assert trainer.result.rewards == [1.0 - 0.5 * (MOST_SPANS + 10)]


def test_what_is_no_policy_engine_is_refused() -> None:
    with pytest.raises(TypeError, match="engine must have a method check_violation"):
        PolicyWatch(Kernel(deny=[]))
    with pytest.raises(TypeError, match="recorder must have the methods start_trace and get_log"):
        RecorderWatch(object())
