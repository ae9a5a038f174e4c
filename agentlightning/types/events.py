"""What a store tells those who follow it: which rollouts changed, and from where to go on."""

from __future__ import annotations

from pydantic import BaseModel

from agentlightning.types.core import AttemptStatus, Outcome, RolloutMode, RolloutStatus


class RolloutEvent(BaseModel):
    """A rollout changed: where it stands. Several changes in short order may be told as one."""

    rollout_id: str
    run_id: str | None
    status: RolloutStatus
    mode: RolloutMode | None
    attempt_id: str | None
    """The latest attempt."""
    attempt_status: AttemptStatus | None
    outcome: Outcome | None
    worker_id: str | None
    spans: int
    """Spans stored so far, those of every attempt."""
    start_time: float
    end_time: float | None


class EventPage(BaseModel):
    """Changes after a cursor, the oldest first, and the cursor to go on from."""

    events: list[RolloutEvent]
    cursor: str
