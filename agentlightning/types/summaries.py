"""Rollouts, spans and tokens in short: what a list of many shows of each, and for rollouts how it is asked for and
figures over all of them.

The reward of a rollout is that of its latest attempt. Its step, task and sample are what its metadata say under these
names, where they are whole numbers (a task may be a text of at most 200 characters, too).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from agentlightning.field_help import Value
from agentlightning.types.core import COUNT, AnyRolloutStatus, AttemptStatus, Outcome, RolloutMode, RolloutStatus
from agentlightning.types.mode import AnyMode, aliases
from agentlightning.types.query import PaginatedResult
from agentlightning.types.tracer import StatusCode

SummarySort = Literal["start_time", "end_time", "duration", "reward", "step", "status", "attempts", "spans"]
"""What summaries may be sorted by; `duration` is `end_time - start_time`."""
AnySummarySort = Annotated[SummarySort, aliases(create_time="start_time")]
"""The same, or another word for it."""
AggregateBy = Literal["step", "outcome", "status", "mode", "resources", "worker", "task", "none"]
"""What rollouts may be grouped by; `none` is one group of all."""
SpanKind = Literal["call", "reward", "tool", "agent", "message", "operation", "other"]
"""What a span is of: a model call, a reward, a tool, an agent's turn, something that was emitted, or none of these."""


class RolloutSummary(Value):
    """A rollout and its latest attempt in short, without input, config and metadata."""

    rollout_id: str
    """Given by the store."""
    run_id: str | None = None
    """The run it belongs to; None is a run of its own."""
    status: RolloutStatus
    """Where it stands."""
    mode: RolloutMode | None = None
    """Training, validation or test; None if it does not matter."""
    step: int | None = None
    """The training step it was made for: `metadata["step"]`."""
    task: int | str | None = None
    """Which task it carries out: `metadata["task"]`."""
    sample: int | None = None
    """Which of several rollouts of the task it is: `metadata["sample"]`."""
    start_time: float
    """When it was enqueued or started."""
    end_time: float | None = None
    """When it ended; None before."""
    resources_id: str | None = None
    """The resources that the agent gets; None if none were published."""
    resources_version: int | None = None
    """Their version."""
    attempts: int = 0
    """How many attempts it has."""
    attempt_id: str | None = None
    """The latest attempt; None before the first."""
    attempt_status: AttemptStatus | None = None
    """Where the latest attempt stands."""
    worker_id: str | None = None
    """The worker of the latest attempt."""
    outcome: Outcome | None = None
    """How the latest attempt ended; None before."""
    outcome_reason: str | None = None
    """A short word that refines the outcome."""
    error_type: str | None = None
    """Class of the exception that ended the latest attempt."""
    reward: float | None = None
    """The final reward of the latest attempt."""
    rewards: dict[str, float] | None = None
    """Its dimensions by name."""
    spans: int = 0
    """Spans stored so far, those of every attempt."""
    input_preview: str = ""
    """The first 200 characters of the input: of a text itself, of anything else its JSON."""


class SummaryPage(PaginatedResult[RolloutSummary]):
    """One page of summaries."""


