"""Data types for agents: triplets, datasets and raw results. Also the models of the v0.1 protocol."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from opentelemetry.sdk.trace import ReadableSpan
from pydantic import AliasChoices, ConfigDict, Field

from agentlightning.base.field_help import Value
from agentlightning.types.core import AnyMode, TaskInput
from agentlightning.types.core import Rollout as Rollout
from agentlightning.types.tracer import Span, SpanCoreFields

T_co = TypeVar("T_co", covariant=True)


class Triplet(Value):
    """One model call as training data: its prompt, its response and its reward."""

    prompt: Any
    """Input of the model, such as `{"token_ids": [...]}`."""
    response: Any
    """Output of the model, such as `{"token_ids": [...], "token_logprobs": [...]}`."""
    reward: float | None = None
    """Reward of the call; None if it has no reward."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Origin of the call: ids, name of the agent, weight version."""


class Task(Value):
    """One task of the v0.1 protocol. Additional fields, such as `instance_id`, are kept unchanged."""

    model_config = ConfigDict(extra="allow")

    rollout_id: str = Field(validation_alias=AliasChoices("rollout_id", "task_id"))
    """Rollout of the task; also called `task_id`."""
    input: TaskInput
    """Input of the agent."""
    mode: AnyMode | None = None
    """Purpose of the task: `train`, `val` or `test`; None if not set."""
    resources_id: str | None = None
    """Resources for the agent; None for the latest ones."""
    create_time: float | None = None
    """Time at which the server received the task, in Unix seconds."""
    last_claim_time: float | None = None
    """Time of the last claim by a client, in Unix seconds; None if the task was never claimed."""
    num_claims: int | None = None
    """Number of claims."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Any data that the program stores with the task."""

    @property
    def task_id(self) -> str:
        """Same as `rollout_id`."""
        return self.rollout_id


class TaskIfAny(Value):
    """Response to a poll of the v0.1 protocol."""

    is_available: bool
    """False if no task is available."""
    task: Task | None = None
    """The task; None if no task is available."""


class RolloutLegacy(Value):
    """Result of one task of the v0.1 protocol."""

    rollout_id: str
    """Id of the ended rollout."""
    task: Task | None = None
    """The task of the rollout."""
    final_reward: float | None = None
    """Reward of the rollout; None if it has no reward."""
    triplets: list[Triplet] | None = None
    """Model calls of the rollout as training data."""
    trace: list[dict[str, Any]] | None = None
    """Spans of the rollout as JSON."""
    logs: list[str] | None = None
    """Lines that the agent logged."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Any data that the agent stores with the rollout."""


class GenericResponse(Value):
    """Response of the v0.1 server."""

    status: str = "success"
    """`success`, or a short error name."""
    message: str | None = None
    """Message for a human reader."""
    data: dict[str, Any] | None = None
    """The requested data."""


RolloutRawResult = None | float | list[ReadableSpan] | list[Span] | list[SpanCoreFields]
"""Type of an agent's return value."""
RolloutRawResultLegacy = None | float | list[Triplet] | list[dict[str, Any]] | list[ReadableSpan] | RolloutLegacy
"""Type of the return value of a v0.1 agent."""


class Dataset(Protocol[T_co]):
    """Any object with a length and items by index, such as a list."""

    def __getitem__(self, index: int, /) -> T_co: ...

    def __len__(self) -> int: ...


class ParallelWorkerBase:
    """Base class for work in several workers: `init`, `init_worker`, `run`, `teardown_worker`, `teardown`."""

    worker_id: int | None

    def __init__(self) -> None:
        self.worker_id = None

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Prepare once, in the main process."""

    def init_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Prepare once per worker."""
        self.worker_id = worker_id

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the work of one worker."""

    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Undo `init_worker`."""

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Undo `init`."""
