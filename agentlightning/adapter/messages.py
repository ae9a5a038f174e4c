"""Spans as OpenAI chat messages with their tools, the input of prompt optimisers. Does not import `openai`.

Departures from the described system, which raised on most of these: a message without a known role, or a tool call
without a name, is excluded and logged; an assistant's text is kept with its tool calls; a function without parameters
has none; tool calls are read from the completion before child spans are read; text content that encodes a list of parts
is converted to the list; the gateway's spans of a call that a tracer also recorded are not repeated; other
instrumentations are supported (`spans/content.py`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from typing_extensions import TypedDict

from agentlightning.adapter.base import TraceAdapter
from agentlightning.adapter.calls.calls import checked_policy, without_other_policies
from agentlightning.adapter.calls.conversation import conversation_of
from agentlightning.adapter.calls.matching import CallSpans, spans_by_call, tells_of_call
from agentlightning.adapter.spans.attributes import Fields, as_dict, decoded, dicts_in, is_list
from agentlightning.adapter.spans.content import in_order, messages_of, nested_parts
from agentlightning.adapter.spans.conventions import chat_messages
from agentlightning.semconv import RAW_SPAN, REQUEST_SPAN
from agentlightning.types import Span
from agentlightning.utils.attributes import unflatten_attributes

logger = logging.getLogger(__name__)

_ROLES: Final = frozenset(("developer", "system", "user", "assistant", "tool", "function"))
_PARTS: Final = ("prompt", "completion", "request", "response")

Message = Fields


def _telling(call: CallSpans) -> Span | None:
    """Return the span with the text of a call: a tracer's if it kept the text, else the gateway's."""
    spans = [call.seen, *call.also, call.request, call.record]
    return next(
        (span for span in spans if span is not None and conversation_of(span) is not None), spans[0] or spans[-2]
    )


class OpenAIMessages(TypedDict):
    """One model call: the conversation with its answer, and the available tools."""

    messages: list[Message]
    tools: list[Fields] | None


class TraceToMessages(TraceAdapter[list[OpenAIMessages]]):
    """Returns one record per span of a model call, in the order of the spans.

    Override `get_tool_calls` to find tool calls elsewhere, or `convert_to_openai_messages` for another format.

    Args:
        policy: Only calls of this policy of the gateway. None: all, except calls of frozen and external policies.
    """

    policy: str | None = None

    def __init__(self, *, policy: str | None = None) -> None:
        self.policy = checked_policy(policy)

    def adapt(self, source: Sequence[Span], /) -> list[OpenAIMessages]:
        """Return the conversations of the spans; empty without spans."""
        source = without_other_policies(source, self.policy)
        telling = {id(_telling(call)) for call in spans_by_call(source)}
        records: list[Fields] = []
        for span in source:
            is_call = span.name == REQUEST_SPAN or tells_of_call(span)
            if span.name == RAW_SPAN or (is_call and id(span) not in telling):
                continue
            if span.attributes.get("llm.request.type") == "embedding":
                continue
            parts = nested_parts(span.attributes)
            record = {part: messages_of(parts.get(f"gen_ai.{part}")) for part in _PARTS}
            if is_call and not (record["prompt"] or record["completion"]):
                record["prompt"], record["completion"] = chat_messages(span.attributes, span.events)
            if any(record.values()):
                own = as_dict(record["request"]).get("functions")
                functions = own or _below(span.attributes, "llm.request.functions")
                records.append(
                    {**record, "tool_calls": list(self.get_tool_calls(span, source)), "functions": functions}
                )
        return self.convert_to_openai_messages(records)

    def get_tool_calls(self, completion: Span, all_spans: Sequence[Span], /) -> Iterable[Fields]:
        """Yield the tool calls recorded in children of the span `completion`, among `all_spans`."""
        for span in all_spans:
            if span.parent_id == completion.span_id and (tool := as_dict(_below(span.attributes, "tool"))):
                yield tool

    def convert_to_openai_messages(self, records: Sequence[Mapping[str, object]], /) -> list[OpenAIMessages]:
        """Convert records with the parts of a call (`prompt`, `completion`, `functions`, `tool_calls`) to messages."""
        converted: list[OpenAIMessages] = []
        for record in records:
            messages: list[Message] = []
            for fields in in_order(record.get("prompt")):
                role = fields.get("role")
                if role not in _ROLES:
                    logger.warning(
                        "a message with the role %r is excluded; valid roles are %s", role, ", ".join(sorted(_ROLES))
                    )
                elif role == "assistant":
                    messages.append(_assistant(fields, ()))
                else:
                    texts = {key: fields[key] for key in ("tool_call_id", "name") if isinstance(fields.get(key), str)}
                    messages.append({"role": role, "content": _content(fields.get("content", "")), **texts})
            for fields in in_order(record.get("completion")):
                if fields.get("role") == "assistant":
                    messages.append(_assistant(fields, dicts_in(record.get("tool_calls"))))
            tools: list[Fields] = []
            for fields in in_order(record.get("functions")):
                if not isinstance(fields.get("name"), str):
                    logger.warning("a tool without a name is excluded: %s", sorted(fields))
                    continue
                function: Fields = {"name": fields["name"], "description": fields.get("description") or ""}
                if isinstance(parameters := decoded(fields.get("parameters")), dict):
                    function["parameters"] = parameters
                tools.append({"type": "function", "function": function})
            converted.append(OpenAIMessages(messages=messages, tools=tools or None))
        return converted


def _below(attributes: Mapping[str, object], prefix: str) -> object:
    """Return the attributes below a prefix, nested."""
    start = prefix + "."
    return unflatten_attributes(
        {key[len(start) :]: value for key, value in attributes.items() if key.startswith(start)}
    )


def _assistant(fields: Mapping[str, object], elsewhere: Sequence[Mapping[str, object]]) -> Message:
    own = dicts_in(fields.get("tool_calls")) or dicts_in([fields.get("function_call")])
    calls: list[Fields] = []
    for tool_call in own or elsewhere:  # `{id, name, arguments}`, `{id, function: {...}}` or `tool.*` of a span
        function, call = as_dict(tool_call.get("function")), as_dict(tool_call.get("call"))
        name = tool_call.get("name") or function.get("name")
        if not isinstance(name, str):
            logger.warning("a tool call without a name is excluded: %s", sorted(tool_call))
            continue
        texts = (tool_call.get("arguments"), function.get("arguments"), tool_call.get("parameters"), "{}")
        arguments = next(value for value in texts if value is not None)
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        id = str(tool_call.get("id") or call.get("id") or "")
        calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": text}})
    content = fields.get("content")
    if not calls:
        return {"role": "assistant", "content": _content("" if content is None else content)}
    return {"role": "assistant", "content": _content(content) if content else None, "tool_calls": calls}


def _content(content: object) -> object:
    """Return text unchanged, unless it spells a list of typed parts."""
    if isinstance(content, str) and content.startswith("[") and "type" in content:
        parts = decoded(content)
        if is_list(parts) and parts and all(isinstance(part, dict) and "type" in part for part in parts):
            return list(parts)
    return content
