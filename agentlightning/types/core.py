"""The data types of the store: rollouts, attempts, workers and the requests that create them.

Times are `float` seconds since the Unix epoch on the wall clock (`time.time()`), unless a field states otherwise.
The types for agents (`Triplet`, `Dataset`, `Hook`, ...) are in `types/agent.py` and can be imported from here too.
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
"""Largest integer that every JSON parser reads exactly."""
LONGEST = 1e10
"""Largest duration in seconds, about 300 years, so that a time and a duration can be added."""
MOMENT: dict[str, Any] = {"ge": -62e9, "le": 253e9, "allow_inf_nan": False}
"""Range of Unix seconds that a calendar can represent: the years 6 to 9987."""
DURATION: dict[str, Any] = {"ge": -LONGEST, "le": LONGEST, "allow_inf_nan": False}
"""A duration in seconds."""
COUNT: dict[str, Any] = {"ge": -LARGEST, "le": LARGEST}
"""A count or a position."""
TaskInput = Any
"""Input of the agent: any JSON value."""

RolloutStatus = Literal["queuing", "preparing", "running", "failed", "succeeded", "cancelled", "requeuing"]
"""`requeuing`: waiting for another attempt. `failed`, `succeeded` and `cancelled` are final."""
AttemptStatus = Literal["preparing", "running", "failed", "succeeded", "unresponsive", "timeout"]
"""`unresponsive`: no heartbeat for too long; `timeout`: the attempt ran for too long."""
WorkerStatus = Literal["idle", "busy", "unknown"]
"""`unknown`: no heartbeat for too long."""
AnyRolloutStatus = Annotated[RolloutStatus, aliases(pending="queuing", completed="succeeded")]
AnyAttemptStatus = Annotated[AttemptStatus, aliases(pending="preparing", completed="succeeded")]
AnyWorkerStatus = Annotated[WorkerStatus, aliases(offline="unknown")]
"""A status or an alias of it, as accepted in requests. A store always returns the status."""
Outcome = Literal["scored", "policy_fault", "infrastructure_fault", "cancelled", "unscored"]
"""Outcome of an attempt. Only `scored` and `policy_fault` are trained by default."""


class RolloutConfig(Value):
    """Limits and retries of one rollout. Unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid")

    timeout_seconds: float | None = Field(default=None, **DURATION)
    """Longest duration of one attempt in seconds; None for no limit."""
    unresponsive_seconds: float | None = Field(default=None, **DURATION)
    """Longest time without a heartbeat of one attempt in seconds; None for no limit."""
    max_attempts: int = Field(default=1, ge=1, le=LARGEST)
    """Largest number of attempts, including the first one, for the statuses in `retry_condition`."""
    retry_condition: list[AttemptStatus] = Field(default_factory=list[AttemptStatus])
    """Attempt statuses that cause a retry; only failed, timeout and unresponsive have an effect."""
    infrastructure_retries: int = Field(default=3, ge=0, le=LARGEST)
    """Number of retries after a lost worker (its lease expired), in addition to `max_attempts`."""
    retry_delay_seconds: float = Field(default=0.0, ge=0, le=LONGEST, allow_inf_nan=False)
    """Delay in seconds before the first retry can be claimed."""
    retry_backoff: float = Field(default=2.0, ge=1, le=1000, allow_inf_nan=False)
    """Factor by which the delay grows with each further retry."""
    retry_delay_max_seconds: float = Field(default=300.0, ge=0, le=LONGEST, allow_inf_nan=False)
    """Longest delay before a retry in seconds."""
    mode: AnyMode | None = Field(default=None, exclude=True, repr=False)
    """Mode of the rollout; validation moves it to the request or rollout."""


def with_mode_of_config(
    mode: RolloutMode | None, config: RolloutConfig | None
) -> tuple[RolloutMode | None, RolloutConfig | None]:
    """Return the mode of a rollout, which its config can also set, and the config without the mode.

    Raises:
        BadRequestError: the two modes differ.
    """
    if config is None or config.mode is None:
        return mode, config
    if mode is not None and mode != config.mode:
        raise BadRequestError(
            f"mode={mode!r} and config.mode={config.mode!r} differ; a rollout has one mode: pass only mode="
        )
    return config.mode, config.model_copy(update={"mode": None})


