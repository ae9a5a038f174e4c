"""Anthropic's messages as a model server speaks them: passed on, and read for the record. It gives no tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from typing_extensions import override

from agentlightning.llm_proxy.dialects.base import (
    Json,
    StreamReader,
    WireDialect,
    checked,
    object_in,
    objects,
    read_json,
    read_json_object,
)
from agentlightning.llm_proxy.dialects.message_events import event
from agentlightning.llm_proxy.dialects.message_parts import chat_of
from agentlightning.llm_proxy.replies import CallFailed, refuse
from agentlightning.llm_proxy.sse import data_of

_VERSION = "2023-06-01"
_GROWS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
"""The deltas that are parts of a text, and the field of the delta that holds the part."""


class NativeMessages(WireDialect):
    """`POST /messages` at a server that speaks it."""

    route = "messages"
    kind = "chat"
    reply_form = "JSON with the type 'message'"
    forwarded = ("anthropic-version", "anthropic-beta")

    @override
    def key_headers(self, api_key: str | None) -> dict[str, str]:
        return {"anthropic-version": _VERSION, **({"x-api-key": api_key} if api_key else {})}

    @override
    def read_request(self, raw: bytes) -> Json:
        request = read_json_object(raw)
        checked(request, "model", str, "a string")
        checked(request, "messages", list, "a list")
        checked(request, "max_tokens", int, "an integer")
        return request

    @override
    def prompt_of(self, request: Json) -> list[Any]:
        system = request.get("system")
        return [*([{"role": "system", "content": system}] if system else []), *request["messages"]]

    @override
    def read_reply(self, raw: bytes) -> Json | None:
        reply = read_json(raw)
        return reply if reply is not None and reply.get("type") == "message" else None

    @override
    def record_of(self, reply: Json) -> Json:
        return chat_of(reply)

    @override
    def read_stream(self, request: Json) -> StreamReader:
        return _MessageStream()

    @override
    def stream_of(self, reply: Json, request: Json) -> bytes:
        return b"".join(_events_of(reply))


class _MessageStream(StreamReader):
    """One stream of events, put together as it passes."""

    def __init__(self) -> None:
        self._message: Json = {}
        self._blocks: dict[Any, Json] = {}
        self._arguments: dict[Any, str] = {}

    @override
    def feed(self, frame: bytes) -> bytes:
        data = data_of(frame)
        if data is None:
            return frame
        fields = read_json(data)
        if fields is None:
            text = f"The model server sent a frame that is no JSON object: {data[:200]!r}"
            raise refuse(502, text, code="upstream_unusable", state="upstream_error")
        kind, index = fields.get("type"), fields.get("index")
        if kind == "error":
            text = f"The model server failed in the stream: {data[:2000].decode('utf-8', 'replace')}"
            raise CallFailed(502, text, code="upstream_error", state="upstream_error", own_words=data)
        if kind == "message_start":
            self._message = deepcopy(object_in(fields, "message"))
        elif kind == "content_block_start":
            self._blocks[index] = deepcopy(object_in(fields, "content_block"))
        elif kind == "content_block_delta":
            self._grow(index, object_in(fields, "delta"))
        elif kind == "message_delta":
            self._message.update(object_in(fields, "delta"))
            self._message["usage"] = {**object_in(self._message, "usage"), **object_in(fields, "usage")}
        self.ended = kind == "message_stop"
        return frame

    @override
    def reply(self) -> Json | None:
        if not self._message:
            return None
        return {**self._message, "content": [self._whole(index) for index in self._blocks]}

    def _grow(self, index: Any, delta: Json) -> None:
        name = _GROWS.get(str(delta.get("type")))
        if name == "partial_json":
            self._arguments[index] = self._arguments.get(index, "") + str(delta.get(name) or "")
        elif name is not None and index in self._blocks:
            self._blocks[index][name] = str(self._blocks[index].get(name) or "") + str(delta.get(name) or "")

    def _whole(self, index: Any) -> Json:
        arguments = self._arguments.get(index)
        if not arguments:
            return self._blocks[index]
        value = read_json(arguments)
        return {**self._blocks[index], "input": arguments if value is None else value}


def _events_of(message: Json) -> Iterator[bytes]:
    """Return a whole message as events, for a server that answered in one piece though a stream was asked for."""
    begun: Json = {**message, "content": [], "stop_reason": None, "stop_sequence": None}
    yield event("message_start", {"message": begun})
    for index, block in enumerate(objects(message.get("content"))):
        empty, delta = _emptied(block)
        yield event("content_block_start", {"index": index, "content_block": empty})
        if delta:
            yield event("content_block_delta", {"index": index, "delta": delta})
        yield event("content_block_stop", {"index": index})
    ended = {name: message.get(name) for name in ("stop_reason", "stop_sequence")}
    yield event("message_delta", {"delta": ended, "usage": object_in(message, "usage")})
    yield event("message_stop", {})


def _emptied(block: Json) -> tuple[Json, Json]:
    """Return a block as it begins, and the one delta that fills it; none for a kind that comes whole."""
    kind = block.get("type")
    if kind == "text":
        return {**block, "text": ""}, {"type": "text_delta", "text": block.get("text")}
    if kind == "thinking":
        return {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": block.get("thinking")}
    if kind == "tool_use":
        arguments = json.dumps(block.get("input"), ensure_ascii=False)
        return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": arguments}
    return block, {}
