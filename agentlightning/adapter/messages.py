"""Spans as OpenAI chat messages with their tools: what prompt optimisers read. Needs no `openai` package.

Departures from the described system, which raised on most of these: a message without a known role, or a tool call
without a name, is left out and logged; an assistant's text is kept beside its tool calls; a function without parameters
has none; tool calls are read from the completion itself before child spans are asked; content that spells a list of
parts is that list; the gateway's spans of a call that the tracer saw too are not told twice; other instrumentations are
understood (`spans/conventions.py`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from typing_extensions import TypedDict

from agentlightning.adapter.base import TraceAdapter
from agentlightning.adapter.calls.policies import checked_policy, without_other_policies
from agentlightning.adapter.spans.attributes import as_dict, decode_text, dicts_in, is_list
from agentlightning.adapter.spans.conventions import chat_messages
from agentlightning.adapter.spans.tokens import RAW_SPAN, REQUEST_SPAN, response_id
from agentlightning.types import Span
from agentlightning.utils.attributes import unflatten_attributes

logger = logging.getLogger(__name__)

_ROLES: Final = frozenset(("developer", "system", "user", "assistant", "tool", "function"))
_PARTS: Final = ("gen_ai.prompt", "gen_ai.completion", "gen_ai.request", "gen_ai.response")
_GATEWAY_SPANS: Final = frozenset((RAW_SPAN, REQUEST_SPAN))

Message = dict[str, Any]


class OpenAIMessages(TypedDict):
    """One model call: the conversation with its answer, and the tools that were offered."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None


class TraceToMessages(TraceAdapter[list[OpenAIMessages]]):
    """One record per span that tells of a model call, in the order given.

    Override `get_tool_calls` to find tool calls elsewhere, or `convert_to_openai_messages` for another form.

    Args:
        policy: Only calls of this policy of the gateway. None is every call, but for those of policies that are frozen
            or external.
    """

    policy: str | None = None

    def __init__(self, *, policy: str | None = None) -> None:
        self.policy = checked_policy(policy)

    def adapt(self, source: Sequence[Span], /) -> list[OpenAIMessages]:
        """Return the conversations of the spans; none for no spans."""
        source = without_other_policies(source, self.policy)
        told = {reply for span in source if span.name not in _GATEWAY_SPANS and (reply := response_id(span))}
        records: list[dict[str, Any]] = []
        for span in source:
            if span.name == RAW_SPAN or (span.name == REQUEST_SPAN and response_id(span) in told):
                continue
            if (span.attributes or {}).get("llm.request.type") == "embedding":
                continue
            parts = {part.rpartition(".")[2]: group_genai_dict(span.attributes or {}, part) for part in _PARTS}
            if not (parts["prompt"] or parts["completion"]):
                parts["prompt"], parts["completion"] = chat_messages(span.attributes or {})
            if any(parts.values()):
                children = self.get_tool_calls(span, source)
                functions = as_dict(parts["request"]).get("functions") or group_genai_dict(
                    span.attributes or {}, "llm.request.functions"
                )
                records.append({**parts, "tool_calls": list(children), "functions": functions})
        return self.convert_to_openai_messages(records)

    def get_tool_calls(self, completion: Span, all_spans: Sequence[Span], /) -> Iterable[dict[str, Any]]:
        """Yield the tool calls that the direct children of a span tell of (`tool.name`, `tool.call.id`, ...)."""
        for span in all_spans:
            if span.parent_id == completion.span_id:
                tool = as_dict(group_genai_dict(span.attributes or {}, "tool"))
                if tool:
                    yield tool

    def convert_to_openai_messages(self, records: Sequence[Mapping[str, Any]], /) -> list[OpenAIMessages]:
        """Return records of the parts of a call (`prompt`, `completion`, `functions`, `tool_calls`) as messages."""
        return [_conversation(record) for record in records]


def group_genai_dict(attributes: Mapping[str, Any], prefix: str) -> Any:
    """Return the attributes below a prefix, nested: numbered keys make a list (gaps closed), other keys a dict."""
    start = prefix + "."
    below = {key[len(start) :]: value for key, value in attributes.items() if key.startswith(start)}
    return _closed(unflatten_attributes(below)) if below else {}


def _closed(node: Any) -> Any:
    if is_list(node):
        return [_closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    fields = as_dict(node)
    numbers = sorted((key for key in fields if key.isdecimal()), key=int)
    if numbers:
        return [_closed(fields[key]) for key in numbers]
    return {key: _closed(value) for key, value in fields.items()}


def _conversation(record: Mapping[str, Any]) -> OpenAIMessages:
    prompt = [_prompt_message(fields) for fields in dicts_in(record.get("prompt"))]
    answers = [
        _assistant(fields, dicts_in(record.get("tool_calls")))
        for fields in dicts_in(record.get("completion"))
        if fields.get("role") == "assistant"
    ]
    tools = [tool for fields in dicts_in(record.get("functions")) if (tool := _tool(fields)) is not None]
    return OpenAIMessages(
        messages=[message for message in (*prompt, *answers) if message is not None], tools=tools or None
    )


def _prompt_message(fields: Mapping[str, Any]) -> Message | None:
    role = fields.get("role")
    if role not in _ROLES:
        logger.warning("a message with the role %r was left out; roles are %s", role, ", ".join(sorted(_ROLES)))
        return None
    if role == "assistant":
        return _assistant(fields, ())
    message: Message = {"role": role, "content": _content(fields.get("content", ""))}
    for key in ("tool_call_id", "name"):
        if isinstance(fields.get(key), str):
            message[key] = fields[key]
    return message


def _assistant(fields: Mapping[str, Any], elsewhere: Sequence[Mapping[str, Any]]) -> Message:
    own = dicts_in(fields.get("tool_calls")) or dicts_in([fields.get("function_call")])
    calls = [call for given in (own or elsewhere) if (call := _tool_call(given)) is not None]
    content = fields.get("content")
    if not calls:
        return {"role": "assistant", "content": _content("" if content is None else content)}
    return {"role": "assistant", "content": _content(content) if content else None, "tool_calls": calls}


def _tool_call(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a tool call from the spellings `{id, name, arguments}`, `{id, function: {...}}` or `tool.*` of a span."""
    function, call = as_dict(fields.get("function")), as_dict(fields.get("call"))
    name = fields.get("name") or function.get("name")
    if not isinstance(name, str):
        logger.warning("a tool call without a name was left out: %s", sorted(fields))
        return None
    arguments = next(
        (
            value
            for value in (fields.get("arguments"), function.get("arguments"), fields.get("parameters"))
            if value is not None
        ),
        "{}",
    )
    return {
        "id": str(fields.get("id") or call.get("id") or ""),
        "type": "function",
        "function": {"name": name, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)},
    }


def _tool(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    name = fields.get("name")
    if not isinstance(name, str):
        logger.warning("a tool without a name was left out: %s", sorted(fields))
        return None
    parameters = fields.get("parameters")
    if isinstance(parameters, str):
        try:
            parameters = decode_text(parameters)
        except ValueError:
            parameters = None
    function: dict[str, Any] = {"name": name, "description": fields.get("description") or ""}
    if isinstance(parameters, dict):
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def _content(content: Any) -> Any:
    """Return text as it is, unless it spells a list of typed parts."""
    if isinstance(content, str) and content.startswith("[") and "type" in content:
        try:
            parts = decode_text(content)
        except ValueError:
            return content
        if is_list(parts) and parts and all(isinstance(part, dict) and "type" in part for part in parts):
            return list(parts)
    return content