class AttemptError(Value):
    """The exception that ended an attempt."""

    type: str
    """Qualified name of the exception class."""
    message: str
    """Message of the exception."""
    traceback: str | None = None
    """Last frames of the traceback, at most 8 KiB."""


class _Signposted(Value):
    """A value with error messages for fields that are stored elsewhere."""

    _elsewhere: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in self._elsewhere:
                raise AttributeError(f"{type(self).__name__} has no {name!r}: {self._elsewhere[name]}")
            return super().__getattr__(name)


class Attempt(_Signposted):
    """One execution of a rollout by one worker."""

    _elsewhere: ClassVar[Mapping[str, str]] = {
        "spans": "read them with store.query_spans(rollout_id, attempt_id)",
    }

    rollout_id: str
    """The rollout that this attempt runs."""
    attempt_id: str
    """Id of the attempt; assigned by the store."""
    sequence_id: int = Field(**COUNT)
    """Number of the attempt within its rollout, starting at 1."""
    start_time: float = Field(**MOMENT)
    """Time of the claim."""
    end_time: float | None = Field(default=None, **MOMENT)
    """Time of the end; None while the attempt runs."""
    status: AnyAttemptStatus = "preparing"
    """Status of the attempt; `failed` and `succeeded` are final."""
    worker_id: str | None = None
    """Worker that claimed the rollout; None if unknown."""
    last_heartbeat_time: float | None = Field(default=None, **MOMENT)
    """Time of the last span or of the worker's last heartbeat; None before the first one."""
    metadata: dict[str, Any] | None = None
    """Any data that the program stores with the attempt."""
    outcome: Outcome | None = None
    """Outcome of the attempt; None while it runs."""
    outcome_reason: str | None = None
    """Reason for the outcome: `no_reward`, `exception`, `lease_expired`, `runner_died`, `budget`, ..."""
    error: AttemptError | None = None
    """Exception that ended the attempt; None if there was none."""
    reward: float | None = None
    """Final reward: the reward of the last span that has one. The store updates it until the attempt ends. None if
    there is no reward or it is not a finite number."""
    rewards: dict[str, float] | None = None
    """Dimensions of the final reward by name, with the primary one first; None if it has no dimensions."""


class Rollout(_Signposted):
    """One execution of an agent on one task, with its input, status and attempts."""

    _elsewhere: ClassVar[Mapping[str, str]] = {
        "attempt": "it is not claimed yet, or was returned without attempts; use store.get_latest_attempt(rollout_id)",
        "attempts": "read them with store.query_attempts(rollout_id)",
        "worker_id": "a worker belongs to an attempt: (await store.get_latest_attempt(rollout_id)).worker_id",
        "reward": "a reward belongs to an attempt: (await store.get_latest_attempt(rollout_id)).reward",
    }

    rollout_id: str
    """Id of the rollout; assigned by the store."""
    input: TaskInput
    """Input of the agent: any JSON value."""
    start_time: float = Field(**MOMENT)
    """Time at which the rollout was enqueued or started."""
    end_time: float | None = Field(default=None, **MOMENT)
    """Time of the end; None before it."""
    mode: AnyMode | None = None
    """Purpose of the rollout: `train`, `val` or `test`; None if not set."""
    resources_id: str | None = None
    """Resources for the agent, set when the rollout is enqueued; None if no resources were published by then."""
    status: AnyRolloutStatus = "queuing"
    """Status of the rollout; `succeeded`, `failed` and `cancelled` are final."""
    config: RolloutConfig = Field(default_factory=RolloutConfig)
    """Limits and retries of the rollout."""
    metadata: dict[str, Any] | None = None
    """Any data that the program stores with the rollout."""
    run_id: str | None = None
    """Run of the rollout; None for no run. Runners claim only the rollouts of their run."""
    resources_version: int | None = Field(default=None, **COUNT)
    """Version of the resources, set when the rollout is enqueued."""
    priority: int = Field(default=0, **COUNT)
    """Rollouts with a higher priority are claimed first; with the same priority, in the order they became claimable."""
    not_before: float | None = Field(default=None, **MOMENT)
    """Earliest time of a claim. A retry with a delay sets it."""

    @property
    def id(self) -> str:
        """Same as `rollout_id`."""
        return self.rollout_id


