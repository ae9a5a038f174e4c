"""Converts tool calls between the text of a model and the form of the OpenAI API.

The syntax is the one of Hermes and Qwen models and of the demo, any number of times, after free text:
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. What does not parse stays text: a malformed call is the
policy's own mistake, and the agent gets to see it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

_CALL: Final = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call: the tool's name and its arguments as JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply of the model: text (None if there is none beside the calls) and calls in order."""

    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()


def parse_reply(text: str) -> Reply:
    """Return text and tool calls of a completion; all of it is text if any call in it is malformed."""
    calls = [_parse_call(body) for body in _CALL.findall(text)]
    well_formed = tuple(call for call in calls if call is not None)
    if not calls or len(well_formed) < len(calls):
        return Reply(content=text)
    return Reply(content=_CALL.sub("", text).strip() or None, tool_calls=well_formed)


def _parse_call(body: str) -> ToolCall | None:
    try:
        call: object = json.loads(body)
    except (json.JSONDecodeError, RecursionError):
        return None
    if not isinstance(call, dict):
        return None
    fields = cast("dict[str, object]", call)
    name, arguments = fields.get("name"), fields.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def messages_for_template(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, object]]:
    """Return OpenAI messages as chat templates expect them: arguments as objects, text parts joined to one text.

    Raises:
        ValueError: A message has no role, arguments are not a JSON object, or a part of the content is not text.
    """
    return [_message_for_template(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message_for_template(message: Mapping[str, Any], where: str) -> dict[str, object]:
    if not isinstance(message.get("role"), str):
        raise ValueError(f"{where}: 'role' is missing")
    shaped = {**message, "content": _text(message.get("content"), where)}
    if message.get("tool_calls"):
        shaped["tool_calls"] = [_call_for_template(call, where) for call in message["tool_calls"]]
    return shaped


def _text(content: object, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = cast("list[Mapping[str, Any]]", content)
        if all(isinstance(part, dict) and part.get("type") == "text" and "text" in part for part in parts):
            return "".join(part["text"] for part in parts)
    raise ValueError(f"{where}: 'content' must be a text or a list of text parts; the model reads nothing else")


def _call_for_template(call: Mapping[str, Any], where: str) -> dict[str, object]:
    try:
        function = call["function"]
        arguments: object = json.loads(function["arguments"] or "{}")
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{where}: a tool call needs 'function' with 'name' and JSON 'arguments' ({error})") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}: the arguments of a tool call must be a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}
