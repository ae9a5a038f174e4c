"""The values that travel through the store: rollouts, attempts, workers and the requests that make them.

Times are `float` seconds since the Unix epoch on the wall clock (`time.time()`), unless a field says otherwise.
The agent-side names (`Triplet`, `Dataset`, `Hook`, ...) live in `types/agent.py` and can be imported from here too.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import ConfigDict, Field, model_validator

from agentlightning.base.field_help import Value
from agentlightning.errors import BadRequestError
from agentlightning.types.mode import AnyMode, RolloutMode, aliases

LARGEST = 2**53
"""The largest integer that every JSON reader reads exactly."""
LONGEST = 1e10
"""Largest duration in seconds, about 300 years, so that a time and a duration can be added."""
MOMENT: dict[str, Any] = {"ge": -62e9, "le": 253e9, "allow_inf_nan": False}
"""Seconds since the epoch that a calendar can represent: the years 6 to 9987."""
DURATION: dict[str, Any] = {"ge": -LONGEST, "le": LONGEST, "allow_inf_nan": False}
"""A duration in seconds."""
COUNT: dict[str, Any] = {"ge": -LARGEST, "le": LARGEST}
"""A count, or a position in an order."""
TaskInput = Any
"""Input of the agent: any JSON value."""

RolloutStatus = Literal["queuing", "preparing", "running", "failed", "succeeded", "cancelled", "requeuing"]
"""`requeuing`: it waits for another attempt. `failed`, `succeeded` and `cancelled` are final."""
AttemptStatus = Literal["preparing", "running", "failed", "succeeded", "unresponsive", "timeout"]
"""`unresponsive`: its worker sent no heartbeat for too long; `timeout`: it ran for too long."""
WorkerStatus = Literal["idle", "busy", "unknown"]
"""`unknown`: the worker has sent no heartbeat for too long."""
AnyRolloutStatus = Annotated[RolloutStatus, aliases(pending="queuing", completed="succeeded")]
AnyAttemptStatus = Annotated[AttemptStatus, aliases(pending="preparing", completed="succeeded")]
AnyWorkerStatus = Annotated[WorkerStatus, aliases(offline="unknown")]
"""A status or an alias of it, as accepted in requests. A store keeps and returns the status itself."""
Outcome = Literal["scored", "policy_fault", "infrastructure_fault", "cancelled", "unscored"]
"""Outcome of an attempt. Only `scored` and `policy_fault` are trained by default."""


class RolloutConfig(Value):
    """Limits and retries of one rollout. Unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid")

    timeout_seconds: float | None = Field(default=None, **DURATION)
    """Largest age of one attempt in seconds; None is no limit."""
    unresponsive_seconds: float | None = Field(default=None, **DURATION)
    """Longest time without a heartbeat of one attempt in seconds; None is no limit."""
    max_attempts: int = Field(default=1, ge=1, le=LARGEST)
    """Number of attempts, the first one included, for the conditions below."""
    retry_condition: list[AttemptStatus] = Field(default_factory=list[AttemptStatus])
    """Attempt statuses that may cause a retry; only failed, timeout and unresponsive have an effect."""
    infrastructure_retries: int = Field(default=3, ge=0, le=LARGEST)
    """Further attempts, beside `max_attempts`, after a worker was lost (its lease expired)."""
    retry_delay_seconds: float = Field(default=0.0, ge=0, le=LONGEST, allow_inf_nan=False)
    """Seconds before the first retry may be claimed."""
    retry_backoff: float = Field(default=2.0, ge=1, le=1000, allow_inf_nan=False)
    """Factor by which the delay grows with each further retry."""
    retry_delay_max_seconds: float = Field(default=300.0, ge=0, le=LONGEST, allow_inf_nan=False)
    """Longest delay before a retry in seconds."""
    mode: AnyMode | None = Field(default=None, exclude=True, repr=False)
    """Mode of the request or rollout; moved there on validation."""


def with_mode_of_config(
    mode: RolloutMode | None, config: RolloutConfig | None
) -> tuple[RolloutMode | None, RolloutConfig | None]:
    """Return the mode of a rollout, which its config may also set, and the config without it.

    Raises:
        BadRequestError: the two modes differ.
    """
    if config is None or config.mode is None:
        return mode, config
    if mode is not None and mode != config.mode:
        raise BadRequestError(
            f"mode={mode!r} and config.mode={config.mode!r} differ; a rollout has one mode, give mode="
        )
    return config.mode, config.model_copy(update={"mode": None})


