"""Single things in a form for pages and tools: a span without its attributes, a token as text."""

from __future__ import annotations

from typing import Literal

from agentlightning.field_help import Value
from agentlightning.types.tracer import StatusCode

SpanKind = Literal["call", "reward", "tool", "agent", "message", "operation", "other"]
"""What a span is of: a model call, a reward, a tool, an agent's turn, something that was emitted, or none of these."""


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
