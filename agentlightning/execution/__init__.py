"""Strategies: where algorithm and runners run, and how a run ends. Each is loaded on first use."""

from typing import TYPE_CHECKING, Any

from agentlightning.utils.lazy import lazy_attributes

if TYPE_CHECKING:
    from agentlightning.execution.base import (
        AlgorithmBundle,
        AlgorithmDiedError,
        ExecutionStrategy,
        RunnerBundle,
        StrandedWorkError,
    )
    from agentlightning.execution.client_server import ClientServerExecutionStrategy
    from agentlightning.execution.events import ExecutionEvent, MultiprocessingEvent, ThreadingEvent
    from agentlightning.execution.shared_memory import SharedMemoryExecutionStrategy

_HOMES: dict[str, str] = {
    "AlgorithmBundle": "agentlightning.execution.base",
    "AlgorithmDiedError": "agentlightning.execution.base",
    "ClientServerExecutionStrategy": "agentlightning.execution.client_server",
    "ExecutionEvent": "agentlightning.execution.events",
    "ExecutionStrategy": "agentlightning.execution.base",
    "MultiprocessingEvent": "agentlightning.execution.events",
    "RunnerBundle": "agentlightning.execution.base",
    "SharedMemoryExecutionStrategy": "agentlightning.execution.shared_memory",
    "StrandedWorkError": "agentlightning.execution.base",
    "ThreadingEvent": "agentlightning.execution.events",
}

__all__ = [
    "AlgorithmBundle",
    "AlgorithmDiedError",
    "ClientServerExecutionStrategy",
    "ExecutionEvent",
    "ExecutionStrategy",
    "MultiprocessingEvent",
    "RunnerBundle",
    "SharedMemoryExecutionStrategy",
    "StrandedWorkError",
    "ThreadingEvent",
]


def __getattr__(name: str) -> Any:
    return lazy_attributes(__name__, _HOMES, name)
