"""OpenAI's responses as a model server speaks them: passed on, and read for the record. It gives no tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
from agentlightning.llm_proxy.dialects.response_events import event
from agentlightning.llm_proxy.dialects.response_items import chat_of
from agentlightning.llm_proxy.replies import CallFailed, refuse
from agentlightning.llm_proxy.sse import data_of

_WHOLE = ("response.completed", "response.incomplete")
_FAILED = ("error", "response.failed")


class NativeResponses(WireDialect):
    """`POST /responses` at a server that speaks it."""

    route = "responses"
    kind = "chat"
    reply_form = "JSON with the object 'response'"
    forwarded = ("openai-beta",)

    @override
    def read_request(self, raw: bytes) -> Json:
        request = read_json_object(raw)
        checked(request, "model", str, "a string")
        checked(request, "input", (str, list), "a string or a list of items")
        return request

    @override
    def prompt_of(self, request: Json) -> list[Any]:
        given, instructions = request["input"], request.get("instructions")
        said = [{"role": "user", "content": given}] if isinstance(given, str) else [_said(i) for i in objects(given)]
        return [*([{"role": "system", "content": instructions}] if instructions else []), *said]

    @override
    def read_reply(self, raw: bytes) -> Json | None:
        reply = read_json(raw)
        return reply if reply is not None and reply.get("object") == "response" else None

    @override
    def record_of(self, reply: Json) -> Json:
        return chat_of(reply)

    @override
    def read_stream(self, request: Json) -> StreamReader:
        return _ResponseStream()

    @override
    def stream_of(self, reply: Json, request: Json) -> bytes:
        return b"".join(event(kind, {"sequence_number": n, **f}) for n, (kind, f) in enumerate(_events_of(reply)))


class _ResponseStream(StreamReader):
    """One stream of events. The last one holds the whole response; until then its items are kept as they are done."""

    def __init__(self) -> None:
        self._response: Json = {}
        self._items: list[Json] = []

    @override
    def feed(self, frame: bytes) -> bytes:
        data = data_of(frame)
        if data is None:
            return frame
        fields = read_json(data)
        if fields is None:
            text = f"The model server sent a frame that is no JSON object: {data[:200]!r}"
            raise refuse(502, text, code="upstream_unusable", state="upstream_error")
        kind = fields.get("type")
        if kind in _FAILED:
            text = f"The model server failed in the stream: {data[:2000].decode('utf-8', 'replace')}"
            raise CallFailed(502, text, code="upstream_error", state="upstream_error", own_words=data)
        if kind == "response.output_item.done":
            self._items.append(object_in(fields, "item"))
        if response := object_in(fields, "response"):
            self._response = response
        self.ended = kind in _WHOLE
        return frame

    @override
    def reply(self) -> Json | None:
        if not self._response:
            return None
        return self._response if self.ended else {**self._response, "output": self._items}


def _said(item: Json) -> Json:
    """Return an item as a message, for the record."""
    kind = item.get("type") or "message"
    if kind == "message":
        return {"role": item.get("role"), "content": item.get("content")}
    role = "tool" if str(kind).endswith("_output") else "assistant"
    return {"role": role, "content": json.dumps(item, ensure_ascii=False)}


def _events_of(response: Json) -> Iterator[tuple[str, Json]]:
    """Return a whole response as events, for a server that answered in one piece though a stream was asked for."""
    yield "response.created", {"response": {**response, "output": [], "status": "in_progress"}}
    for index, item in enumerate(objects(response.get("output"))):
        yield "response.output_item.added", {"output_index": index, "item": item}
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{response.get('status') or 'completed'}", {"response": response}
