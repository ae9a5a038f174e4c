"""Rollouts, spans and tokens in short form, as lists of many show them; for rollouts also filters and aggregate
figures.

The reward of a rollout is the reward of its latest attempt. Its step, task and sample come from its metadata under
these names, where they are whole numbers (a task may also be a text of at most 200 characters).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from agentlightning.base.field_help import Value
from agentlightning.types.core import COUNT, AnyRolloutStatus, AttemptStatus, Outcome, RolloutMode, RolloutStatus
from agentlightning.types.mode import AnyMode, aliases
from agentlightning.types.query import PaginatedResult
from agentlightning.types.tracer import StatusCode

SummarySort = Literal["start_time", "end_time", "duration", "reward", "step", "status", "attempts", "spans"]
"""Sort keys of summaries; `duration` is `end_time - start_time`."""
AnySummarySort = Annotated[SummarySort, aliases(create_time="start_time")]
"""A sort key, or an alias of one."""
AggregateBy = Literal["step", "outcome", "status", "mode", "resources", "worker", "task", "none"]
"""Keys that group rollouts; `none` is one group of all."""
SpanKind = Literal["call", "reward", "tool", "agent", "message", "operation", "other"]
"""Kind of a span: a model call, a reward, a tool, an agent's turn, an emitted message or operation, or another."""


class RolloutSummary(Value):
    """A rollout and its latest attempt in short, without input, config and metadata."""

    rollout_id: str
    """Assigned by the store."""
    run_id: str | None = None
    """The run it belongs to; None: it belongs to no run."""
    status: RolloutStatus
    """Status of the rollout."""
    mode: RolloutMode | None = None
    """Training, validation or test; None if it does not matter."""
    step: int | None = None
    """The training step it was made for: `metadata["step"]`."""
    task: int | str | None = None
    """The task it carries out: `metadata["task"]`."""
    sample: int | None = None
    """Index among the rollouts of the task: `metadata["sample"]`."""
    start_time: float
    """Time of the enqueue or start."""
    end_time: float | None = None
    """Time of the end; None before."""
    resources_id: str | None = None
    """The resources that the agent gets; None if none were published."""
    resources_version: int | None = None
    """The version of those resources."""
    attempts: int = 0
    """Number of attempts."""
    attempt_id: str | None = None
    """The latest attempt; None before the first."""
    attempt_status: AttemptStatus | None = None
    """Status of the latest attempt."""
    worker_id: str | None = None
    """The worker of the latest attempt."""
    outcome: Outcome | None = None
    """Outcome of the latest attempt; None before its end."""
    outcome_reason: str | None = None
    """A short word that refines the outcome."""
    error_type: str | None = None
    """Class of the exception that ended the latest attempt."""
    reward: float | None = None
    """The final reward of the latest attempt."""
    rewards: dict[str, float] | None = None
    """The dimensions of the reward by name."""
    spans: int = 0
    """Spans stored so far, those of every attempt."""
    input_preview: str = ""
    """The first 200 characters of the input: of a text itself, of any other value its JSON."""


class SummaryPage(PaginatedResult[RolloutSummary]):
    """One page of summaries."""