class RolloutFilter(Value):
    """Which rollouts are meant: those for which all fields hold that are given. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")

    run_id: str | None = None
    """Of this run; None or an empty text given: of no run. Not given: of any."""
    status_in: list[AnyRolloutStatus] | None = None
    """Whose status is one of these."""
    mode_in: list[AnyMode] | None = None
    """Whose mode is one of these."""
    outcome_in: list[Outcome] | None = None
    """Whose outcome is one of these."""
    outcome_reason: str | None = None
    """Whose outcome has this reason."""
    step_from: int | None = Field(default=None, **COUNT)
    """Of this step or a later one."""
    step_to: int | None = Field(default=None, **COUNT)
    """Of this step or an earlier one."""
    task: int | str | None = None
    """Of this task."""
    reward_from: float | None = Field(default=None, allow_inf_nan=False)
    """With this reward or a greater one."""
    reward_to: float | None = Field(default=None, allow_inf_nan=False)
    """With this reward or a smaller one."""
    has_reward: bool | None = None
    """With a reward, or (False) without one."""
    worker_id: str | None = None
    """Whose latest attempt is of this worker."""
    resources_id: str | None = None
    """With these resources."""
    resources_version: int | None = Field(default=None, **COUNT)
    """With this version of its resources."""
    input_contains: str | None = None
    """With this text, whatever its case, in the first 2,000 characters of the input: of a text itself, of anything
    else its JSON."""
    rollout_id_contains: str | None = None
    """With this text in its id."""
    rollout_id_in: list[str] | None = None
    """With one of these ids."""
    started_after: float | None = Field(default=None, allow_inf_nan=False)
    """Enqueued or started at this moment or later."""
    started_before: float | None = Field(default=None, allow_inf_nan=False)
    """Enqueued or started before this moment."""

    @model_serializer(mode="wrap")
    def _given_only(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if name in self.model_fields_set}


class AggregateGroup(Value):
    """Figures of the rollouts of one group. Those of rewards are null where none of them has a reward."""

    key: int | str | None = None
    """What they have in common; of resources `id@version`. None: they have none."""
    count: int
    """How many rollouts."""
    scored: int
    """How many of them have a reward."""
    mean: float | None = None
    """Mean reward."""
    stderr: float | None = None
    """Standard error of the mean: the standard deviation of the sample over the root of `scored`. None below two."""
    minimum: float | None = None
    """Smallest reward."""
    maximum: float | None = None
    """Greatest reward."""
    p10: float | None = None
    """10 % of the rewards are not greater; between two rewards quantiles are interpolated."""
    p25: float | None = None
    """The first quartile."""
    p50: float | None = None
    """The median."""
    p75: float | None = None
    """The third quartile."""
    p90: float | None = None
    """90 % of the rewards are not greater."""
    outcomes: dict[str, int] = Field(default_factory=dict[str, int])
    """How many rollouts have each outcome; those without one are in none."""
    buckets: list[int] = Field(default_factory=list[int])
    """How many rewards lie in each bucket (`RolloutAggregate.bucket_edges`)."""
    seconds_mean: float | None = None
    """Mean seconds from start to end, of those that have ended; None if none has."""
    first_time: float
    """When the first of them started."""
    last_time: float
    """When the last of them started."""


class RolloutAggregate(Value):
    """Figures of rollouts in groups: numbers first, then texts, each in their order, then those without a key."""

    by: AggregateBy
    """What they are grouped by."""
    groups: list[AggregateGroup]
    """The groups that have rollouts."""
    bucket_edges: list[float] = Field(default_factory=list[float])
    """Where the buckets begin, and where the last one ends: of equal width from the smallest to the greatest reward of
    all groups; around a reward that is the same in all of them, 1 wide together. Empty without buckets or rewards."""


class SpanOutline(Value):
    """A span without its attributes, events and links: what a tree over time shows of it."""

    rollout_id: str
    """The rollout."""
    attempt_id: str
    """The attempt."""
    sequence_id: int
    """Its number among the spans of the rollout."""
    trace_id: str
    """Its trace."""
    span_id: str
    """Its id within the trace."""
    parent_id: str | None = None
    """The span it is below; None at the top."""
    name: str
    """What it was named."""
    kind: SpanKind
    """What it is of."""
    start_time: float | None = None
    """When it began."""
    end_time: float | None = None
    """When it ended; None while it has not."""
    status_code: StatusCode = "UNSET"
    """How it ended, as OpenTelemetry says it."""
    status_description: str | None = None
    """Why it failed: the first 200 characters."""
    call_id: str | None = None
    """Of the gateway's record of a model call: its id."""
    call_state: str | None = None
    """How the call ended: see `semconv.CallState`."""
    model: str | None = None
    """The model that was asked."""
    tokens_in: int | None = None
    """Tokens of the prompt."""
    tokens_out: int | None = None
    """Tokens of the completion."""
    weight_version: int | None = None
    """Version of the weights that generated."""
    stale: bool = False
    """It came for an attempt that was over, or no longer the latest."""
    attributes: int = 0
    """How many attributes it has."""


class TokenText(Value):
    """A token id and the text it stands for."""

    id: int
    """The token id."""
    text: str | None = None
    """Its text; bytes that are no whole character are written as `\\xe2`. None if the vocabulary has no such id."""
    partial: bool = False
    """It has bytes that are only a part of a character."""
