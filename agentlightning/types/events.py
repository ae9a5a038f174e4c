"""What a store tells those who follow it: which rollouts and runs changed, and from where to go on."""

from __future__ import annotations

from pydantic import Field

from agentlightning.field_help import Value
from agentlightning.types.core import AttemptStatus, Outcome, RolloutMode, RolloutStatus
from agentlightning.types.runs import RecordKind, RunState


class RolloutEvent(Value):
    """A rollout changed: where it stands. Several changes in short order may be told as one."""

    rollout_id: str
    """The rollout that changed."""
    run_id: str | None
    """The run it belongs to; None is a run of its own."""
    status: RolloutStatus
    """The status that it has by now."""
    mode: RolloutMode | None
    """Training, validation or test; None if it does not matter."""
    attempt_id: str | None
    """The latest attempt."""
    attempt_status: AttemptStatus | None
    """The status of the latest attempt; None if there is none."""
    outcome: Outcome | None
    """How the latest attempt ended; None before."""
    worker_id: str | None
    """The worker of the latest attempt."""
    spans: int
    """Spans stored so far, those of every attempt."""
    start_time: float
    """When the rollout was enqueued or started."""
    end_time: float | None
    """When it ended; None before."""


class RunEvent(Value):
    """A run changed, or was given records: where it stands. Several changes in short order may be told as one."""

    run_id: str
    """The run that changed; empty for the one without a name."""
    state: RunState
    """Where it stands by now."""
    last_step: int | None
    """Greatest step of its `step` records; None without any."""
    records: dict[RecordKind, int]
    """How many records of each kind it has."""
    last_heartbeat_time: float | None
    """The last sign of life of its algorithm."""
    stop_reason: str | None
    """Why it is to end; None while it may go on."""


class EventPage(Value):
    """Changes after a cursor, the oldest first, and the cursor to go on from."""

    events: list[RolloutEvent]
    """Changes of rollouts, the oldest first."""
    runs: list[RunEvent] = Field(default_factory=list[RunEvent])
    """Changes of runs, the oldest first."""
    cursor: str
    """To be given back for the changes after these."""
