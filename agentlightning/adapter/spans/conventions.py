"""Reads the text of a model call in the conventions of several instrumentations, as messages of the chat API.

- GenAI conventions of OpenTelemetry: JSON lists in attributes (`gen_ai.input.messages`), the same on an event
  (`gen_ai.client.inference.operation.details`), and one event per message (`gen_ai.user.message`, `gen_ai.choice`);
- OpenInference: numbered attributes (`llm.input_messages.0.message.role`);
- Logfire: `request_data` and `response_data`;
- Google's ADK before it followed the GenAI conventions: `gcp.vertex.agent.llm_request` and `llm_response`.

A part that cannot be read is excluded; nothing raises. https://opentelemetry.io/docs/specs/semconv/gen-ai/ and
https://github.com/Arize-ai/openinference/tree/main/spec
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from agentlightning.adapter.spans.attributes import Fields, as_dict, decoded, dicts_in, is_list
from agentlightning.types import Event
from agentlightning.utils.attributes import filter_attributes, unflatten_attributes

Message = Fields
Words = tuple[list[Message], list[Message]]
"""The messages of the prompt and those of the completion."""

ADK_REQUEST: Final = "gcp.vertex.agent.llm_request"
_DETAILS: Final = "gen_ai.client.inference.operation.details"
_CHOICE: Final = "gen_ai.choice"
_EVENT_ROLES: Final = {
    "gen_ai.system.message": "system",
    "gen_ai.user.message": "user",
    "gen_ai.assistant.message": "assistant",
    "gen_ai.tool.message": "tool",
}


def chat_messages(attributes: Mapping[str, object], events: Sequence[Event] = ()) -> Words:
    """Return the messages of prompt and completion, in the format of the chat API; empty if unknown."""
    for reader in _READERS:
        prompt, completion = reader(attributes)
        if prompt or completion:
            return prompt, completion
    return _of_events(events) if events else ([], [])


# --- GenAI conventions: attributes -----------------------------------------------------------------------------------


def _of_conventions(attributes: Mapping[str, object]) -> Words:
    system = dicts_in(decoded(attributes.get("gen_ai.system_instructions")))
    prompt: list[Message] = [{"role": "system", "content": _part_texts(system)}] if system else []
    for item in dicts_in(decoded(attributes.get("gen_ai.input.messages"))):
        prompt.extend(_from_parts(item))
    completion: list[Message] = []
    for item in dicts_in(decoded(attributes.get("gen_ai.output.messages"))):
        reason = {"finish_reason": item["finish_reason"]} if item.get("finish_reason") else {}
        completion.extend({**message, **reason} for message in _from_parts(item))
    return prompt, completion


def _from_parts(message: Mapping[str, object]) -> Iterator[Message]:
    """Yield a message of typed parts as chat messages."""
    parts = dicts_in(message.get("parts"))
    if not parts:
        yield dict(message)
        return
    results = [part for part in parts if part.get("type") == "tool_call_response"]
    answers = [(part.get("id"), _result_text(part.get("response", part.get("result")))) for part in results]
    calls = [part for part in parts if part.get("type") == "tool_call"]
    fields = [(part.get("id"), part.get("name"), part.get("arguments")) for part in calls]
    yield from _chat(message.get("role"), _part_texts(parts), fields, answers, only_results=len(results) == len(parts))


def _chat(
    role: object,
    text: str,
    calls: Sequence[tuple[object, object, object]],
    results: Sequence[tuple[object, str]],
    *,
    only_results: bool,
) -> Iterator[Message]:
    """Yield messages of the chat API: each result of a tool, (id, text), and the text with its tool calls, (id, name,
    arguments)."""
    for id, content in results:
        yield {"role": "tool", "tool_call_id": id, "content": content}
    if not only_results:
        tool_calls = [{"id": id, "name": name, "arguments": _as_text(arguments)} for id, name, arguments in calls]
        yield {"role": role, "content": text, **({"tool_calls": tool_calls} if tool_calls else {})}


def _part_texts(parts: list[Fields]) -> str:
    return "".join(str(part.get("content", "")) for part in parts if part.get("type") == "text")


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _result_text(value: object) -> str:
    """Return the result of a tool as text; a list of blocks as the text of the blocks."""
    blocks = dicts_in(value)
    if blocks and all("text" in block or "json" in block for block in blocks):
        return "".join(str(block["text"]) if "text" in block else _as_text(block["json"]) for block in blocks)
    return _as_text(value)


# --- GenAI conventions: events ---------------------------------------------------------------------------------------


def _of_events(events: Sequence[Event]) -> Words:
    details: dict[str, object] = {}
    prompt: list[Message] = []
    completion: list[Message] = []
    for event in events:
        if event.name == _DETAILS:
            details.update(event.attributes)
        elif event.name in _EVENT_ROLES:
            prompt.extend(_from_event(_EVENT_ROLES[event.name], event.attributes))
        elif event.name == _CHOICE:
            reason = event.attributes.get("finish_reason")
            messages = _from_event("assistant", event.attributes)
            completion.extend({**message, "finish_reason": reason} if reason else message for message in messages)
    return _of_conventions(details) if details else (prompt, completion)


def _from_event(role: str, attributes: Mapping[str, object]) -> list[Message]:
    """Return the messages of one event: its fields are attributes, or JSON in `gen_ai.event.content`."""
    fields = {**attributes, **as_dict(decoded(attributes.get("gen_ai.event.content")))}
    message = decoded(fields["message"]) if "message" in fields else None
    content = fields.get("message", fields.get("content"))
    if whole := as_dict(message):
        fields, content = {**fields, **whole}, whole.get("content")
    blocks = dicts_in(decoded(content)) if not isinstance(content, str) or content.startswith("[") else []
    if blocks:
        return list(_from_blocks(role, blocks))
    if content is None and "tool_calls" not in fields:
        return []
    chat_message: Message = {"role": role, "content": content if content is None else _as_text(content)}
    if calls := dicts_in(decoded(fields.get("tool_calls"))):
        chat_message["tool_calls"] = calls
    if role == "tool":
        chat_message["tool_call_id"] = fields.get("id")
    return [chat_message]


def _from_blocks(role: str, blocks: Sequence[Fields]) -> Iterator[Message]:
    """Yield blocks of Bedrock's form, as Strands writes them, or typed parts of the chat API, as messages."""
    results = [as_dict(block["toolResult"]) for block in blocks if "toolResult" in block]
    answers = [(each.get("toolUseId"), _result_text(each.get("content"))) for each in results]
    uses = [use for block in blocks if (use := as_dict(block.get("toolUse")))]
    calls = [(use.get("toolUseId"), use.get("name"), use.get("input")) for use in uses]
    text = "".join(str(block["text"]) for block in blocks if "text" in block)
    yield from _chat(role, text, calls, answers, only_results=len(results) == len(blocks))


