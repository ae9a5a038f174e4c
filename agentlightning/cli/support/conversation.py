"""What agent and model said to each other in one attempt, as one conversation to be read from top to bottom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from agentlightning.adapter.messages import Message, TraceToMessages
from agentlightning.types import Span


def conversation(spans: Sequence[Span]) -> list[list[Message]]:
    """Return for each model call, in order, the messages that the calls before it have not told already."""
    told: list[Message] = []
    parts: list[list[Message]] = []
    for call in TraceToMessages().adapt(spans):
        messages = call["messages"]
        goes_on = bool(told) and messages[: len(told)] == told
        parts.append(messages[len(told) :] if goes_on else messages)
        told = messages
    return parts


def lines_of(parts: Sequence[Sequence[Message]]) -> Iterator[str]:
    """Yield a conversation as lines: a number for each model call, then who said what."""
    for index, messages in enumerate(parts, start=1):
        yield f"--- model call {index}"
        for message in messages:
            content = message.get("content")
            if content:
                yield f"{message['role']}: {_text(content)}"
            for call in message.get("tool_calls") or ():
                yield f"{message['role']} calls {call['function']['name']}({call['function']['arguments']})"


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts: list[Any] = list(content)
    return " ".join(str(part.get("text", f"[{part.get('type')}]")) for part in parts)
