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

CALL_OPENING: Final = "<tool_call>"
CALL_CLOSING: Final = "</tool_call>"
_IMAGES: Final = ("image_url", "image", "input_image")
_CALL: Final = re.compile(f"{CALL_OPENING}(.*?){CALL_CLOSING}", re.DOTALL)


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
    calls: list[ToolCall] = []
    for body in _CALL.findall(text):
        try:
            call: object = json.loads(body)
        except (json.JSONDecodeError, RecursionError):
            return Reply(content=text)
        fields = cast("dict[str, object]", call) if isinstance(call, dict) else {}
        name, arguments = fields.get("name"), fields.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return Reply(content=text)
        calls.append(ToolCall(name, json.dumps(arguments, ensure_ascii=False)))
    return Reply(_CALL.sub("", text).strip() or None, tuple(calls)) if calls else Reply(content=text)


def messages_for_template(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return OpenAI messages as chat templates expect them: arguments as objects, text parts joined to one text.

    Raises:
        ValueError: A message has no role, arguments are not a JSON object, or a part of the content is not text.
    """
    shaped: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{where}: 'role' is missing")
        shaped.append({**message, "content": _text(message.get("content"), where)})
        if message.get("tool_calls"):
            shaped[-1]["tool_calls"] = [_call_for_template(call, where) for call in message["tool_calls"]]
    return shaped


def _text(content: object, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = cast("list[Mapping[str, Any]]", content)
        if all(isinstance(part, dict) and part.get("type") == "text" and "text" in part for part in parts):
            return "".join(part["text"] for part in parts)
        if images := [part for part in parts if isinstance(part, dict) and part.get("type") in _IMAGES]:
            raise ValueError(
                f"{where}: a part of 'content' is of type {images[0]['type']!r}, and images are refused: the rows that "
                "the policy learns from hold tokens of text alone. Put what it shows into words, or ask another model "
                "of the gateway for them"
            )
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
