"""Values of the dashboard's data beyond the store's operations: the responses of `data.py`."""

from __future__ import annotations

from typing import Any, Literal

from agentlightning.base.field_help import Value
from agentlightning.types import AttemptError, Outcome


class LedgerEntry(Value):
    """The use of a call in training, from the ledger of the run."""

    ending: str
    """`trained` or `excluded`."""
    reason: str | None
    """Reason of the exclusion; None for a trained call."""
    row: int | None
    """Row of the call in the step; None for an excluded call."""
    advantage: float | None
    """Advantage that the loss used."""
    weight_version: int | None
    """Version of the weights that sampled the call."""
    step: int
    """Training step."""


class CallExplanation(Value):
    """One model call: its recordings, its state, and its use in training."""

    number: int
    """1 for the first call of the rollout, in the order of arrival."""
    call_id: str
    """Id of the call, unique within its attempt."""
    attempt_id: str
    """Id of the attempt of the call."""
    agent: str | None
    """Agent that made the call; None if unknown."""
    model: str | None
    """Name of the model in the request."""
    state: str
    """State of the call: `ok` or the problem."""
    stale: bool
    """True if the call arrived after its attempt had ended or lapsed."""
    prompt_tokens: int | None
    """Number of prompt tokens; None if not reported."""
    completion_tokens: int | None
    """Number of completion tokens; None if not reported."""
    has_tokens: bool
    """True if both lists of token ids are recorded."""
    seen_by: str
    """Recorder of the call: `gateway`, `tracer` or `both`."""
    matched_by: str | None
    """Method that matched the two recordings; None for a single recording."""
    row: int | None
    """Number of the row within its attempt, from 1; None if the call is in no row."""
    begins: str | None
    """Reason why the call starts the row; None if it continues a row or is in no row."""
    reason: str | None
    """Reason why the call is in no row."""
    what_to_try: str | None
    """Advice for that reason."""
    error: str | None
    """Error that the agent received."""
    weight_version: int | None
    """Version of the weights that served the call; None if not recorded."""
    span_ids: list[str]
    """Ids of the spans that record the call."""
    ledger: LedgerEntry | None
    """Use of the call in training; None if the run's ledger has no record of the rollout."""


class RolloutExplanation(Value):
    """The use of each model call of a rollout."""

    rollout_id: str
    """Id of the rollout."""
    attempt_id: str | None
    """Id of the latest attempt; None if the rollout was not claimed."""
    outcome: Outcome | None
    """Outcome of that attempt."""
    verdict: str | None
    """Reason why no call of the rollout is trained; None if calls may be trained."""
    reward: float | None
    """Final reward of that attempt."""
    error: AttemptError | None
    """Exception that ended that attempt."""
    calls: list[CallExplanation]
    """Calls of the requested attempts, in the order of arrival."""
    rows: int
    """Number of rows of its calls."""
    notes: list[str]
    """Explanations and advice, one sentence each."""
    untrained: str | None
    """Reason why nothing of the rollout is ever trained: it is for evaluation, or its algorithm trains no weights."""


class SpanNode(Value):
    """A span in the tree of its attempt, with its children."""

    span_id: str
    """Id of the span. An id that begins with `virtual` is a placeholder for a parent that was never recorded."""
    name: str
    """Name of the span."""
    start_time: float | None
    """Seconds since the epoch."""
    end_time: float | None
    """Seconds since the epoch; None while the span is open."""
    status_code: str
    """`UNSET`, `OK` or `ERROR`."""
    sequence_id: int
    """Position in the order of arrival; 0 for a virtual span."""
    agent: str | None
    """Agent that the span belongs to."""
    reward: float | None
    """Reward that the span records."""
    children: list[SpanNode]
    """Child spans."""


class SpanTree(Value):
    """The spans of an attempt as a tree."""

    roots: list[SpanNode]
    """Spans without a parent."""
    problems: list[str]
    """Problems of the tree, such as excluded spans, with their reasons."""


class Part(Value):
    """A part of a message."""

    type: Literal["text", "reasoning", "image", "json"]
    """Kind of the part."""
    text: str | None = None
    """Text, reasoning, or any other value as JSON; None for an image."""
    sha256: str | None = None
    """Digest of an image's bytes or of its address; None for other kinds."""
    bytes: int | None = None
    """Size of an image in bytes, if they were recorded."""
    media_type: str | None = None
    """Media type of an image, such as `image/png`."""


