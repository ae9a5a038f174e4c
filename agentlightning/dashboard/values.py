"""What the page asks for beyond the store's own operations, as values: the answers of `data.py`."""

from __future__ import annotations

from typing import Any, Literal

from agentlightning.field_help import Value
from agentlightning.types import AttemptError, Outcome


class LedgerEntry(Value):
    """What the loop did with a call, as the ledger of the run has it."""

    ending: str
    """`trained` or `excluded`."""
    reason: str | None
    """Why it is excluded; None for a trained one."""
    row: int | None
    """Its row in the step; None for an excluded one."""
    advantage: float | None
    """The advantage that the loss used."""
    weight_version: int | None
    """The weights that sampled it."""
    step: int
    """The training step."""


class CallExplanation(Value):
    """One model call: who saw it, how it ended, and what became of it."""

    number: int
    """1 for the first call of the rollout, in the order of arrival."""
    call_id: str
    """Unique within its attempt."""
    attempt_id: str
    """The attempt that made it."""
    agent: str | None
    """Whose call it was, where that is known."""
    model: str | None
    """As the request named it."""
    state: str
    """`ok`, or what is missing or went wrong."""
    stale: bool
    """It came after its attempt had ended or lapsed."""
    prompt_tokens: int | None
    """How many; None if nobody told."""
    completion_tokens: int | None
    """How many; None if nobody told."""
    has_tokens: bool
    """Both lists of token ids are known."""
    seen_by: str
    """`gateway`, `tracer` or `both`."""
    matched_by: str | None
    """How the recordings of the two were matched; None if only one saw it."""
    row: int | None
    """Number of its row among those of its attempt, 1 for the first; None if it is in none."""
    begins: str | None
    """Why it began that row; None if it continued one, or is in none."""
    reason: str | None
    """Why it is in no row."""
    what_to_try: str | None
    """Advice for that reason."""
    error: str | None
    """The error that the agent got."""
    weight_version: int | None
    """The weights that served it; None if nobody recorded them."""
    span_ids: list[str]
    """The spans that record it."""
    ledger: LedgerEntry | None
    """What the training loop did with it; None if the run's ledger has no record of the rollout."""


class RolloutExplanation(Value):
    """What became of every model call of a rollout."""

    rollout_id: str
    """The rollout."""
    attempt_id: str | None
    """The attempt that counts: the latest one; None if nobody claimed the rollout."""
    outcome: Outcome | None
    """Of that attempt."""
    verdict: str | None
    """Why nothing of the rollout is trained; None if its calls may be."""
    reward: float | None
    """Its final reward."""
    error: AttemptError | None
    """The exception that ended it."""
    calls: list[CallExplanation]
    """Of the attempts that were asked for, in the order of arrival."""
    rows: int
    """How many rows its calls make."""
    notes: list[str]
    """What a person may want to know or try, one sentence each."""


class SpanNode(Value):
    """A span in the tree of its attempt, with those below it."""

    span_id: str
    """The span; one that begins with `virtual` stands for a parent that was never recorded."""
    name: str
    """Its name."""
    start_time: float | None
    """Seconds since the epoch."""
    end_time: float | None
    """Seconds since the epoch; None while it runs."""
    status_code: str
    """`UNSET`, `OK` or `ERROR`."""
    sequence_id: int
    """Place in the order of arrival; 0 for a virtual one."""
    agent: str | None
    """The agent whose span it is."""
    reward: float | None
    """The reward that it records."""
    children: list[SpanNode]
    """The spans below it."""


class SpanTree(Value):
    """The spans of an attempt as a tree."""

    roots: list[SpanNode]
    """The spans without a parent."""
    problems: list[str]
    """What was left out, and why."""


class Part(Value):
    """A piece of a message."""

    type: Literal["text", "reasoning", "image", "json"]
    """What it is."""
    text: str | None = None
    """Of a text, a reasoning, or anything else as JSON; None for an image."""
    sha256: str | None = None
    """Of an image: the digest of its bytes, or of its address."""
    bytes: int | None = None
    """Of an image: its size, where its bytes were recorded."""
    media_type: str | None = None
    """Of an image, such as `image/png`."""


