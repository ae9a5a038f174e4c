"""Values of the page's data beyond the store's own operations: the answers of `data.py`."""

from __future__ import annotations

from typing import Any, Literal

from agentlightning.base.field_help import Value
from agentlightning.types import AttemptError, Outcome


class LedgerEntry(Value):
    """The use of a call in training, as the ledger of the run has it."""

    ending: str
    """`trained` or `excluded`."""
    reason: str | None
    """Reason of the exclusion; None for a trained call."""
    row: int | None
    """Row of the call in the step; None for an excluded call."""
    advantage: float | None
    """The advantage that the loss used."""
    weight_version: int | None
    """Version of the weights that sampled the call."""
    step: int
    """The training step."""


class CallExplanation(Value):
    """One model call: its recordings, its state, and its use in training."""

    number: int
    """1 for the first call of the rollout, in the order of arrival."""
    call_id: str
    """Unique within its attempt."""
    attempt_id: str
    """Id of the attempt that made it."""
    agent: str | None
    """Agent that made the call; None if unknown."""
    model: str | None
    """Name of the model in the request."""
    state: str
    """`ok`, or the problem of the call."""
    stale: bool
    """True if it arrived after its attempt had ended or lapsed."""
    prompt_tokens: int | None
    """Number of prompt tokens; None if not reported."""
    completion_tokens: int | None
    """Number of completion tokens; None if not reported."""
    has_tokens: bool
    """True if both lists of token ids are recorded."""
    seen_by: str
    """Recorder of the call: `gateway`, `tracer` or `both`."""
    matched_by: str | None
    """Method that matched the two recordings; None if there is only one."""
    row: int | None
    """Number of its row within its attempt, 1 for the first; None if it is in no row."""
    begins: str | None
    """Reason why it began that row; None if it continued one, or is in no row."""
    reason: str | None
    """Reason why it is in no row."""
    what_to_try: str | None
    """Advice for that reason."""
    error: str | None
    """The error that the agent received."""
    weight_version: int | None
    """Version of the weights that served it; None if not recorded."""
    span_ids: list[str]
    """Ids of the spans that record it."""
    ledger: LedgerEntry | None
    """Use of the call in training; None if the run's ledger has no record of the rollout."""


class RolloutExplanation(Value):
    """The use of every model call of a rollout."""

    rollout_id: str
    """Id of the rollout."""
    attempt_id: str | None
    """Id of the latest attempt; None if nobody claimed the rollout."""
    outcome: Outcome | None
    """Outcome of that attempt."""
    verdict: str | None
    """Reason why no call of the rollout is trained; None if its calls may be."""
    reward: float | None
    """Final reward of that attempt."""
    error: AttemptError | None
    """The exception that ended that attempt."""
    calls: list[CallExplanation]
    """Calls of the requested attempts, in the order of arrival."""
    rows: int
    """Number of rows that its calls make."""
    notes: list[str]
    """Explanations and advice, one sentence each."""


class SpanNode(Value):
    """A span in the tree of its attempt, with its children."""

    span_id: str
    """Id of the span; one that begins with `virtual` stands for a parent that was never recorded."""
    name: str
    """Name of the span."""
    start_time: float | None
    """Seconds since the epoch."""
    end_time: float | None
    """Seconds since the epoch; None while it runs."""
    status_code: str
    """`UNSET`, `OK` or `ERROR`."""
    sequence_id: int
    """Position in the order of arrival; 0 for a virtual one."""
    agent: str | None
    """Agent that the span belongs to."""
    reward: float | None
    """Reward that the span records."""
    children: list[SpanNode]
    """The child spans."""


class SpanTree(Value):
    """The spans of an attempt as a tree."""

    roots: list[SpanNode]
    """The spans without a parent."""
    problems: list[str]
    """Problems of the tree, such as excluded spans, with their reasons."""


class Part(Value):
    """A piece of a message."""

    type: Literal["text", "reasoning", "image", "json"]
    """Kind of the piece."""
    text: str | None = None
    """The text, the reasoning, or any other value as JSON; None for an image."""
    sha256: str | None = None
    """Digest of an image's bytes, or of its address; None for other kinds."""
    bytes: int | None = None
    """Size of an image in bytes, if they were recorded."""
    media_type: str | None = None
    """Media type of an image, such as `image/png`."""


class ToolCall(Value):
    """A tool call of the model."""

    id: str | None
    """Set by the model; the result refers to it."""
    name: str
    """Name of the tool."""
    arguments: str
    """Arguments as the model wrote them, usually JSON."""


class ShownMessage(Value):
    """One message of a conversation."""

    role: str
    """Role of the sender."""
    content: list[Part]
    """Content of the message, in order."""
    tool_calls: list[ToolCall]
    """Tool calls of the message."""
    tool_call_id: str | None
    """For a tool result: id of the tool call that it answers."""
    name: str | None
    """For a tool result: name of the tool, if given."""


class ConversationCall(Value):
    """A model call at its place in the conversation."""

    number: int
    """1 for the first call of the rollout."""
    call_id: str
    """Same id as in the explanation."""
    state: str
    """`ok`, or the problem of the call."""
    late: bool
    """True if it arrived after its attempt had ended."""
    cut_off: bool
    """True if the answer ended at the token limit or was cut off by a lost connection."""
    agent: str | None
    """Agent that made the call; None if unknown."""
    model: str | None
    """Name of the model in the request."""
    start_time: float | None
    """Seconds since the epoch."""
    end_time: float | None
    """Seconds since the epoch."""
    messages_new: list[ShownMessage]
    """Messages of the prompt that no earlier call has shown."""
    branches_from: int | None
    """Number of the call whose messages the prompt shares, if it does not continue the call before it."""
    reply: list[ShownMessage]
    """The answers; empty if there was none."""
    finish_reason: str | None
    """Reason for the end of the answer."""
    error: str | None
    """The error that the agent received."""
    prompt_tokens: int | None
    """Number of prompt tokens."""
    completion_tokens: int | None
    """Number of completion tokens."""
    weight_version: int | None
    """Version of the weights that served it."""
    new_row: bool
    """True if a row of training begins with it."""
    why: str | None
    """Reason why that row begins, or why the call is in no row."""


class AttemptConversation(Value):
    """The conversation of an agent and its models in one attempt."""

    calls: list[ConversationCall]
    """The calls, in the order of arrival."""
    shortened: int
    """Number of texts that were cut because they exceeded the limit."""
    whole: bool
    """True if all calls are included; else only the first ones, without the reasons why rows begin."""


class TaskPair(Value):
    """A task with a reward on both sides of a comparison."""

    task: str
    """Digest of the task, or its position."""
    input_preview: str
    """The beginning of the task's input; empty if the store no longer has a rollout of it."""
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
    """95 % interval of the difference."""
    p_value: float
    """Probability of a difference at least this far from 0 if nothing had changed."""
    test: str
    """The paired test of the p-value."""
    verdict: str
    """`better`, `worse` or `no evidence`, at p < 0.05."""
    pairs: list[TaskPair]
    """A page of the tasks, gained and lost first."""
    total: int
    """Number of tasks over all pages."""


class ServerFacts(Value):
    """Facts about the server."""

    version: str
    """Version of this package."""
    python: str
    """Version of the interpreter."""
    backend: str
    """Storage of the data: `memory`, `sqlite`, `postgres`, `mongo` or the class of a user's store."""
    persistent: bool
    """True if the data outlive the server."""
    started: float
    """Start time of the server, in Unix seconds."""
    now: float
    """Current time of the server, in Unix seconds."""
    statistics: dict[str, Any]
    """The store's own counters."""
