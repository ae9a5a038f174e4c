"""A run, its records and the changes that a store tells those who follow it.

A run is made when its algorithm starts. Its records are append-only. Each has a kind, a step and a name, and these
three are its identity within the run: a record that comes again is known and changes nothing.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from agentlightning.field_help import Value
from agentlightning.types.core import (
    COUNT,
    LARGEST,
    MOMENT,
    AttemptError,
    AttemptStatus,
    Outcome,
    RolloutMode,
    RolloutStatus,
)

RunState = Literal["running", "succeeded", "failed", "stopped", "interrupted"]
"""Where a run stands. `stopped`: it was told to end. `interrupted`: Ctrl+C or SIGTERM ended it. A run whose process
was killed stays `running`, and its `last_heartbeat_time` grows old."""
RecordKind = Literal["step", "ledger", "evaluation", "alarm", "checkpoint", "prompt", "state"]
"""`step`: the figures of a training step. `ledger`: what became of the model calls of one rollout (the name is its
id). `evaluation`: rewards on held-out tasks. `alarm`: something that somebody should look at. `checkpoint`: where
weights and optimizer lie. `prompt`: a version of a prompt. `state`: what the algorithm needs to go on."""


class BestFigure(Value):
    """The best result of a run so far."""

    name: str
    """What was measured, such as `held_out_sampled` or `mean_reward`."""
    value: float = Field(allow_inf_nan=False)
    """Its value; a greater one is better."""
    step: int = Field(**COUNT)
    """The step after which it was measured."""


class Run(Value):
    """A training run, as the store knows it."""

    run_id: str
    """Given by the program, or made by the Trainer."""
    algorithm: str | None = None
    """Name of the algorithm's class or function; None if none has started yet."""
    state: RunState = "running"
    """Where it stands."""
    start_time: float
    """When it was first started."""
    end_time: float | None = None
    """When it ended; None while it runs."""
    last_heartbeat_time: float | None = None
    """The last sign of life of its algorithm."""
    starts: int = 0
    """How often its algorithm was started; more than one: it was resumed."""
    config: dict[str, Any] | None = None
    """Settings, by who takes them; without secrets."""
    versions: dict[str, str] | None = None
    """Versions of Python and of the packages that matter."""
    best: BestFigure | None = None
    """The best result so far; None before the first."""
    last_step: int | None = None
    """Greatest step of its `step` records; None without any."""
    error: AttemptError | None = None
    """The exception that ended it; None if none did."""
    stop_reason: str | None = None
    """Why it is to end; None while it may go on."""
    stop_time: float | None = None
    """When it was told to end."""
    metadata: dict[str, Any] | None = None
    """Whatever the program notes about the run."""


class RunRecord(Value):
    """One record of a run."""

    model_config = ConfigDict(extra="forbid")

    kind: RecordKind
    """What it tells."""
    step: int = Field(ge=0, le=LARGEST)
    """The step that it belongs to; 0 is before the first."""
    name: str = ""
    """Tells records of one kind and step apart; empty where there is one only."""
    time: float | None = Field(default=None, **MOMENT)
    """When it was stored; given by the store."""
    data: dict[str, Any] = Field(default_factory=dict[str, Any])
    """JSON; numbers that are not finite are null."""


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
