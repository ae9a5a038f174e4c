"""What a store tells those who follow it: which rollouts changed, and from where to go on."""

from __future__ import annotations

from agentlightning.field_help import Value
from agentlightning.types.core import AttemptStatus, Outcome, RolloutMode, RolloutStatus


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


class EventPage(Value):
    """Changes after a cursor, the oldest first, and the cursor to go on from."""

    events: list[RolloutEvent]
    """The changes, the oldest first."""
    cursor: str
    """To be given back for the changes after these."""
