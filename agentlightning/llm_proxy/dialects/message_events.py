"""A chat stream as the events of Anthropic's messages: one block after the other, each begun, filled and ended.

Source: https://platform.claude.com/docs/en/build-with-claude/streaming. Arguments of a tool call pass as the model
writes them, so that what is no JSON object reaches the client as it is.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from agentlightning.llm_proxy.dialects.base import Json, StreamWriter, json_bytes, object_in, objects
from agentlightning.llm_proxy.dialects.message_parts import stop_reason, thought_in, usage_of
from agentlightning.llm_proxy.dialects.tool_calls import ToolCall, ToolCallStream
from agentlightning.llm_proxy.sse import frame_of


def event(kind: str, fields: Json) -> bytes:
    """Return one event."""
    return frame_of(json_bytes({"type": kind, **fields}), kind)


class MessageEvents(StreamWriter):
    """Writes the events of one message."""

    def __init__(self, request: Json) -> None:
        self._request = request
        self._begun = False
        self._open: tuple[str, int] | None = None
        """The block that is being filled: its kind, and for a tool call its number."""
        self._blocks = 0
        self._calls = ToolCallStream()
        self._called = self._refused = False
        self._usage: Any = None
        self._choice: Json = {}

    @override
    def feed(self, chunk: Json) -> bytes:
        events = b""
        if not self._begun:
            self._begun = True
            self._calls.reply_id = chunk.get("id")
            events += event("message_start", {"message": _empty(chunk)})
        if chunk.get("usage") is not None:
            self._usage = chunk["usage"]
        for choice in objects(chunk.get("choices")):
            if choice.get("index", 0) == 0:
                events += self._delta(object_in(choice, "delta"))
                if choice.get("finish_reason") is not None:
                    self._choice = choice
        return events

    @override
    def end(self) -> bytes:
        events = self._tool_use(self._calls.end()) + self._close()
        reason, sequence = stop_reason(self._choice, self._request, called=self._called, refused=self._refused)
        delta = {"delta": {"stop_reason": reason, "stop_sequence": sequence}, "usage": usage_of(self._usage)}
        return events + event("message_delta", delta) + event("message_stop", {})

    def _delta(self, delta: Json) -> bytes:
        events = b""
        if thought := thought_in(delta):
            events += self._in_block("thinking", 0, {"thinking": "", "signature": ""})
            events += self._fill({"type": "thinking_delta", "thinking": thought})
        if delta.get("refusal"):
            self._refused = True
        if text := (delta.get("content") or "") + (delta.get("refusal") or ""):
            events += self._in_block("text", 0, {"text": ""})
            events += self._fill({"type": "text_delta", "text": text})
        return events + self._tool_use(self._calls.feed(delta))

    def _tool_use(self, pieces: list[tuple[int, ToolCall]]) -> bytes:
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
        self._open = None
        self._blocks += 1
        return event("content_block_stop", {"index": self._blocks - 1})


def _empty(chunk: Json) -> Json:
    return {
        "id": chunk.get("id"),
        "type": "message",
        "role": "assistant",
        "model": chunk.get("model"),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage_of(None),
    }
