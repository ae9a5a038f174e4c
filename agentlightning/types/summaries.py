"""Short forms of rollouts, spans and tokens, as shown in long lists. For rollouts also filters and statistics.

The reward of a rollout is the reward of its latest attempt. Its step, task and sample are the entries of its metadata
with these names, if they are integers (a task can also be a text of at most 200 characters).
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
"""A sort key or an alias of one."""
AggregateBy = Literal["step", "outcome", "status", "mode", "resources", "worker", "task", "none"]
"""Keys by which rollouts are grouped; `none` is one group with all rollouts."""
SpanKind = Literal["call", "reward", "tool", "agent", "message", "operation", "other"]
"""Kind of a span: a model call, a reward, a tool, an agent's turn, an emitted message or operation, or another."""


class RolloutSummary(Value):
    """Summary of a rollout and its latest attempt, without input, config and metadata."""

    rollout_id: str
    """Id of the rollout; assigned by the store."""
    run_id: str | None = None
    """Run of the rollout; None for no run."""
    status: RolloutStatus
    """Status of the rollout."""
    mode: RolloutMode | None = None
    """Purpose of the rollout: `train`, `val` or `test`; None if not set."""
    step: int | None = None
    """Training step of the rollout: `metadata["step"]`."""
    task: int | str | None = None
    """Task of the rollout: `metadata["task"]`."""
    sample: int | None = None
    """Index among the rollouts of the task: `metadata["sample"]`."""
    start_time: float
    """Time at which the rollout was enqueued or started."""
    end_time: float | None = None
    """Time of the end; None before it."""
    resources_id: str | None = None
    """Resources for the agent; None if no resources were published."""
    resources_version: int | None = None
    """Version of the resources."""
    attempts: int = 0
    """Number of attempts."""
    attempt_id: str | None = None
    """Latest attempt; None if there is none."""
    attempt_status: AttemptStatus | None = None
    """Status of the latest attempt."""
    worker_id: str | None = None
    """Worker of the latest attempt."""
    outcome: Outcome | None = None
    """Outcome of the latest attempt; None before its end."""
    outcome_reason: str | None = None
    """Reason for the outcome."""
    error_type: str | None = None
    """Class of the exception that ended the latest attempt."""
    reward: float | None = None
    """Final reward of the latest attempt."""
    rewards: dict[str, float] | None = None
    """Dimensions of the reward by name."""
    spans: int = 0
    """Number of stored spans of all attempts."""
    input_preview: str = ""
    """First 200 characters of the input; an input that is not a text is shown as JSON."""


class SummaryPage(PaginatedResult[RolloutSummary]):
    """One page of summaries."""


