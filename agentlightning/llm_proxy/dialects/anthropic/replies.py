"""Chat replies as Anthropic's messages, whole or as a stream of events; and messages as chat replies, for the record.

In a stream one block follows the other, each begun, filled and ended. Arguments of a tool call pass as the model writes
them, so that what is no JSON object reaches the client as it is.
Source: https://platform.claude.com/docs/en/build-with-claude/streaming.
"""

from __future__ import annotations

from typing_extensions import override

from agentlightning.llm_proxy.access.limits import count_of
from agentlightning.llm_proxy.dialects.base import StreamWriter, event
from agentlightning.llm_proxy.dialects.chat import thought_in
from agentlightning.llm_proxy.dialects.json_values import (
    Json,
    entries_of,
    fields_of,
    object_in,
    objects,
    read_json,
    text_of,
)
from agentlightning.llm_proxy.dialects.sealed import Signature
from agentlightning.llm_proxy.dialects.tool_calls import MessageToolCall, ToolCallStream, tool_calls_of

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


def blocks_of(message: Json, reply_id: object) -> list[Json]:
    """Return the blocks of a whole message: thoughts, words, tool calls."""
    blocks: list[Json] = []
    if thought := thought_in(message):
        blocks.append({"type": "thinking", "thinking": thought, "signature": str(Signature(thought))})
    if text := text_of(message.get("content")) + text_of(message.get("refusal")):
        blocks.append({"type": "text", "text": text})
    for call in tool_calls_of(message, reply_id):
        given = read_json(call.arguments.strip() or "{}")
        value = {"invalid_json": call.arguments} if given is None else given
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": value})
    return blocks


def stop_reason(choice: Json, request: Json, *, called: bool, refused: bool) -> tuple[str, str | None]:
    """Return why it stopped and, if it was one of the caller's sequences, which (vLLM and SGLang tell it).

    Some engines say `stop` of a message that calls tools or refuses.
    """
    finish_reason = choice.get("finish_reason")
    sequence = choice.get("stop_reason") or choice.get("matched_stop")
    if finish_reason == "stop" and isinstance(sequence, str) and sequence in entries_of(request.get("stop_sequences")):
        return "stop_sequence", sequence
    if finish_reason == "stop" and (called or refused):
        return "tool_use" if called else "refusal", None
    return _REASONS.get(str(finish_reason), "end_turn"), None


def message_of(reply: Json, content: list[Json], reason: str | None, sequence: str | None, usage: object) -> Json:
    """Return the message for a chat reply, or for the first chunk of one."""
    return {
        "id": text_of(reply.get("id")),
        "type": "message",
        "role": "assistant",
        "model": text_of(reply.get("model")),
        "content": content,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": usage_of(usage),
    }


def usage_of(usage: object) -> Json:
    """Return the tokens used; 0 where the server says nothing."""
    fields = fields_of(usage)
    cached = count_of(object_in(fields, "prompt_tokens_details").get("cached_tokens"))
    return {
        "input_tokens": max(0, count_of(fields.get("prompt_tokens")) - cached),
        "output_tokens": count_of(fields.get("completion_tokens")),
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }


def chat_of(message: Json) -> Json:
    """Return a message of Anthropic's in the shape of a chat completion, for the record."""
    blocks = objects(message.get("content"))
    said: Json = {"role": "assistant", "content": _joined(blocks, "text") or None}
    if thought := _joined(blocks, "thinking"):
        said["reasoning_content"] = thought
    if calls := [block for block in blocks if block.get("type") == "tool_use"]:
        said["tool_calls"] = [
            {"id": call.get("id"), "function": {"name": call.get("name"), "arguments": call.get("input")}}
            for call in calls
        ]
    reason = message.get("stop_reason")
    choice = {"index": 0, "message": said, "finish_reason": _FINISH_REASONS.get(str(reason), reason)}
    usage = object_in(message, "usage")
    read = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    counts: Json = {"prompt_tokens": sum(count_of(usage.get(name)) for name in read)}
    counts["completion_tokens"] = count_of(usage.get("output_tokens"))
    counts["total_tokens"] = counts["prompt_tokens"] + counts["completion_tokens"]
    return {"id": message.get("id"), "model": message.get("model"), "choices": [choice], "usage": counts}


def _joined(blocks: list[Json], kind: str) -> str:
    return "".join(str(block.get(kind) or "") for block in blocks if block.get("type") == kind)


class MessageEvents(StreamWriter):
    """Writes the events of one message."""

    def __init__(self, request: Json) -> None:
        self._request = request
        self._begun = False
        self._open: tuple[str, int] | None = None
        """The block that is being filled: its kind, and for a tool call its number."""
        self._blocks = 0
        self._signature = Signature()
        """Of the thought in the open block."""
        self._calls = ToolCallStream()
        self._called = self._refused = False
        self._usage: object = None
        self._choice: Json = {}

    @override
    def feed(self, chunk: Json) -> bytes:
        events = b""
        if not self._begun:
            self._begun = True
            self._calls.reply_id = chunk.get("id")
            events += event("message_start", {"message": message_of(chunk, [], None, None, None)})
        if chunk.get("usage") is not None:
            self._usage = chunk["usage"]
        for choice in objects(chunk.get("choices")):
            if choice.get("index", 0) != 0:
                continue
            delta = object_in(choice, "delta")
            if thought := thought_in(delta):
                events += self._in_block("thinking", 0, {"thinking": "", "signature": ""})
                self._signature.add(thought)
                events += self._fill({"type": "thinking_delta", "thinking": thought})
            if delta.get("refusal"):
                self._refused = True
            if text := text_of(delta.get("content")) + text_of(delta.get("refusal")):
                events += self._in_block("text", 0, {"text": ""})
                events += self._fill({"type": "text_delta", "text": text})
            events += self._tool_use(self._calls.feed(delta))
            if choice.get("finish_reason") is not None:
                self._choice = choice
        return events

    @override
    def end(self) -> bytes:
        events = self._tool_use(self._calls.end()) + self._close()
        reason, sequence = stop_reason(self._choice, self._request, called=self._called, refused=self._refused)
        delta = {"delta": {"stop_reason": reason, "stop_sequence": sequence}, "usage": usage_of(self._usage)}
        return events + event("message_delta", delta) + event("message_stop", {})

    def _tool_use(self, pieces: list[tuple[int, MessageToolCall]]) -> bytes:
        events = b""
        for number, call in pieces:
            self._called = True
            events += self._in_block("tool_use", number, {"id": call.id, "name": call.name, "input": {}})
            if call.arguments:
                events += self._fill({"type": "input_json_delta", "partial_json": call.arguments})
        return events

    def _in_block(self, kind: str, which: int, empty: Json) -> bytes:
        """Go on with the open block if it is this one, else end it and begin this one."""
        if self._open == (kind, which):
            return b""
        waiting = b"" if kind == "tool_use" else self._tool_use(self._calls.end())
        ended = self._close()
        self._open = (kind, which)
        begun = event("content_block_start", {"index": self._blocks, "content_block": {"type": kind, **empty}})
        return waiting + ended + begun

    def _fill(self, delta: Json) -> bytes:
        return event("content_block_delta", {"index": self._blocks, "delta": delta})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open[0] == "thinking":
            signed = self._fill({"type": "signature_delta", "signature": str(self._signature)})
            self._signature = Signature()
        self._open = None
        self._blocks += 1
        return signed + event("content_block_stop", {"index": self._blocks - 1})
