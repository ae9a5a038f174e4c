"""Statements of the long manual beside its programs: a wrong name, setting or value gets an error that lists all."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

import agentlightning as agl
from agentlightning import (
    Trainer,
    emit_reward,
    operation,
)

# --- data models -----------------------------------------------------------------------------------------------------


def test_other_words_of_the_manual_mean_the_values_that_there_are() -> None:
    fields: dict[str, Any] = {"rollout_id": "r", "start_time": 0.0}
    attempt = agl.Attempt(attempt_id="a", sequence_id=1, status="completed", **fields)  # type: ignore[arg-type]
    rollout = agl.Rollout(input=1, status="pending", mode="eval", **fields)  # type: ignore[arg-type]
    worker = agl.Worker(worker_id="w", status="offline")  # type: ignore[arg-type]
    assert (attempt.status, rollout.status, rollout.mode, worker.status) == ("succeeded", "queuing", "val", "unknown")
    assert agl.RolloutMode.INFERENCE == "test"
    with pytest.raises(ValidationError, match="'idle', 'busy' or 'unknown'"):
        agl.Worker(worker_id="w", status="gone")  # type: ignore[arg-type]


# --- tutorial: train your first agent --------------------------------------------------------------------------------


def room_selector(task: dict[str, str], main_prompt: agl.PromptTemplate) -> dict[str, str]:
    """The agent of the tutorial, as the function that it is here."""
    return {"selected_room": "Meeting Room B", "room_id": "R002"}


def test_imports_of_what_there_is_not_say_what_there_is() -> None:
    with pytest.raises(ImportError, match=r"Use agl\.Trainer"):
        from agentlightning import TrainerLegacy  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.parametrize(
    ("method", "instead"),
    [
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
        ({"dataset": [{"task": "a room"}]}, r"pass datasets to fit\(agent"),
        ({"runner": room_selector}, r"pass the agent to fit\(agent"),
        ({"runner": agl.rollout(lambda task: 1.0)}, r"pass the agent to fit\(agent"),
        ({"algorithm": "PPO"}, "PPO is missing required settings: model"),
        ({"algorithm": "GRPO"}, "GRPO is missing required settings: model"),
    ],
)
def test_settings_in_the_wrong_place_name_the_right_one(settings: dict[str, Any], instead: str) -> None:
    with pytest.raises((TypeError, ValueError), match=instead):
        Trainer(**settings)


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
    evaluation = Trainer(strategy="shm").evaluate(writes_a_trace, ["ticket"])
    assert evaluation.rewards == [0.85]