class RolloutFilter(Value):
    """A filter of rollouts. A rollout matches if it matches every field that is set. Unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid")

    run_id: str | None = None
    """Run of the rollout; None or an empty text for no run. Rollouts of all runs match if it is not set."""
    status_in: list[AnyRolloutStatus] | None = None
    """Allowed statuses."""
    mode_in: list[AnyMode] | None = None
    """Allowed modes."""
    outcome_in: list[Outcome] | None = None
    """Allowed outcomes."""
    outcome_reason: str | None = None
    """Reason for the outcome."""
    step_from: int | None = Field(default=None, **COUNT)
    """Smallest step."""
    step_to: int | None = Field(default=None, **COUNT)
    """Greatest step."""
    task: int | str | None = None
    """Task of the rollout."""
    reward_from: float | None = Field(default=None, allow_inf_nan=False)
    """Smallest reward."""
    reward_to: float | None = Field(default=None, allow_inf_nan=False)
    """Greatest reward."""
    has_reward: bool | None = None
    """True for rollouts with a reward, False for rollouts without one."""
    worker_id: str | None = None
    """Worker of the latest attempt."""
    resources_id: str | None = None
    """Id of the resources."""
    resources_version: int | None = Field(default=None, **COUNT)
    """Version of the resources."""
    input_contains: str | None = None
    """Text in the first 2,000 characters of the input, ignoring case. An input that is not a text is searched as
    JSON."""
    rollout_id_contains: str | None = None
    """Text in the rollout id."""
    rollout_id_in: list[str] | None = None
    """Allowed rollout ids."""
    started_after: float | None = Field(default=None, allow_inf_nan=False)
    """Earliest start time, inclusive."""
    started_before: float | None = Field(default=None, allow_inf_nan=False)
    """Latest start time, exclusive."""

    @model_serializer(mode="wrap")
    def _given_only(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if name in self.model_fields_set}


class AggregateGroup(Value):
    """Statistics of one group of rollouts. Statistics of rewards are null if no rollout has a reward."""

    key: int | str | None = None
    """Common value of the group; `id@version` for resources. None if the rollouts have no value."""
    count: int
    """Number of rollouts."""
    scored: int
    """Number of rollouts with a reward."""
    mean: float | None = None
    """Mean reward."""
    stderr: float | None = None
    """Standard error of the mean: sample standard deviation / sqrt(`scored`). None for fewer than two rewards."""
    minimum: float | None = None
    """Smallest reward."""
    maximum: float | None = None
    """Greatest reward."""
    p10: float | None = None
    """10th percentile of the rewards. Percentiles are interpolated between two rewards."""
    p25: float | None = None
    """25th percentile of the rewards."""
    p50: float | None = None
    """Median of the rewards."""
    p75: float | None = None
    """75th percentile of the rewards."""
    p90: float | None = None
    """90th percentile of the rewards."""
    outcomes: dict[str, int] = Field(default_factory=dict[str, int])
    """Number of rollouts by outcome. Rollouts without an outcome are not counted."""
    buckets: list[int] = Field(default_factory=list[int])
    """Number of rewards in each histogram bucket (see `RolloutAggregate.bucket_edges`)."""
    seconds_mean: float | None = None
    """Mean duration of the ended rollouts in seconds; None if no rollout has ended."""
    first_time: float
    """Earliest start time of the rollouts."""
    last_time: float
    """Latest start time of the rollouts."""


class RolloutAggregate(Value):
    """Statistics of rollouts by group. Order: numeric keys, text keys, no key; numbers and texts are sorted."""

    by: AggregateBy
    """Key by which the rollouts are grouped."""
    groups: list[AggregateGroup]
    """Groups with at least one rollout."""
    bucket_edges: list[float] = Field(default_factory=list[float])
    """Lower edge of each histogram bucket and upper edge of the last one. The buckets have the same width and cover the
    rewards of all groups; if all rewards are the same, the total width is 1. Empty without buckets."""


class SpanOutline(Value):
    """A span without its attributes, events and links, for a timeline."""

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
    """Id of the parent span; None for a root."""
    name: str
    """Name of the span."""
    kind: SpanKind
    """Kind of the span."""
    start_time: float | None = None
    """Start time."""
    end_time: float | None = None
    """Time of the end; None if unknown."""
    status_code: StatusCode = "UNSET"
    """OpenTelemetry status code."""
    status_description: str | None = None
    """First 200 characters of the error description."""
    call_id: str | None = None
    """Id of the model call; set only on the gateway's span of a call."""
    call_state: str | None = None
    """Final state of the call; see `semconv.CallState`."""
    model: str | None = None
    """Name of the model."""
    tokens_in: int | None = None
    """Number of tokens of the prompt."""
    tokens_out: int | None = None
    """Number of tokens of the completion."""
    weight_version: int | None = None
    """Version of the weights that generated the completion."""
    stale: bool = False
    """True if the span arrived after its attempt had ended or was replaced by a later attempt."""
    attributes: int = 0
    """Number of attributes."""


class TokenText(Value):
    """A token id and its text."""

    id: int
    """The token id."""
    text: str | None = None
    """Text of the token; bytes of incomplete characters are written as `\\xe2`. None if the id does not exist."""
    partial: bool = False
    """True if the token contains bytes of an incomplete character."""