class ToolCall(Value):
    """A tool that the model asked for."""

    id: str | None
    """Given by the model; the result names it."""
    name: str
    """The tool."""
    arguments: str
    """As the model wrote them, JSON if all went well."""


class ShownMessage(Value):
    """One message of a conversation."""

    role: str
    """Who says it."""
    content: list[Part]
    """What is said, in order."""
    tool_calls: list[ToolCall]
    """The tools that are asked for."""
    tool_call_id: str | None
    """Of a result: the tool call that it answers."""
    name: str | None
    """Of a result: the tool, where it is named."""


class ConversationCall(Value):
    """A model call in its place in the conversation."""

    number: int
    """1 for the first call of the rollout."""
    call_id: str
    """As in the explanation."""
    state: str
    """`ok`, or what is missing or went wrong."""
    late: bool
    """It arrived after its attempt had ended."""
    cut_off: bool
    """The answer ended at the limit of tokens, or the connection ended first."""
    agent: str | None
    """Whose call it was."""
    model: str | None
    """As the request named it."""
    start_time: float | None
    """Seconds since the epoch."""
    end_time: float | None
    """Seconds since the epoch."""
    messages_new: list[ShownMessage]
    """What the prompt has beyond what was shown before it."""
    branches_from: int | None
    """Number of the call up to whose messages the prompt agrees, if it does not go on from the call before it."""
    reply: list[ShownMessage]
    """The answers; none if there was none."""
    finish_reason: str | None
    """Why the answer ended."""
    error: str | None
    """The error that the agent got."""
    prompt_tokens: int | None
    """How many."""
    completion_tokens: int | None
    """How many."""
    weight_version: int | None
    """The weights that served it."""
    new_row: bool
    """A row of training begins with it."""
    why: str | None
    """Why that row begins, or why the call is in none."""


class AttemptConversation(Value):
    """What an agent and its models said in one attempt."""

    calls: list[ConversationCall]
    """In the order of arrival."""
    shortened: int
    """Texts that were longer than the answer may be, and were cut."""
    whole: bool
    """All calls are here; if not, the first ones, without what is known at the end only: why each began a row."""


class TaskPair(Value):
    """A task that both sides of a comparison have a reward for."""

    task: str
    """Digest of the task, or its place."""
    input_preview: str
    """The beginning of the task's input; empty where the store has no rollout of it any more."""
    before_rollout_id: str | None
    """A rollout of it on the first side."""
    after_rollout_id: str | None
    """A rollout of it on the second side."""
    before: float
    """Reward on the first side, the mean of its samples."""
    after: float
    """Reward on the second side."""


class Comparison(Value):
    """The same tasks on two sides."""

    before: str
    """The first side in words."""
    after: str
    """The second side in words."""
    tasks: int
    """Tasks with a reward on both sides."""
    gained: int
    """Tasks whose reward is higher on the second side."""
    lost: int
    """Tasks whose reward is lower there."""
    unchanged: int
    """Tasks whose reward is the same."""
    before_mean: float | None
    """Mean reward of the first side over these tasks."""
    after_mean: float | None
    """Mean reward of the second side."""
    difference: float | None
    """The second minus the first."""
    interval: tuple[float, float] | None
    """95 % interval of the difference."""
    p_value: float
    """Chance of a difference at least so far from 0 if nothing had changed."""
    test: str
    """The paired test of the p-value."""
    verdict: str
    """`better`, `worse` or `no evidence`, at p < 0.05."""
    pairs: list[TaskPair]
    """A page of the tasks, gained and lost first."""
    total: int
    """All tasks that the pages have."""


class ServerFacts(Value):
    """What the server is."""

    version: str
    """Of this package."""
    python: str
    """Of the interpreter."""
    backend: str
    """What keeps the data: `memory`, `sqlite`, `postgres`, `mongo` or the class of a user's store."""
    persistent: bool
    """Data outlive the server."""
    started: float
    """When the server was made, seconds since the epoch."""
    now: float
    """The server's clock, seconds since the epoch."""
    statistics: dict[str, Any]
    """The store's own counters."""
