"""`SpanNode`: a span with the spans below it, its times and the name of its agent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, Self

from agentlightning.adapter.spans.rewards import reward_value
from agentlightning.semconv import AGL_OPERATION, AGL_REWARD, LightningSpanAttributes
from agentlightning.types import Span

_OPERATION_NAME: Final = LightningSpanAttributes.OPERATION_NAME.value
_INPUT: Final = LightningSpanAttributes.OPERATION_INPUT.value


class SpanNode:
    """A span with the spans below it, in the order in which they were given."""

    def __init__(self, id: str, span: Span, children: Iterable[Self] | None = None) -> None:
        self.id = id
        self.span = span
        self.children: list[Self] = list(children or ())

    @property
    def start_time(self) -> float | None:
        """Seconds since the epoch."""
        return self.span.start_time

    @property
    def end_time(self) -> float | None:
        """Seconds since the epoch."""
        return self.span.end_time

    def add_child(self, node: Self) -> None:
        self.children.append(node)

    def walk(self) -> Iterator[Self]:
        """Yield this node and all below it, parents first. Deep trees are no trouble."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))

    def traverse(self) -> list[Self]:
        """Return this node and all below it, parents first."""
        return list(self.walk())

    def find_id(self, id: str) -> Self | None:
        """Return the node with this id at or below this one; None if there is none."""
        return next((node for node in self.walk() if node.id == id), None)

    def agent_name(self) -> str | None:
        """Return the name of the agent whose span this is; None for spans that are no agent's."""
        attributes = self.span.attributes or {}
        for name in _agent_names(self.span.name, attributes):
            if isinstance(name, str) and name:
                return name
        return None

    def maybe_reward_dict(self) -> dict[str, Any]:
        """Return `{"type": "reward", "value": v}`, or nothing for a span without a reward."""
        value = reward_value(self.span)
        return {} if value is None else {"type": "reward", "value": value}

    def is_reward_span(self) -> bool:
        """True if the span carries a reward or is the operation that computes one."""
        attributes = self.span.attributes or {}
        if self.span.name == AGL_OPERATION and attributes.get(_OPERATION_NAME) == AGL_REWARD:
            return True
        return reward_value(self.span) is not None


def _agent_names(span_name: str, attributes: dict[str, Any]) -> Iterator[Any]:
    """Yield the places where frameworks write an agent's name, the most telling first."""
    yield attributes.get("agent.name")
    yield attributes.get("gen_ai.agent.name")
    if attributes.get("agentops.span.kind") == "agent":
        yield attributes.get("operation.name")
    yield attributes.get("recipient_agent_type")
    yield attributes.get("langchain.chain.type")
    yield attributes.get("executor.id")
    if attributes.get("type") == "agent":
        yield attributes.get(_INPUT + ".name")
    if span_name.startswith("langchain.Chain."):
        yield attributes.get("lc_name")