class RolloutFilter(Value):
    """A filter of rollouts: a rollout matches if every field that is set holds. Unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid")

    run_id: str | None = None
    """Run of the rollout; None or an empty text: rollouts of no run. If not set: any run."""
    status_in: list[AnyRolloutStatus] | None = None
    """Any of these statuses."""
    mode_in: list[AnyMode] | None = None
    """Any of these modes."""
    outcome_in: list[Outcome] | None = None
    """Any of these outcomes."""
    outcome_reason: str | None = None
    """Reason of the outcome."""
    step_from: int | None = Field(default=None, **COUNT)
    """Smallest step."""
    step_to: int | None = Field(default=None, **COUNT)
    """Largest step."""
    task: int | str | None = None
    """Task of the rollout."""
    reward_from: float | None = Field(default=None, allow_inf_nan=False)
    """Smallest reward."""
    reward_to: float | None = Field(default=None, allow_inf_nan=False)
    """Greatest reward."""
    has_reward: bool | None = None
    """True: with a reward; False: without one."""
    worker_id: str | None = None
    """Worker of the latest attempt."""
    resources_id: str | None = None
    """Id of the resources."""
    resources_version: int | None = Field(default=None, **COUNT)
    """Version of the resources."""
    input_contains: str | None = None
    """Text in the first 2,000 characters of the input, ignoring case: of a text itself, of any other value its
    JSON."""
    rollout_id_contains: str | None = None
    """Text in the id."""
    rollout_id_in: list[str] | None = None
    """Any of these ids."""
    started_after: float | None = Field(default=None, allow_inf_nan=False)
    """Earliest time of the enqueue or start, inclusive."""
    started_before: float | None = Field(default=None, allow_inf_nan=False)
    """Latest time of the enqueue or start, exclusive."""

    @model_serializer(mode="wrap")
    def _given_only(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if name in self.model_fields_set}


class AggregateGroup(Value):
    """Figures of the rollouts of one group. Those of rewards are null if none of them has a reward."""

    key: int | str | None = None
    """Common value of the group; for resources `id@version`. None: the rollouts have no value."""
    count: int
    """Number of rollouts."""
    scored: int
    """Number of rollouts with a reward."""
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
    """Number of rollouts by outcome; excludes those without one."""
    buckets: list[int] = Field(default_factory=list[int])
    """Number of rewards in each bucket (`RolloutAggregate.bucket_edges`)."""
    seconds_mean: float | None = None
    """Mean seconds from start to end of the ended rollouts; None if none has ended."""
    first_time: float
    """Earliest start time of the rollouts."""
    last_time: float
    """Latest start time of the rollouts."""


class RolloutAggregate(Value):
    """Figures of rollouts in groups: numeric keys first, then texts, each sorted, then those without a key."""

    by: AggregateBy
    """Key that groups the rollouts."""
    groups: list[AggregateGroup]
    """The groups that have rollouts."""
    bucket_edges: list[float] = Field(default_factory=list[float])
    """Lower edges of the buckets and upper edge of the last: of equal width from the smallest to the greatest reward of
    all groups; if all rewards are equal, around that value with a total width of 1. Empty without buckets."""


class SpanOutline(Value):
    """A span without its attributes, events and links, as a tree over time shows it."""

    rollout_id: str
    """Id of the rollout."""
    attempt_id: str
    """Id of the attempt."""
    sequence_id: int
    """Number of the span within its rollout."""
    trace_id: str
    """Id of the trace."""
    span_id: str
    """Id of the span within its trace."""
    parent_id: str | None = None
    """Id of its parent span; None at the top."""
    name: str
    """Name of the span."""
    kind: SpanKind
    """Kind of the span."""
    start_time: float | None = None
    """Start time."""
    end_time: float | None = None
    """Time of the end; None before."""
    status_code: StatusCode = "UNSET"
    """Status code of OpenTelemetry."""
    status_description: str | None = None
    """Reason of the failure: the first 200 characters."""
    call_id: str | None = None
    """Id of the model call; only on the gateway's record of a call."""
    call_state: str | None = None
    """Final state of the call: see `semconv.CallState`."""
    model: str | None = None
    """The model that was called."""
    tokens_in: int | None = None
    """Tokens of the prompt."""
    tokens_out: int | None = None
    """Tokens of the completion."""
    weight_version: int | None = None
    """Version of the weights that generated the completion."""
    stale: bool = False
    """True if it arrived for an attempt that had ended or was no longer the latest."""
    attributes: int = 0
    """Number of attributes."""


class TokenText(Value):
    """A token id and its text."""

    id: int
    """The token id."""
    text: str | None = None
    """Text of the token; bytes that are not a whole character are written as `\\xe2`. None if there is no such id."""
    partial: bool = False
    """True if it has bytes that are only a part of a character."""
