"""Values at the agent's side: triplets, datasets, hooks, raw results. Also the small models of the v0.1 protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from opentelemetry.sdk.trace import ReadableSpan
from pydantic import BaseModel, Field
from typing_extensions import override

from agentlightning.types.core import AttemptedRollout, Rollout, RolloutMode, TaskInput
from agentlightning.types.tracer import Span, SpanCoreFields

if TYPE_CHECKING:
    from agentlightning.litagent.litagent import LitAgent
    from agentlightning.runner.base import Runner
    from agentlightning.tracer.base import Tracer

T_co = TypeVar("T_co", covariant=True)


class Triplet(BaseModel):
    """One model call as training data: what it was given, what it said, what it earned."""

    prompt: Any
    response: Any
    reward: float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class Task(BaseModel):
    """One task of the v0.1 protocol."""

    rollout_id: str
    input: TaskInput
    mode: RolloutMode | None = None
    resources_id: str | None = None
    create_time: float | None = None
    last_claim_time: float | None = None
    num_claims: int | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class TaskIfAny(BaseModel):
    """Answer to a poll of the v0.1 protocol."""

    is_available: bool
    task: Task | None = None


class RolloutLegacy(BaseModel):
    """Result of one task of the v0.1 protocol."""

    rollout_id: str
    task: Task | None = None
    final_reward: float | None = None
    triplets: list[Triplet] | None = None
    trace: list[dict[str, Any]] | None = None
    logs: list[str] | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class GenericResponse(BaseModel):
    """Answer of the v0.1 server."""

    status: str = "success"
    message: str | None = None
    data: dict[str, Any] | None = None


RolloutRawResult = None | float | list[ReadableSpan] | list[Span] | list[SpanCoreFields]
"""What an agent may return."""
RolloutRawResultLegacy = None | float | list[Triplet] | list[dict[str, Any]] | list[ReadableSpan] | RolloutLegacy


class Dataset(Protocol[T_co]):
    """Anything with a length and items by index; a list is one."""

    def __getitem__(self, index: int, /) -> T_co: ...

    def __len__(self) -> int: ...


class ParallelWorkerBase:
    """Life of a part that runs in several workers: init, init_worker, run, teardown_worker, teardown."""

    worker_id: int | None

    def __init__(self) -> None:
        self.worker_id = None

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Prepare once, in the main process."""

    def init_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Prepare once per worker."""
        self.worker_id = worker_id

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Do the work."""

    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Undo `init_worker`."""

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Undo `init`."""


class Hook(ParallelWorkerBase):
    """Callbacks of the runner. Override any; take only the keywords you need; sync or async."""

    @override
    def __init__(self) -> None:
        super().__init__()

    async def on_rollout_start(self, *, agent: LitAgent[Any], runner: Runner[Any], rollout: AttemptedRollout) -> None:
        """Resources are resolved, tracing has not begun."""

    async def on_trace_start(
        self, *, agent: LitAgent[Any], runner: Runner[Any], tracer: Tracer, rollout: AttemptedRollout
    ) -> None:
        """The trace context is open, the agent has not been called."""

    async def on_trace_end(
        self, *, agent: LitAgent[Any], runner: Runner[Any], tracer: Tracer, rollout: AttemptedRollout
    ) -> None:
        """The agent has returned, the trace context is still open."""

    async def on_rollout_error(
        self, *, agent: LitAgent[Any], runner: Runner[Any], rollout: AttemptedRollout, error: BaseException
    ) -> None:
        """The attempt ended by this exception, of the agent or of ours; before `on_rollout_end`."""

    async def on_rollout_end(
        self, *, agent: LitAgent[Any], runner: Runner[Any], rollout: AttemptedRollout, spans: list[Span]
    ) -> None:
        """The result is processed, the attempt's status is not written yet; also called on failure."""


__all__ = [
    "Dataset",
    "GenericResponse",
    "Hook",
    "ParallelWorkerBase",
    "Rollout",
    "RolloutLegacy",
    "RolloutRawResult",
    "RolloutRawResultLegacy",
    "Task",
    "TaskIfAny",
    "Triplet",
]
