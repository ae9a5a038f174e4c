"""Spans of an OTLP request in their original bytes: only their ids are needed to store them, and reading all of them
takes ten times as long as all other work. They are read when they are first needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

from agentlightning.semconv import STALE
from agentlightning.types import OtelResource, Span


class SpanGroup(NamedTuple):
    """The parts that spans of one resource and scope share."""

    resource: OtelResource
    scope: dict[str, Any] | None
    size: int
    """Size of both in bytes, which is added to the size of each span, since a read span repeats them."""
    reader: Callable[[bytes, SpanGroup], Span]
    """Reads the bytes of a span."""

    def copied(self) -> SpanGroup:
        """Return a copy with copies of the values, for a span that is returned to a caller."""
        resource = self.resource.model_copy(update={"attributes": _copied(self.resource.attributes)})
        return SpanGroup(resource, None if self.scope is None else _copied(self.scope), self.size, self.reader)


def _copied(value: Any) -> Any:
    """Return a copy of plain data; `copy.deepcopy` takes ten times as long."""
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in cast("dict[str, Any]", value).items()}
    return list(cast("list[object]", value)) if isinstance(value, list) else value


class UnreadSpan:
    """A span with known ids: its bytes (`body`) and the parts that it shares with its `group`. Never changed."""

    __slots__ = ("attempt_id", "body", "group", "is_stale", "rollout_id", "sequence_id", "span_id")

    def __init__(
        self, body: bytes, group: SpanGroup, rollout_id: str, attempt_id: str, sequence_id: int, span_id: str
    ) -> None:
        self.body, self.group = body, group
        self.rollout_id, self.attempt_id, self.sequence_id, self.span_id = rollout_id, attempt_id, sequence_id, span_id
        self.is_stale = False

    def __len__(self) -> int:
        """Return its size in bytes."""
        return len(self.body) + self.group.size

    def numbered(self, sequence_id: int) -> UnreadSpan:
        """Return the span with this number."""
        return UnreadSpan(self.body, self.group, self.rollout_id, self.attempt_id, sequence_id, self.span_id)

    def marked_stale(self) -> UnreadSpan:
        """Return the span marked as stale."""
        marked = self.numbered(self.sequence_id)
        marked.is_stale = True
        return marked

    def read(self) -> Span:
        """Return the span, with copies of the values."""
        span = self.group.reader(self.body, self.group.copied())
        span.sequence_id = self.sequence_id
        if self.is_stale:
            span.attributes[STALE] = True
        return span
