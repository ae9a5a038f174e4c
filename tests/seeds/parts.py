"""The modules that the documents import from a project of their own, by path."""

from __future__ import annotations

from collections.abc import Callable
from inspect import isawaitable
from typing import Any

import agentlightning as agl


@agl.rollout
def agent(task: dict[str, float]) -> float:
    """An agent: the reward is in the task."""
    return task["reward"]


class MyAlgo(agl.Baseline):
    """An algorithm that a document names by its import path."""


class MyCustomTracer(agl.OtelTracer):
    """A tracer that a document names by its import path."""


class CustomStrategy(agl.SharedMemoryExecutionStrategy):
    """A strategy that a program registers under a name of its own."""


TASKS: list[Any] = [{"reward": 0.25}, {"reward": 0.75}]


def learns(trainer: agl.Trainer, tasks: list[Any] = TASKS, call: str = "fit", **more: Any) -> None:
    """Run the agent and check its rewards, which are those of the tasks."""
    getattr(trainer, call)(agent, tasks, **more)
    assert trainer.result.rewards == [task["reward"] for task in tasks]


async def traced(work: Callable[[], Any], tracer: Any = None, **ids: str) -> list[agl.Span]:
    """Return the spans of some work in a trace; what it returns is awaited."""
    tracer = tracer or agl.OtelTracer()
    with tracer.lifespan():
        async with tracer.trace_context(**ids):
            waiting = work()
            if isawaitable(waiting):
                await waiting
        return tracer.get_last_trace()


async def claimed(store: agl.LightningStore) -> dict[str, str]:
    """Return the ids of a rollout that was begun, and of its attempt."""
    claim = await store.start_rollout("x")
    return {"rollout_id": claim.rollout_id, "attempt_id": claim.attempt.attempt_id}
