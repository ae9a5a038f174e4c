"""Strategies: where algorithm and runners run, and how a run ends. Each is loaded on first use."""

from typing import TYPE_CHECKING, Any

from agentlightning.utils.lazy import lazy_attributes

if TYPE_CHECKING:
    from agentlightning.execution.base import (
        AlgorithmBundle,
        AlgorithmDiedError,
        ExecutionStrategy,
        RunnerBundle,
        StalledError,
        StrandedWorkError,
    )
    from agentlightning.execution.client_server import ClientServerExecutionStrategy
    from agentlightning.execution.events import ExecutionEvent, MultiprocessingEvent, ThreadingEvent
    from agentlightning.execution.exit_codes import exit_code_of
    from agentlightning.execution.ray import RayExecutionStrategy
    from agentlightning.execution.run_state import stop_run
    from agentlightning.execution.shared_memory import SharedMemoryExecutionStrategy

_HOMES: dict[str, str] = {
    "AlgorithmBundle": "agentlightning.execution.base",
    "AlgorithmDiedError": "agentlightning.execution.base",
    "ClientServerExecutionStrategy": "agentlightning.execution.client_server",
    "ExecutionEvent": "agentlightning.execution.events",
    "ExecutionStrategy": "agentlightning.execution.base",
    "MultiprocessingEvent": "agentlightning.execution.events",
    "RayExecutionStrategy": "agentlightning.execution.ray",
    "RunnerBundle": "agentlightning.execution.base",
    "SharedMemoryExecutionStrategy": "agentlightning.execution.shared_memory",
    "StalledError": "agentlightning.execution.base",
    "StrandedWorkError": "agentlightning.execution.base",
    "ThreadingEvent": "agentlightning.execution.events",
    "exit_code_of": "agentlightning.execution.exit_codes",
    "stop_run": "agentlightning.execution.run_state",
}

__all__ = [
    "AlgorithmBundle",
    "AlgorithmDiedError",
    "ClientServerExecutionStrategy",
    "ExecutionEvent",
    "ExecutionStrategy",
    "MultiprocessingEvent",
    "RayExecutionStrategy",
    "RunnerBundle",
    "SharedMemoryExecutionStrategy",
    "StalledError",
    "StrandedWorkError",
    "ThreadingEvent",
    "exit_code_of",
    "stop_run",
]


def __getattr__(name: str) -> Any:
    return lazy_attributes(__name__, _HOMES, name)
