"""The long manual: its programs, in the order of its chapters. Where it invents, the error names what there is."""

from __future__ import annotations

import asyncio
import datetime
from typing import Any

import pytest
from pydantic import ValidationError

import agentlightning as agl
from agentlightning import (
    InMemoryLightningStore,
    LitAgentRunner,
    OtelTracer,
    Span,
    TraceStatus,
    Trainer,
    emit_reward,
    operation,
)
from agentlightning.algorithm import algo
from agentlightning.execution.shared_memory import SharedMemoryExecutionStrategy
from agentlightning.store import LightningStore
from agentlightning.trainer.registry import ExecutionStrategyRegistry
from agentlightning.types import AttemptedRollout, OtelResource, SpanCoreFields
from tests.seeds.parts import TASKS, agent

# --- data models -----------------------------------------------------------------------------------------------------

EXPORTS = """Triplet RolloutLegacy Task TaskInput TaskIfAny RolloutRawResultLegacy RolloutRawResult RolloutMode
GenericResponse ParallelWorkerBase Dataset AttemptStatus RolloutStatus RolloutConfig Rollout Attempt AttemptedRollout
EnqueueRolloutRequest Hook Worker WorkerStatus PaginatedResult FilterOptions SortOptions FilterField"""


@pytest.mark.parametrize("name", EXPORTS.split())
def test_the_types_that_core_exports(name: str) -> None:
    from agentlightning.types import core

    assert getattr(core, name) is getattr(agl, name)


def test_a_span_as_the_manual_makes_it() -> None:
    span = Span(
        rollout_id="ro-story-001",
        attempt_id="at-story-010",
        sequence_id=3,
        trace_id="trace-001-main",
        span_id="span-003-tool",
        parent_id="span-001-root",
        name="tool_execution",
        status=TraceStatus(status_code="OK", description=None),
        attributes={"tool": "web_search", "query": "onboarding summary"},
        events=[],
        links=[],
        start_time=datetime.datetime.now(),
        end_time=datetime.datetime.now(),
        context=None,
        parent=None,
        resource=OtelResource(attributes={"service.name": "tool-service"}, schema_url=""),
    )
    assert isinstance(span.start_time, float)
    assert set(SpanCoreFields.model_fields) == {"name", "status", "attributes", "start_time", "end_time"}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: agl.Worker(worker_id="w", status="offline"), "'idle', 'busy' or 'unknown'"),
        (lambda: agl.Rollout(rollout_id="r", input=1, start_time=0.0, status="pending"), "'queuing', 'preparing'"),
        (lambda: agl.Rollout(rollout_id="r", input=1, start_time=0.0, mode="eval"), "'train', 'val' or 'test'"),
    ],
)
def test_values_of_other_names_are_refused_with_the_right_ones(make: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        make()


def test_what_is_kept_elsewhere_says_where() -> None:
    rollout = agl.Rollout(rollout_id="ro-1", input=1, start_time=0.0)
    attempt = agl.Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=0.0)
    assert rollout.id == rollout.rollout_id
    for value, name, where in (
        (rollout, "attempts", "query_attempts"),
        (rollout, "worker_id", "get_latest_attempt"),
        (attempt, "spans", "query_spans"),
        (attempt, "reward", "find_final_reward"),
    ):
        with pytest.raises(AttributeError, match=where):
            getattr(value, name)


# --- tutorial: train your first agent --------------------------------------------------------------------------------

ROOMS = [
    {"id": "R001", "name": "Conference A", "capacity": 10},
    {"id": "R002", "name": "Meeting Room B", "capacity": 4},
    {"id": "R003", "name": "Board Room", "capacity": 20},
]
BOOKINGS = [
    {"task": "I need to schedule a meeting for 3 people tomorrow at 2 PM", "expected_room": "Meeting Room B"},
    {"task": "We are hosting a team event for 15 team members", "expected_room": "Board Room"},
]
MAIN_PROMPT = agl.PromptTemplate(template="User request: {user_request}", engine="f-string")


def room_selector(task: dict[str, str], main_prompt: agl.PromptTemplate) -> dict[str, str]:
    """The agent of the tutorial, as the function that it is here."""
    assert main_prompt.format(user_request=task["task"]).startswith("User request: ")
    room = ROOMS[1]
    return {"selected_room": str(room["name"]), "room_id": str(room["id"])}


def room_booking_reward(output: Any, expected: dict[str, str]) -> float:
    return 1.0 if output["selected_room"] == expected["expected_room"] else 0.0


def test_the_first_agent_is_scored_by_a_function_of_output_and_expected() -> None:
    with pytest.warns(DeprecationWarning, match="use n_runners="):
        trainer = Trainer(
            n_workers=1,
            execution_strategy="shm",
            algorithm="Baseline",
            initial_resources={"main_prompt": MAIN_PROMPT},
            reward_fn=room_booking_reward,
        )
    trainer.fit(room_selector, train_dataset=BOOKINGS)
    assert trainer.result.rewards == [1.0, 0.0]


