"""Anthropic's messages: the dialect of agents, and the wire dialect of servers that speak it themselves.

Requests are translated in `requests`, replies and streams in `replies`. A server that speaks the dialect gets the
request as it is, gives no tokens, and its reply is read for the record. In a translated reply of one piece, arguments
of a tool call that are no JSON object arrive as `{"invalid_json": "..."}`, since the block can hold nothing else.
"""

from __future__ import annotations

import json
from copy import deepcopy
from typing import cast

from typing_extensions import override

from agentlightning.llm_proxy.dialects.anthropic.replies import (
    MessageEvents,
    blocks_of,
    chat_of,
    message_of,
    stop_reason,
)
from agentlightning.llm_proxy.dialects.anthropic.requests import THREAD_REFUSED, chat_request, with_prefill
from agentlightning.llm_proxy.dialects.base import (
    EventReader,
    StreamReader,
    StreamWriter,
    TranslatedDialect,
    WireDialect,
    event,
)
from agentlightning.llm_proxy.dialects.json_values import (
    Json,
    check_field,
    object_in,
    objects,
    read_json,
    read_model_request,
    text_of,
)
from agentlightning.llm_proxy.dialects.pieces import Text
from agentlightning.llm_proxy.replies import CallFailed, JsonReply, json_reply

_VERSION = "2023-06-01"
_GROWS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
"""The deltas that are parts of a text, and the field of the delta that holds the part."""


class NativeMessages(WireDialect):
    """`POST /messages` at a server that speaks it."""

    route = "messages"
    kind = "chat"
    reply_form = "JSON with the type 'message' and a list 'content'"
    forwarded = ("anthropic-version", "anthropic-beta")

    @override
    def key_headers(self, api_key: str | None) -> dict[str, str]:
        return {"anthropic-version": _VERSION, **({"x-api-key": api_key} if api_key else {})}

    @override
    def read_request(self, raw: bytes, model: str | None = None) -> Json:
        request = read_model_request(raw, "messages", list, "a list", model)
        check_field(request, "max_tokens", int, "an integer")
        return request

    @override
    def prompt_of(self, request: Json) -> list[object]:
        system = request.get("system")
        return [*([{"role": "system", "content": system}] if system else []), *request["messages"]]

    @override
    def read_reply(self, raw: bytes) -> Json | None:
        reply = read_json(raw)
        usable = reply is not None and reply.get("type") == "message" and isinstance(reply.get("content"), list)
        return reply if usable else None

    @override
    def record_of(self, reply: Json) -> Json:
        return chat_of(reply)

    @override
    def read_stream(self, request: Json) -> StreamReader:
        return _MessageStream()

    @override
    def stream_of(self, reply: Json, request: Json) -> bytes:
        begun: Json = {**reply, "content": [], "stop_reason": None, "stop_sequence": None}
        events = [event("message_start", {"message": begun})]
        for index, block in enumerate(objects(reply.get("content"))):
            kind = block.get("type")
            empty: Json = block
            delta: Json = {}  # other kinds come whole
            if kind in ("text", "thinking"):
                empty, delta = {**block, kind: ""}, {"type": f"{kind}_delta", kind: text_of(block.get(kind))}
            elif kind == "tool_use":
                arguments = json.dumps(block.get("input"), ensure_ascii=False)
                empty, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": arguments}
            events.append(event("content_block_start", {"index": index, "content_block": empty}))
            if delta:
                events.append(event("content_block_delta", {"index": index, "delta": delta}))
            events.append(event("content_block_stop", {"index": index}))
        ended = {name: reply.get(name) for name in ("stop_reason", "stop_sequence")}
        events.append(event("message_delta", {"delta": ended, "usage": object_in(reply, "usage")}))
        return b"".join([*events, event("message_stop", {})])


