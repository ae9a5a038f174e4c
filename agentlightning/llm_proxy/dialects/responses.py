"""OpenAI's responses as agents speak them: what is asked, answered and refused, in the dialect's own form.

Requests are translated in `response_requests`, replies in `response_items`, streams in `response_events`; a server that
speaks the dialect itself is spoken to in `response_native`.
"""

from __future__ import annotations

from typing import cast

from typing_extensions import override

from agentlightning.llm_proxy.dialects.base import (
    Json,
    StreamWriter,
    TranslatedDialect,
    object_in,
    openai_error,
    read_json,
)
from agentlightning.llm_proxy.dialects.response_events import ResponseEvents, event
from agentlightning.llm_proxy.dialects.response_items import items_of, response_of
from agentlightning.llm_proxy.dialects.response_native import NativeResponses
from agentlightning.llm_proxy.dialects.response_requests import chat_request
from agentlightning.llm_proxy.replies import CallFailed


class Responses(TranslatedDialect):
    """`POST /responses`."""

    route = "responses"
    kind = "chat"
    native = NativeResponses()
    forwarded = native.forwarded

    @override
    def read_request(self, raw: bytes) -> Json:
        return self.native.read_request(raw)

    @override
    def to_chat(self, request: Json) -> Json:
        return chat_request(request)

    @override
    def from_chat(self, reply: Json, request: Json) -> Json:
        choice = cast(Json, reply["choices"][0])
        reason = choice.get("finish_reason") or "stop"
        return response_of(request, reply, items_of(object_in(choice, "message"), reply.get("id"), reason), reason)

    @override
    def write_stream(self, request: Json) -> StreamWriter:
        return ResponseEvents(request)

    @override
    def stream_failure(self, failed: CallFailed, sent: int) -> bytes:
        own = read_json(failed.own_words) if failed.own_words else None
        if own is not None and isinstance(own.get("type"), str):
            return event(own["type"], own)
        error = openai_error(failed)
        said = {name: error[name] for name in ("code", "message", "param")}
        return event("error", {"sequence_number": sent, **said, "error": error})