@pytest.mark.parametrize(
    ("statement", "instead"),
    [
        ("from agentlightning import DataProto", "Return the reward from the agent"),
        ("from agentlightning.prompts import PromptTemplate", "Import PromptTemplate from agentlightning"),
        ("from agentlightning.models import LLM", "Import LLM from agentlightning"),
        ("from agentlightning.operation import operation", "Import operation from agentlightning"),
        ("from agentlightning import SystemPrompt", r"agl\.PromptTemplate"),
        ("from agentlightning import SamplingParameters", r"agl\.LLM\(sampling_parameters="),
        ("from agentlightning import TrainerLegacy", r"Use agl\.Trainer"),
        ("from agentlightning import APO", "write it with @agl.algo"),
        ("from agentlightning.algorithm import APO", "write it with @agl.algo"),
        ("from agentlightning.algorithm import VERL", r"use agl\.GRPO"),
    ],
)
def test_imports_of_what_there_is_not_say_what_there_is(statement: str, instead: str) -> None:
    with pytest.raises(ImportError, match=instead):
        exec(statement)


@pytest.mark.parametrize(
    ("method", "instead"),
    [
        ("train", r"fit\(agent, train_dataset=...\); it returns None and leaves the result in trainer.result"),
        ("configure", "settings to the constructor"),
        ("execute_task", r"runner\.step\(task\)"),
        ("record_span", "store.add_span"),
        ("calculate_reward", "reward_fn"),
        ("optimize_step", "@agl.algo"),
        ("update_resources", "store.update_resources"),
    ],
)
def test_methods_that_the_manual_calls_on_a_trainer(method: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=instead):
        getattr(Trainer(), method)


@pytest.mark.parametrize(
    ("settings", "instead"),
    [
        ({"lr": 1e-3}, "setting of the algorithm"),
        ({"epochs": 10}, "setting of the algorithm"),
        ({"max_iterations": 100}, "setting of the algorithm"),
        ({"dataset": BOOKINGS}, r"datasets go to fit\(agent"),
        ({"runner": room_selector}, r"the agent goes to fit\(agent"),
        ({"runner": agl.rollout(lambda task: 1.0)}, r"the agent goes to fit\(agent"),
        ({"algorithm": "APO"}, "prompt optimisation is not part of this release"),
        ({"algorithm": "PPO"}, "'grpo' needs none"),
        ({"algorithm": "GRPO"}, "GRPO needs settings that are missing: model"),
    ],
)
def test_settings_in_the_wrong_place_name_the_right_one(settings: dict[str, Any], instead: str) -> None:
    with pytest.raises((TypeError, ValueError), match=instead):
        Trainer(**settings)


def test_a_runner_that_is_the_agent_is_told_where_agents_go() -> None:
    class RoomSelector(agl.Runner[Any]):
        def run(self, task: str, context: dict[str, Any] | None = None) -> Any:  # type: ignore[override]
            return ROOMS[1]

    with pytest.raises(TypeError, match=r"Nobody calls its run\(\).*goes to fit\(agent, train_dataset=...\)"):
        Trainer(runner=RoomSelector())


# --- tutorial: writing agents ----------------------------------------------------------------------------------------


@operation(name="classify_ticket")
def classify_ticket(ticket: str) -> str:
    """An operation, decorated where no tracer is open."""
    return ticket.upper()


@operation
async def my_function() -> str:
    return "done"


async def writes_a_trace(task: str) -> None:
    assert classify_ticket(task) == task.upper()
    assert await my_function() == "done"
    with operation(name="custom"):
        emit_reward(reward=0.85, name="task_success", attributes={"task_id": "classification", "latency_ms": 150})


def test_operations_and_rewards_of_an_agent() -> None:
    found = Trainer(strategy="shm").evaluate(writes_a_trace, ["ticket"])
    assert found.rewards == [0.85]


async def test_operations_are_plain_calls_where_nothing_is_traced() -> None:
    assert classify_ticket("a") == "A"
    assert await my_function() == "done"


# --- trainer ---------------------------------------------------------------------------------------------------------


def test_a_custom_algorithm_by_the_decorator() -> None:
    @algo
    async def custom_algorithm(*, store: LightningStore) -> dict[str, int]:
        await store.add_resources({})
        done = await store.wait_for_rollout((await store.enqueue_rollout(TASKS[0])).rollout_id, timeout=30)
        return {"policy": len(await store.query_spans(done.rollout_id if done else ""))}

    with pytest.warns(DeprecationWarning, match="n_runners"):
        trainer = Trainer(n_workers=1, algorithm=custom_algorithm, strategy="shm")
    assert trainer.fit(agent) is None
    assert trainer.result["policy"] >= 1