class _MessageStream(EventReader):
    """One stream of events, put together as it passes."""

    errors = ("error",)

    def __init__(self) -> None:
        self._message: Json = {}
        self._blocks: dict[int, Json] = {}
        self._texts: dict[int, dict[str, Text]] = {}
        """What the blocks are filled with, by the field that grows."""

    @override
    def collect(self, fields: Json) -> None:
        kind, place = fields.get("type"), fields.get("index")
        index = place if isinstance(place, int) else 0
        if kind == "message_start":
            self._message = deepcopy(object_in(fields, "message"))
        elif kind == "content_block_start":
            self._blocks[index] = deepcopy(object_in(fields, "content_block"))
        elif kind == "content_block_delta":
            delta = object_in(fields, "delta")
            name = _GROWS.get(str(delta.get("type")))
            if name is not None and index in self._blocks:
                first = "" if name == "partial_json" else text_of(self._blocks[index].get(name))
                self._texts.setdefault(index, {}).setdefault(name, Text(first)).add(text_of(delta.get(name)))
        elif kind == "message_delta":
            self._message.update(object_in(fields, "delta"))
            self._message["usage"] = {**object_in(self._message, "usage"), **object_in(fields, "usage")}
        self.ended = kind == "message_stop"

    @override
    def reply(self) -> Json | None:
        if not self._message:
            return None
        return {**self._message, "content": [self._whole(index) for index in self._blocks]}

    def _whole(self, index: int) -> Json:
        texts = {name: str(text) for name, text in self._texts.get(index, {}).items()}
        arguments = texts.pop("partial_json", "")
        block = {**self._blocks[index], **texts}
        if not arguments:
            return block
        value = read_json(arguments)
        return {**block, "input": arguments if value is None else value}


_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class Messages(TranslatedDialect):
    """`POST /messages`."""

    @override
    def read_count(self, raw: bytes) -> Json:
        return read_model_request(raw, "messages", list, "a list")

    @override
    def prompt_to_chat(self, request: Json) -> Json:
        return chat_request(request)

    @override
    def to_chat(self, request: Json) -> Json:
        return with_prefill(chat_request(request))

    @override
    def from_chat(self, reply: Json, request: Json) -> Json:
        choice = cast(Json, reply["choices"][0])
        message = object_in(choice, "message")
        called, refused = bool(message.get("tool_calls")), bool(message.get("refusal"))
        reason, sequence = stop_reason(choice, request, called=called, refused=refused)
        return message_of(reply, blocks_of(message, reply.get("id")), reason, sequence, reply.get("usage"))

    @override
    def write_stream(self, request: Json) -> StreamWriter:
        return MessageEvents(request)

    @override
    def failure(self, failed: CallFailed) -> JsonReply:
        if failed.upstream_error is not None and self.has_form_of(failed.upstream_error):
            return JsonReply(failed.status, failed.upstream_error, failed.headers)
        never = {"x-should-retry": "false"} if failed.status == 501 else {}  # the client library tries any 5xx again
        return json_reply(_error(failed), failed.status, {**failed.headers, **never})

    @override
    def has_form_of(self, error: bytes) -> bool:
        words = read_json(error) or {}
        return words.get("type") == "error" and bool(object_in(words, "error").get("type"))

    @override
    def stream_failure(self, failed: CallFailed, sent: int) -> bytes:
        if failed.upstream_error is not None and self.has_form_of(failed.upstream_error):
            return event("error", read_json(failed.upstream_error) or {})
        return event("error", _error(failed))


def _error(failed: CallFailed) -> Json:
    kind = _ERRORS.get(failed.status) or ("api_error" if failed.status >= 500 else "invalid_request_error")
    words = read_json(failed.upstream_error) if failed.upstream_error else None
    message = object_in(words or {}, "error").get("message")  # the server's own where it has one
    error: Json = {"type": kind, "message": message if isinstance(message, str) else failed.message}
    if failed.code == THREAD_REFUSED:
        error["details"] = {"error_code": failed.code}
    return {"type": "error", "error": error}