# --- OpenInference ---------------------------------------------------------------------------------------------------


def _of_inference(attributes: Mapping[str, object]) -> Words:
    return _numbered(attributes, "llm.input_messages"), _numbered(attributes, "llm.output_messages")


def _numbered(attributes: Mapping[str, object], prefix: str) -> list[Message]:
    matches = filter_attributes(attributes, prefix)
    if not matches:
        return []
    nested = unflatten_attributes({key[len(prefix) + 1 :]: value for key, value in matches.items() if key != prefix})
    messages: list[Message] = []
    for entry in dicts_in(nested):
        fields = as_dict(entry.get("message"))
        message = {key: fields[key] for key in ("role", "content", "name", "tool_call_id") if key in fields}
        parts = [as_dict(part.get("message_content")) for part in dicts_in(fields.get("contents"))]
        if parts and "content" not in message:
            message["content"] = "".join(str(part.get("text", "")) for part in parts)
        calls = [as_dict(call.get("tool_call")) for call in dicts_in(fields.get("tool_calls"))]
        if calls:
            message["tool_calls"] = [{"id": call.get("id"), **as_dict(call.get("function"))} for call in calls]
        messages.append(message)
    return messages


# --- Logfire ---------------------------------------------------------------------------------------------------------


def _of_logfire(attributes: Mapping[str, object]) -> Words:
    request = as_dict(decoded(attributes.get("request_data")))
    reply = as_dict(decoded(attributes.get("response_data")))
    answer = as_dict(reply.get("message"))
    return dicts_in(request.get("messages")), [answer] if answer else []


# --- Google's ADK ----------------------------------------------------------------------------------------------------


def _of_adk(attributes: Mapping[str, object]) -> Words:
    request = as_dict(decoded(attributes.get(ADK_REQUEST)))
    reply = as_dict(decoded(attributes.get("gcp.vertex.agent.llm_response")))
    system = as_dict(request.get("config")).get("system_instruction")
    prompt: list[Message] = [{"role": "system", "content": _google_text(system)}] if system else []
    for content in dicts_in(request.get("contents")):
        prompt.extend(_from_google(content))
    return prompt, list(_from_google(as_dict(reply.get("content"))))


def _google_text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = dicts_in(as_dict(content).get("parts")) or dicts_in(content) if not is_list(content) else dicts_in(content)
    return "".join(str(part.get("text") or "") for part in parts)


def _from_google(content: Mapping[str, object]) -> Iterator[Message]:
    parts = dicts_in(content.get("parts"))
    results = [as_dict(part["function_response"]) for part in parts if "function_response" in part]
    answers = [(each.get("id"), _as_text(each.get("response"))) for each in results]
    function_calls = [call for part in parts if (call := as_dict(part.get("function_call")))]
    calls = [(call.get("id"), call.get("name"), as_dict(call.get("args"))) for call in function_calls]
    text = "".join(str(part.get("text") or "") for part in parts if not part.get("thought"))
    role = "assistant" if content.get("role") == "model" else content.get("role")
    yield from _chat(role, text, calls, answers, only_results=len(results) == len(parts))


_READERS: Final[tuple[Callable[[Mapping[str, object]], Words], ...]] = (
    _of_conventions,
    _of_inference,
    _of_logfire,
    _of_adk,
)