class AttemptError(Value):
    """The exception that ended an attempt."""

    type: str
    """Qualified name of the exception class."""
    message: str
    """Text of the exception."""
    traceback: str | None = None
    """The last frames, trimmed to 8 KiB."""


class _Signposted(Value):
    """A value that reports where a field is stored if it is not stored here."""

    _elsewhere: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in self._elsewhere:
                raise AttributeError(f"{type(self).__name__} has no {name!r}: {self._elsewhere[name]}")
            return super().__getattr__(name)


class Attempt(_Signposted):
    """One try at a rollout by one worker."""

    _elsewhere: ClassVar[Mapping[str, str]] = {
        "spans": "read them with store.query_spans(rollout_id, attempt_id)",
    }

    rollout_id: str
    """The rollout that it carries out."""
    attempt_id: str
    """Assigned by the store."""
    sequence_id: int = Field(**COUNT)
    """1 for the first attempt of the rollout."""
    start_time: float = Field(**MOMENT)
    """Time of the claim."""
    end_time: float | None = Field(default=None, **MOMENT)
    """Time of the end; None while it runs."""
    status: AnyAttemptStatus = "preparing"
    """Status of the attempt; `failed` and `succeeded` are final."""
    worker_id: str | None = None
    """The worker that claimed it; None if none is known."""
    last_heartbeat_time: float | None = Field(default=None, **MOMENT)
    """Time of its last span or of its worker's last heartbeat; None before the first."""
    metadata: dict[str, Any] | None = None
    """Any data that the program stores with the attempt."""
    outcome: Outcome | None = None
    """Outcome of the attempt; None while it runs."""
    outcome_reason: str | None = None
    """A short word that refines the outcome: `no_reward`, `exception`, `lease_expired`, `runner_died`, `budget`, ..."""
    error: AttemptError | None = None
    """The exception that ended it; None if none did."""
    reward: float | None = None
    """Final reward: the reward of the last span that has one, kept up to date by the store. Spans that arrive after
    the end do not count; None if there is none, or if it is not a finite number."""
    rewards: dict[str, float] | None = None
    """The dimensions of the final reward by name, the primary one first; None if it has none."""


class Rollout(_Signposted):
    """One task on its way through the system."""

    _elsewhere: ClassVar[Mapping[str, str]] = {
        "attempt": "nobody has claimed it yet, or it was asked for alone; store.get_latest_attempt(rollout_id)",
        "attempts": "read them with store.query_attempts(rollout_id)",
        "worker_id": "a worker belongs to an attempt: (await store.get_latest_attempt(rollout_id)).worker_id",
        "reward": "a reward belongs to an attempt: (await store.get_latest_attempt(rollout_id)).reward",
    }

    rollout_id: str
    """Assigned by the store."""
    input: TaskInput
    """Input of the agent: any JSON value."""
    start_time: float = Field(**MOMENT)
    """Time of the enqueue or start."""
    end_time: float | None = Field(default=None, **MOMENT)
    """Time of the end; None before."""
    mode: AnyMode | None = None
    """Training, validation or test; None if it does not matter."""
    resources_id: str | None = None
    """The resources that the agent gets, chosen at enqueue; None if no resources were published then."""
    status: AnyRolloutStatus = "queuing"
    """Status of the rollout; `succeeded`, `failed` and `cancelled` are final."""
    config: RolloutConfig = Field(default_factory=RolloutConfig)
    """Limits and retries of the rollout."""
    metadata: dict[str, Any] | None = None
    """Any data that the program stores with the rollout."""
    run_id: str | None = None
    """The run it belongs to; runners of a run claim only its rollouts. None: it belongs to no run."""
    resources_version: int | None = Field(default=None, **COUNT)
    """The version of `resources_id` that it was created with."""
    priority: int = Field(default=0, **COUNT)
    """Higher is claimed first; equal priorities in the order in which they became claimable."""
    not_before: float | None = Field(default=None, **MOMENT)
    """Earliest time of a claim; a retry with a delay sets it."""

    @property
    def id(self) -> str:
        """Same as `rollout_id`."""
        return self.rollout_id