class AttemptedRollout(Rollout):
    """A rollout together with one of its attempts, usually the latest."""

    attempt: Attempt
    """Attempt with the same `rollout_id` as the rollout."""

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
        """The worker of the attempt; None if unknown."""
        return self.attempt.worker_id

    @property
    def reward(self) -> float | None:
        """The final reward of the attempt; None if it has no reward."""
        return self.attempt.reward

    @property
    def attempts(self) -> list[Attempt]:
        """The attempts of the rollout, if this is its only attempt.

        Raises:
            AttributeError: there were earlier attempts; read them with `query_attempts`.
        """
        if self.attempt.sequence_id > 1:
            raise AttributeError  # `__getattr__` replaces it by an error that names `query_attempts`
        return [self.attempt]


class EnqueueRolloutRequest(Value):
    """One rollout to enqueue. Unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid")

    input: TaskInput
    """Input of the agent: any JSON value. Defaults to `task_id` if that is set."""
    mode: AnyMode | None = None
    """Purpose of the rollout: `train`, `val` or `test`; None if not set."""
    resources_id: str | None = None
    """Resources for the agent; None for the latest ones of the run."""
    config: RolloutConfig | None = None
    """Limits and retries; None for the defaults of `RolloutConfig`."""
    metadata: dict[str, Any] | None = None
    """Any data that the program stores with the rollout."""
    run_id: str | None = None
    """Run of the rollout; None for no run."""
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    """Rollouts with a higher priority are claimed first; with the same priority, in the order they became claimable."""
    not_before: float | None = Field(default=None, **MOMENT)
    """Earliest time of a claim, in wall-clock seconds."""

    task_id: str | None = Field(default=None, exclude=True)
    """Your id of the task; stored in `metadata["task_id"]`."""

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
                raise ValueError(f"task_id={self.task_id!r} and metadata['task_id']={other!r} differ; pass one of them")
            self.metadata = {**(self.metadata or {}), "task_id": self.task_id}
        return self


class Worker(Value):
    """State of a worker, as far as the store knows it from claims and heartbeats."""

    worker_id: str
    """Id of the worker; chosen by the worker."""
    status: AnyWorkerStatus = "unknown"
    """`busy` while it has an attempt; `unknown` after its heartbeats stop or its attempt's lease expires."""
    heartbeat_stats: dict[str, Any] | None = None
    """Machine statistics of the last heartbeat; see `system_snapshot`."""
    last_heartbeat_time: float | None = None
    """Time of the last heartbeat; None if there was none."""
    last_dequeue_time: float | None = None
    """Time of the last request for a rollout; None if there was none."""
    last_busy_time: float | None = None
    """Time at which it last became busy; None if it never did."""
    last_idle_time: float | None = None
    """Time at which it last became idle; None if it never did."""
    current_rollout_id: str | None = None
    """Rollout that it is running; None if it is idle."""
    current_attempt_id: str | None = None
    """Attempt that it is running; None if it is idle."""
    run_id: str | None = None
    """Run from which it claims rollouts; None for rollouts of no run."""


class RetentionPolicy(Value):
    """Limits on the ended rollouts that a store keeps for each run. Rollouts that have not ended are never removed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keep_last: int | None = Field(default=None, ge=0, le=LARGEST)
    """Number of the latest ended rollouts to keep; None for no limit."""
    max_age: float | None = Field(default=None, ge=0, le=LONGEST, allow_inf_nan=False)
    """Seconds after its end until a rollout is removed; None for no limit."""
    max_bytes: int | None = Field(default=None, ge=0, le=LARGEST)
    """Largest size of the spans of all rollouts of a run, in bytes; None for no limit. The oldest ended rollouts are
    removed first."""
    max_run_age: float | None = Field(default=None, ge=0, le=LONGEST, allow_inf_nan=False)
    """Seconds after its end until a run is removed with its records and resources; None keeps all runs."""


def __getattr__(name: str) -> Any:
    """Return a name of `agentlightning.types`, for programs that import it from here."""
    if name == "__all__" or not name.startswith("_"):
        return getattr(importlib.import_module("agentlightning.types"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
