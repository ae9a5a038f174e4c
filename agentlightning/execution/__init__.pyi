from . import base as base, client_server as client_server, events as events, shared_memory as shared_memory
from agentlightning.execution.base import (
    AlgorithmBundle as AlgorithmBundle,
    AlgorithmDiedError as AlgorithmDiedError,
    ExecutionStrategy as ExecutionStrategy,
    RunnerBundle as RunnerBundle,
    StalledError as StalledError,
    StrandedWorkError as StrandedWorkError,
    exit_code_of as exit_code_of,
)
from agentlightning.execution.client_server import ClientServerExecutionStrategy as ClientServerExecutionStrategy
from agentlightning.execution.events import (
    ExecutionEvent as ExecutionEvent,
    MultiprocessingEvent as MultiprocessingEvent,
    ThreadingEvent as ThreadingEvent,
)
from agentlightning.execution.ray.strategy import RayExecutionStrategy as RayExecutionStrategy
from agentlightning.execution.run_state import stop_run as stop_run
from agentlightning.execution.shared_memory import SharedMemoryExecutionStrategy as SharedMemoryExecutionStrategy