class ToolCall(Value):
    """A tool call of the model."""

    id: str | None
    """Id set by the model. The tool result refers to it."""
    name: str
    """Name of the tool."""
    arguments: str
    """Arguments written by the model, usually JSON."""


class ShownMessage(Value):
    """One message of a conversation."""

    role: str
    """Role of the sender."""
    content: list[Part]
    """Parts of the message, in order."""
    tool_calls: list[ToolCall]
    """Tool calls of the message."""
    tool_call_id: str | None
    """For a tool result: id of its tool call."""
    name: str | None
    """For a tool result: name of the tool, if given."""


class ConversationCall(Value):
    """A model call in the conversation."""

    number: int
    """1 for the first call of the rollout."""
    call_id: str
    """Id of the call, the same as in the explanation."""
    state: str
    """State of the call: `ok` or the problem."""
    late: bool
    """True if the call arrived after its attempt had ended."""
    cut_off: bool
    """True if the reply ended at the token limit or was cut off by a lost connection."""
    agent: str | None
    """Agent that made the call; None if unknown."""
    model: str | None
    """Name of the model in the request."""
    start_time: float | None
    """Seconds since the epoch."""
    end_time: float | None
    """Seconds since the epoch."""
    messages_new: list[ShownMessage]
    """Messages of the prompt that are not part of earlier calls."""
    branches_from: int | None
    """Number of the call from which the prompt branches, if it does not continue the previous call."""
    reply: list[ShownMessage]
    """Replies; empty if the call has no reply."""
    finish_reason: str | None
    """Reason for the end of the reply."""
    error: str | None
    """Error that the agent received."""
    prompt_tokens: int | None
    """Number of prompt tokens."""
    completion_tokens: int | None
    """Number of completion tokens."""
    weight_version: int | None
    """Version of the weights that served the call."""
    new_row: bool
    """True if a training row starts with the call."""
    why: str | None
    """Reason why the row starts, or why the call is in no row."""


class AttemptConversation(Value):
    """The conversation of an agent and its models in one attempt."""

    calls: list[ConversationCall]
    """Calls in the order of arrival."""
    shortened: int
    """Number of texts that were cut because they exceeded the limit."""
    whole: bool
    """True if all calls are included. Otherwise only the first ones are, without the reasons why rows start."""


class TaskPair(Value):
    """A task with a reward on both sides of a comparison."""

    task: str
    """Digest of the task, or its position."""
    input_preview: str
    """Beginning of the task's input; empty if the store has no rollout of the task."""
    before_rollout_id: str | None
    """A rollout of the task on the first side."""
    after_rollout_id: str | None
    """A rollout of the task on the second side."""
    before: float
    """Reward on the first side, the mean of its samples."""
    after: float
    """Reward on the second side."""


class Comparison(Value):
    """The same tasks on two sides."""

    before: str
    """Description of the first side."""
    after: str
    """Description of the second side."""
    tasks: int
    """Number of tasks with a reward on both sides."""
    gained: int
    """Number of tasks whose reward is higher on the second side."""
    lost: int
    """Number of tasks whose reward is lower on the second side."""
    unchanged: int
    """Number of tasks whose reward is the same."""
    before_mean: float | None
    """Mean reward of the first side over these tasks."""
    after_mean: float | None
    """Mean reward of the second side."""
    difference: float | None
    """Mean of the second side minus mean of the first."""
    interval: tuple[float, float] | None
    """95 % interval of the difference; None for one task."""
    p_value: float
    """Probability of a difference at least this far from 0 if there is no change."""
    test: str
    """Paired test for the p-value."""
    verdict: str
    """`better`, `worse` or `no evidence`, at p < 0.05."""
    pairs: list[TaskPair]
    """A page of the tasks, gained and lost first."""
    total: int
    """Number of tasks on all pages."""


class ServerFacts(Value):
    """Facts about the server."""

    version: str
    """Version of this package."""
    python: str
    """Version of the interpreter."""
    backend: str
    """Storage of the data: `memory`, `sqlite`, `postgres`, `mongo` or the class of a user's store."""
    persistent: bool
    """True if the data remains after the server stops."""
    started: float
    """Start time of the server, in Unix seconds."""
    now: float
    """Current time of the server, in Unix seconds."""
    statistics: dict[str, Any]
    """Counters of the store."""
