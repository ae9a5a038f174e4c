"""Reads chat messages from the attributes of other instrumentations, and tells which spans are model calls.

`content.py` reads the flat form (`gen_ai.prompt.0.role`, OpenLLMetry and AgentOps) and the operations of this package.
Here are the others: OpenInference (`llm.input_messages.0.message.role`), the JSON lists of the newer OpenTelemetry
conventions (`gen_ai.input.messages`), and Logfire (`request_data`). Nothing raises; what cannot be read is not there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Final

from agentlightning.adapter.spans.attributes import Fields, as_dict, decoded, dicts_in
from agentlightning.utils.attributes import filter_attributes, unflatten_attributes

CALL_NAME: Final = re.compile(r"openai\.chat\.completion")
"""Names of spans that are model calls, whatever their attributes say."""
_CALL_OPERATIONS: Final = frozenset(("chat", "text_completion", "generate_content"))
_CALL_TYPES: Final = frozenset(("chat", "completion"))
_INFERENCE_KIND: Final = "openinference.span.kind"

Message = Fields


def says_model_call(name: str, attributes: Mapping[str, object]) -> bool:
    """True if a span is one model call by its name or by the attributes of any convention."""
    return (
        attributes.get("gen_ai.operation.name") in _CALL_OPERATIONS
        or attributes.get("llm.request.type") in _CALL_TYPES
        or attributes.get(_INFERENCE_KIND) == "LLM"
        or ("request_data" in attributes and "gen_ai.request.model" in attributes)
        or CALL_NAME.search(name) is not None
    )


def response_id_in_output(attributes: Mapping[str, object]) -> str | None:
    """Return the reply's id where OpenInference keeps the whole reply as JSON text."""
    if attributes.get(_INFERENCE_KIND) != "LLM":
        return None
    found = as_dict(decoded(attributes.get("output.value"))).get("id")
    return found if isinstance(found, str) and found else None


def chat_messages(attributes: Mapping[str, object]) -> tuple[list[Message], list[Message]]:
    """Return the messages of the prompt and those of the completion, in the form of the chat API; empty if unknown."""
    for read in (_of_conventions, _of_inference, _of_logfire):
        prompt, completion = read(attributes)
        if prompt or completion:
            return prompt, completion
    return [], []


# --- the JSON lists of the newer conventions -------------------------------------------------------------------------


def _of_conventions(attributes: Mapping[str, object]) -> tuple[list[Message], list[Message]]:
    system = dicts_in(decoded(attributes.get("gen_ai.system_instructions")))
    prompt: list[Message] = [{"role": "system", "content": _part_texts(system)}] if system else []
    for said in dicts_in(decoded(attributes.get("gen_ai.input.messages"))):
        prompt.extend(_from_parts(said))
    completion: list[Message] = []
    for said in dicts_in(decoded(attributes.get("gen_ai.output.messages"))):
        reason = {"finish_reason": said["finish_reason"]} if said.get("finish_reason") else {}
        completion.extend({**message, **reason} for message in _from_parts(said))
    return prompt, completion


def _from_parts(said: Mapping[str, object]) -> Iterator[Message]:
    """Yield a message of typed parts as chat messages: each result of a tool is a message of its own."""
    parts = dicts_in(said.get("parts"))
    if not parts:
        yield dict(said)
        return
    results = [part for part in parts if part.get("type") == "tool_call_response"]
    for part in results:
        content = part.get("response", part.get("result"))
        yield {"role": "tool", "tool_call_id": part.get("id"), "content": _as_text(content)}
    calls = [
        {"id": part.get("id"), "name": part.get("name"), "arguments": _as_text(part.get("arguments"))}
        for part in parts
        if part.get("type") == "tool_call"
    ]
    if len(results) < len(parts):
        message: Message = {"role": said.get("role"), "content": _part_texts(parts)}
        yield {**message, "tool_calls": calls} if calls else message


def _part_texts(parts: list[Fields]) -> str:
    return "".join(str(part.get("content", "")) for part in parts if part.get("type") == "text")


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


# --- OpenInference ---------------------------------------------------------------------------------------------------


def _of_inference(attributes: Mapping[str, object]) -> tuple[list[Message], list[Message]]:
    return _numbered(attributes, "llm.input_messages"), _numbered(attributes, "llm.output_messages")


def _numbered(attributes: Mapping[str, object], prefix: str) -> list[Message]:
    found = filter_attributes(attributes, prefix)
    if not found:
        return []
    nested = unflatten_attributes({key[len(prefix) + 1 :]: value for key, value in found.items() if key != prefix})
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


def _of_logfire(attributes: Mapping[str, object]) -> tuple[list[Message], list[Message]]:
    request = as_dict(decoded(attributes.get("request_data")))
    reply = as_dict(decoded(attributes.get("response_data")))
    answer = as_dict(reply.get("message"))
    return dicts_in(request.get("messages")), [answer] if answer else []
