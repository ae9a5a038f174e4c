"""What the documents import from a project of their own, by path."""

from __future__ import annotations

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
