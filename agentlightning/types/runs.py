"""A run and its records: what a training run is, and what it has written down, for whoever looks at it later.

A run is made when its algorithm starts. Its records are append-only. Each has a kind, a step and a name, and these
three are its identity within the run: a record that comes again is known and changes nothing.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from agentlightning.field_help import Value
from agentlightning.types.core import COUNT, LARGEST, MOMENT, AttemptError

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