class AttemptedRollout(Rollout):
    """A rollout together with one of its attempts, usually the latest."""

    attempt: Attempt
    """The attempt; has the same `rollout_id` as the rollout."""

    @model_validator(mode="after")
    def _same_rollout(self) -> Self:
        if self.attempt.rollout_id != self.rollout_id:
            raise ValueError(
                "Inconsistent rollout_id between Rollout and Attempt: "
                f"{self.rollout_id!r} and {self.attempt.rollout_id!r}"
            )
        return self

    @property
    def rollout(self) -> AttemptedRollout:
        """The rollout itself, for programs that write `task.rollout.rollout_id`."""
        return self

    @property
    def worker_id(self) -> str | None:
        """The worker of the attempt; None if none is known."""
        return self.attempt.worker_id

    @property
    def reward(self) -> float | None:
        """The final reward of the attempt; None if there is none."""
        return self.attempt.reward

    @property
    def attempts(self) -> list[Attempt]:
        """The attempts of the rollout, where this is its only one.

        Raises:
            AttributeError: there were earlier attempts; read them with `query_attempts`.
        """
        if self.attempt.sequence_id > 1:
            raise AttributeError  # `__getattr__` replaces it by one that says where to read them
        return [self.attempt]


class EnqueueRolloutRequest(Value):
    """One rollout to enqueue. Unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid")

    input: TaskInput
    """Input of the agent: any JSON value. Defaults to `task_id` if that is set."""
    mode: AnyMode | None = None
    """Training, validation or test; None if it does not matter."""
    resources_id: str | None = None
    """The resources that the agent gets; None is the latest of the run."""
    config: RolloutConfig | None = None
    """Limits and retries; None is the defaults of `RolloutConfig`."""
    metadata: dict[str, Any] | None = None
    """Any data that the program stores with the rollout."""
    run_id: str | None = None
    """The run it belongs to; None: it belongs to no run."""
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    """Higher is claimed first; equal priorities in the order in which they became claimable."""
    not_before: float | None = Field(default=None, **MOMENT)
    """Earliest time of a claim, in wall-clock seconds."""

    task_id: str | None = Field(default=None, exclude=True)
    """The program's name of the task; stored in `metadata["task_id"]`."""

    @model_validator(mode="before")
    @classmethod
    def _named_task(cls, data: Any) -> Any:
        fields = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
        return {"input": fields["task_id"], **fields} if fields.get("task_id") is not None else cast("object", data)

    @model_validator(mode="after")
    def _moved(self) -> Self:
        if self.config is not None and self.config.mode is not None:
            self.mode, self.config = with_mode_of_config(self.mode, self.config)
        if self.task_id is not None:
            other = (self.metadata or {}).get("task_id", self.task_id)
            if other != self.task_id:
                raise ValueError(f"task_id={self.task_id!r} and metadata['task_id']={other!r} differ; give one of them")
            self.metadata = {**(self.metadata or {}), "task_id": self.task_id}
        return self


class Worker(Value):
    """A worker as the store sees it. Advisory: derived from claims and heartbeats."""

    worker_id: str
    """Chosen by the worker."""
    status: AnyWorkerStatus = "unknown"
    """`busy` while it has an attempt; `unknown` once its heartbeats stop or its attempt's lease expires."""
    heartbeat_stats: dict[str, Any] | None = None
    """Machine statistics of its last heartbeat; see `system_snapshot`."""
    last_heartbeat_time: float | None = None
    """Time of its last heartbeat; None if it never sent one."""
    last_dequeue_time: float | None = None
    """Time of its last request for a rollout; None if it never sent one."""
    last_busy_time: float | None = None
    """Time at which it last became busy; None if it never was."""
    last_idle_time: float | None = None
    """Time at which it last became idle; None if it never was."""
    current_rollout_id: str | None = None
    """The rollout it works on; None if it is idle."""
    current_attempt_id: str | None = None
    """The attempt it works on; None if it is idle."""
    run_id: str | None = None
    """The run whose rollouts it claims; None claims those of no run."""


class RetentionPolicy(Value):
    """Limits on the ended rollouts that a store keeps, per run. Unfinished rollouts are never removed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keep_last: int | None = Field(default=None, ge=0, le=LARGEST)
    """Number of the latest ended rollouts to keep."""
    max_age: float | None = Field(default=None, ge=0, le=LONGEST, allow_inf_nan=False)
    """Longest time since their end, in seconds."""
    max_bytes: int | None = Field(default=None, ge=0, le=LARGEST)
    """Bytes of spans, over all rollouts of the run; the oldest ended ones are removed first."""
    max_run_age: float | None = Field(default=None, ge=0, le=LONGEST, allow_inf_nan=False)
    """Seconds since the end of a run, after which it is removed with its records and resources. None keeps all runs."""


def __getattr__(name: str) -> Any:
    """Return a name of `agentlightning.types`, which programs also import from here."""
    if name == "__all__" or not name.startswith("_"):
        return getattr(importlib.import_module("agentlightning.types"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
