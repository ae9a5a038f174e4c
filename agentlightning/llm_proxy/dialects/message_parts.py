"""A chat completion in Anthropic's words: its blocks, why it stopped, what it used; and Anthropic's words in chat's."""

from __future__ import annotations

from typing import Any, cast

from agentlightning.llm_proxy.dialects.base import Json, object_in, objects, read_json
from agentlightning.llm_proxy.dialects.tool_calls import tool_calls_of

_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
_FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}


def blocks_of(message: Json, reply_id: Any) -> list[Json]:
    """Return the blocks of a whole message: thoughts, words, tool calls."""
    blocks: list[Json] = []
    if thought := thought_in(message):
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    if text := (message.get("content") or "") + (message.get("refusal") or ""):
        blocks.append({"type": "text", "text": text})
    for call in tool_calls_of(message, reply_id):
        given = read_json(call.arguments.strip() or "{}")
        value = {"invalid_json": call.arguments} if given is None else given
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": value})
    return blocks


def thought_in(message: Json) -> str:
    """Return what the model thought, of a message or a piece of one; engines spell it in two ways."""
    return message.get("reasoning_content") or message.get("reasoning") or ""


def stop_reason(choice: Json, request: Json, *, called: bool, refused: bool) -> tuple[str, str | None]:
    """Return why it stopped and, if it was one of the caller's sequences, which (vLLM and SGLang tell it).

    Some engines say `stop` of a message that calls tools or refuses.
    """
    finish_reason = choice.get("finish_reason")
    sequence = choice.get("stop_reason") or choice.get("matched_stop")
    if finish_reason == "stop" and isinstance(sequence, str) and sequence in (request.get("stop_sequences") or ()):
        return "stop_sequence", sequence
    if finish_reason == "stop" and (called or refused):
        return "tool_use" if called else "refusal", None
    return _REASONS.get(str(finish_reason), "end_turn"), None


def usage_of(usage: Any) -> Json:
    """Return the tokens used; 0 where the server says nothing."""
    fields = cast(Json, usage) if isinstance(usage, dict) else {}
    cached = object_in(fields, "prompt_tokens_details").get("cached_tokens") or 0
    return {
        "input_tokens": (fields.get("prompt_tokens") or 0) - cached,
        "output_tokens": fields.get("completion_tokens") or 0,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }


def chat_of(message: Json) -> Json:
    """Return a message of Anthropic's in the shape of a chat completion, for the record."""
    blocks = objects(message.get("content"))
    said: Json = {"role": "assistant", "content": _joined(blocks, "text") or None}
    if thought := _joined(blocks, "thinking"):
        said["reasoning_content"] = thought
    calls = [block for block in blocks if block.get("type") == "tool_use"]
    if calls:
        named = [{"name": call.get("name"), "arguments": call.get("input")} for call in calls]
        ids = [call.get("id") for call in calls]
        said["tool_calls"] = [{"id": id_, "function": function} for id_, function in zip(ids, named, strict=True)]
    reason = message.get("stop_reason")
    choice = {"index": 0, "message": said, "finish_reason": _FINISH_REASONS.get(str(reason), reason)}
    usage = object_in(message, "usage")
    read = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    counts: Json = {"prompt_tokens": sum(usage.get(name) or 0 for name in read)}
    counts["completion_tokens"] = usage.get("output_tokens") or 0
    counts["total_tokens"] = counts["prompt_tokens"] + counts["completion_tokens"]
    return {"id": message.get("id"), "model": message.get("model"), "choices": [choice], "usage": counts}


def _joined(blocks: list[Json], kind: str) -> str:
    return "".join(str(block.get(kind) or "") for block in blocks if block.get("type") == kind)
