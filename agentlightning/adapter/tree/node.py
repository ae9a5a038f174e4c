"""`SpanNode`: a span with the spans below it, its times and the name of its agent."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final, Self, TypeGuard

from agentlightning.adapter.spans.attributes import as_dict, decoded
from agentlightning.adapter.spans.rewards import reward_value
from agentlightning.semconv import AGL_OPERATION, AGL_REWARD, LightningSpanAttributes
from agentlightning.types import Span

_OPERATION_NAME: Final = LightningSpanAttributes.OPERATION_NAME.value
_INPUT: Final = LightningSpanAttributes.OPERATION_INPUT.value
_RANDOM_ID: Final = re.compile(r"[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}", re.IGNORECASE)
"""Pattern of the random name that a framework generates for an agent without a name."""


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
        """Yield this node and all below it, parents first. Deep trees do not exceed the recursion limit."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))

    def traverse(self) -> list[Self]:
        """Return this node and all below it, parents first."""
        return list(self.walk())

    def find_id(self, id: str) -> Self | None:
        """Return the node with this id at or below this one, or None."""
        return next((node for node in self.walk() if node.id == id), None)

    def agent_name(self) -> str | None:
        """Return the agent's name for the span of an agent; None for other spans."""
        agent_name = next((name for name in self._agent_names() if _is_name(name)), None)
        return self.name_of_langchain() if agent_name is None and "metadata" in self.span.attributes else agent_name

    def has_made_up_name(self) -> bool:
        """True for the span of an agent without a name, to which its framework gave a random id."""
        return any(isinstance(name, str) and _RANDOM_ID.fullmatch(name) for name in self._agent_names())

    def is_of_agent(self) -> bool:
        """True if the span is marked as an agent's, with or without its name."""
        attributes = self.span.attributes
        is_invoked = attributes.get("gen_ai.operation.name") == "invoke_agent"
        return is_invoked or attributes.get("openinference.span.kind") == "AGENT"

    def _agent_names(self) -> tuple[object, ...]:
        """Return the values where frameworks write the name, the most specific first."""
        attributes = self.span.attributes
        return (
            attributes.get("agent.name"),
            attributes.get("gen_ai.agent.name"),
            attributes.get("operation.name") if attributes.get("agentops.span.kind") == "agent" else None,
            attributes.get("recipient_agent_type"),
            attributes.get("langchain.chain.type"),
            attributes.get("executor.id"),
            attributes.get(_INPUT + ".name") if attributes.get("type") == "agent" else None,
            attributes.get("lc_name") if self.span.name.startswith("langchain.Chain.") else None,
        )

    def own_agent_name(self) -> str | None:
        """Return the agent that made the call, if the span of the call names it."""
        name = self.span.attributes.get("gen_ai.agent.name")
        return name if _is_name(name) else self.name_of_langchain()

    def name_of_langchain(self) -> str | None:
        """Return the agent in the span's metadata, as OpenInference records agents of LangChain."""
        metadata = self.span.attributes.get("metadata")
        if not isinstance(metadata, str) or "lc_agent_name" not in metadata:
            return None
        name = as_dict(decoded(metadata)).get("lc_agent_name")
        return name if isinstance(name, str) and name else None

    def title(self) -> str:
        """Return the name of the span; an agent's name follows in brackets."""
        agent = self.agent_name()
        return self.span.name if agent is None else f"{self.span.name} [{agent}]"

    def maybe_reward_dict(self) -> dict[str, str | float]:
        """Return `{"type": "reward", "value": v}`, or an empty dict for a span without a reward."""
        value = reward_value(self.span)
        return {} if value is None else {"type": "reward", "value": value}

    def is_reward_span(self) -> bool:
        """True if the span carries a reward or is the operation that computes one."""
        computes_one = self.span.name == AGL_OPERATION and self.span.attributes.get(_OPERATION_NAME) == AGL_REWARD
        return computes_one or reward_value(self.span) is not None


def _is_name(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and value != "" and _RANDOM_ID.fullmatch(value) is None