def test_four_workers_in_shared_memory() -> None:
    with pytest.warns(DeprecationWarning, match="n_runners"):
        trainer = Trainer(n_workers=4, execution_strategy="shm", algorithm="baseline", initial_resources={})
    assert isinstance(trainer.strategy, SharedMemoryExecutionStrategy)
    trainer.fit(agent, train_dataset=TASKS)
    assert trainer.result.rewards == [0.25, 0.75]


def test_a_strategy_of_the_users_in_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ExecutionStrategyRegistry, "custom", "tests.seeds.parts.CustomStrategy")
    assert type(Trainer(strategy="custom").strategy).__name__ == "CustomStrategy"


def test_a_trainer_with_a_policy_kernel() -> None:
    from agentlightning.contrib.reward.agentos import PolicyReward
    from agentlightning.contrib.runner.agentos import AgentOSRunner

    class KernelSpace:
        """The little that is asked of a kernel."""

        def on_violation(self, callback: Any) -> None:
            self.refuse = callback

    kernel = KernelSpace()

    def governed(task: str) -> dict[str, str]:
        if "DROP" in task:
            kernel.refuse("DROP is denied")
        return {"done": task}

    runner = AgentOSRunner[Any](kernel, fail_on_violation=False, emit_violations=True)
    trainer = Trainer(runner=runner, reward_fn=PolicyReward(kernel), algorithm="baseline", initial_resources={})
    trainer.fit(governed, train_dataset=["SELECT 1", "DROP TABLE a"])
    assert trainer.result.rewards == [1.0, 0.0]


# --- store -----------------------------------------------------------------------------------------------------------


async def test_the_basic_operations_of_a_store() -> None:
    store = InMemoryLightningStore()
    await store.enqueue_rollout(input={"prompt": "Solve this problem"}, mode="train")
    task = await store.dequeue_rollout(worker_id="worker-1")
    assert isinstance(task, AttemptedRollout)
    await store.finish_rollout(
        rollout_id=task.rollout.rollout_id, attempt_id=task.attempt.attempt_id, response={"answer": "42"}
    )
    [finished] = await store.list_rollouts()
    assert finished.status == "succeeded"
    second = await store.start_rollout(input=1)
    await store.fail_rollout(second.rollout_id, reason="no idea")
    assert [rollout.status for rollout in await store.query_rollouts()] == ["succeeded", "failed"]


def test_the_capabilities_of_a_store() -> None:
    assert {"async_safe", "thread_safe"} <= set(InMemoryLightningStore().capabilities)
    for name, instead in (("collections", "Backend"),):
        with pytest.raises(AttributeError, match=instead):
            getattr(InMemoryLightningStore(), name)


# --- algorithms ------------------------------------------------------------------------------------------------------


def test_the_prompt_optimiser_of_the_manual() -> None:
    async def apo_algorithm(*, store: agl.LightningStore) -> tuple[str, float]:
        prompt_candidates = [
            "You are a helpful assistant. {any_question}",
            "You are a friendly chatbot. {any_question}",
        ]
        prompt_and_rewards: list[tuple[str, float]] = []
        for prompt in prompt_candidates:
            resources: agl.NamedResources = {"main_prompt": agl.PromptTemplate(template=prompt, engine="f-string")}
            await store.update_resources("prompt", resources)
            rollout = await store.enqueue_rollout(input="Explain cats", mode="train")
            await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=30)
            reward = agl.find_final_reward(await store.query_spans(rollout.rollout_id))
            prompt_and_rewards.append((prompt, reward or 0.0))
        return max(prompt_and_rewards, key=lambda pair: pair[1])

    @algo
    async def apo_algorithm_usable_in_trainer(*, store: LightningStore) -> tuple[str, float]:
        return await apo_algorithm(store=store)

    def apo_rollout(task: str, prompt_template: agl.PromptTemplate) -> float:
        return float("friendly" in prompt_template.format(any_question=task))

    with pytest.warns(DeprecationWarning, match="n_runners"):
        trainer = Trainer(n_workers=1, algorithm=apo_algorithm_usable_in_trainer, strategy="shm")
    trainer.fit(apo_rollout)
    assert trainer.result == ("You are a friendly chatbot. {any_question}", 1.0)


def test_the_same_algorithm_and_runner_apart_around_one_store() -> None:
    async def both() -> str:
        store = InMemoryLightningStore()

        async def algorithm() -> str:
            await store.add_resources({})
            done = await store.wait_for_rollout((await store.enqueue_rollout(TASKS[1])).rollout_id, timeout=30)
            assert done is not None
            return done.status

        with LitAgentRunner[Any](tracer=OtelTracer(), max_rollouts=1).run_context(agent=agent, store=store) as runner:
            return (await asyncio.gather(algorithm(), runner.iter()))[0]

    assert asyncio.run(both()) == "succeeded"
