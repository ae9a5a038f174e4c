"""Values at the agent's side: triplets, datasets, raw results. Also the small models of the v0.1 protocol."""

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
    """Reward of the call; None if no reward belongs to it."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Origin of the call: ids, the name of the agent, the weight version."""


class Task(Value):
    """One task of the v0.1 protocol. Further fields, such as `instance_id`, are kept as they are."""

    model_config = ConfigDict(extra="allow")

    rollout_id: str = Field(validation_alias=AliasChoices("rollout_id", "task_id"))
    """The rollout that carries out the task; also called `task_id`."""
    input: TaskInput
    """Input of the agent."""
    mode: AnyMode | None = None
    """Training, validation or test; None if it does not matter."""
    resources_id: str | None = None
    """The resources to work with; None is the latest."""
    create_time: float | None = None
    """Time at which the server received the task, in Unix seconds."""
    last_claim_time: float | None = None
    """Time of the last claim by a client, in Unix seconds; None if there was none."""
    num_claims: int | None = None
    """Number of claims."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Any data that the program stores with the task."""

    @property
    def task_id(self) -> str:
        """Same as `rollout_id`."""
        return self.rollout_id


class TaskIfAny(Value):
    """Answer to a poll of the v0.1 protocol."""

    is_available: bool
    """False if there is nothing to do at present."""
    task: Task | None = None
    """The task; None if there is none."""


class RolloutLegacy(Value):
    """Result of one task of the v0.1 protocol."""

    rollout_id: str
    """Id of the ended rollout."""
    task: Task | None = None
    """The task of the rollout."""
    final_reward: float | None = None
    """Reward of the rollout; None if it has none."""
    triplets: list[Triplet] | None = None
    """Model calls of the rollout as training data."""
    trace: list[dict[str, Any]] | None = None
    """Spans of the rollout as JSON."""
    logs: list[str] | None = None
    """Lines that the agent logged."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Any data that the agent stores with the rollout."""


class GenericResponse(Value):
    """Answer of the v0.1 server."""

    status: str = "success"
    """`success`, or a short error name."""
    message: str | None = None
    """Message for people."""
    data: dict[str, Any] | None = None
    """The requested data."""


RolloutRawResult = None | float | list[ReadableSpan] | list[Span] | list[SpanCoreFields]
"""Type of an agent's return value."""
RolloutRawResultLegacy = None | float | list[Triplet] | list[dict[str, Any]] | list[ReadableSpan] | RolloutLegacy
"""Type of the return value of a v0.1 agent."""


class Dataset(Protocol[T_co]):
    """Anything with a length and items by index; a list is one."""

    def __getitem__(self, index: int, /) -> T_co: ...

    def __len__(self) -> int: ...


class ParallelWorkerBase:
    """Base class of a part that runs in several workers: init, init_worker, run, teardown_worker, teardown."""

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
