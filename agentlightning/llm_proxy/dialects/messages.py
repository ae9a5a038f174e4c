"""Anthropic's messages as agents speak them: what is asked, answered and refused, in the dialect's own form.

Requests are translated in `message_requests`, replies in `message_parts`, streams in `message_events`; a server that
speaks the dialect itself is spoken to in `message_native`. Arguments of a tool call that are no JSON object arrive as
`{"invalid_json": "..."}` in a reply of one piece, since the block can hold nothing else.
"""

from __future__ import annotations

from typing import cast

from typing_extensions import override

from agentlightning.llm_proxy.dialects.base import (
    Json,
    StreamWriter,
    TranslatedDialect,
    checked,
    object_in,
    read_json,
    read_json_object,
)
from agentlightning.llm_proxy.dialects.message_events import MessageEvents, event
from agentlightning.llm_proxy.dialects.message_native import NativeMessages
from agentlightning.llm_proxy.dialects.message_parts import blocks_of, stop_reason, usage_of
from agentlightning.llm_proxy.dialects.message_requests import THREAD_REFUSED, chat_request, refuse_prefill
from agentlightning.llm_proxy.replies import CallFailed, Reply, json_reply

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

    route = "messages"
    kind = "chat"
    native = NativeMessages()
    forwarded = native.forwarded

    @override
    def read_request(self, raw: bytes) -> Json:
        return self.native.read_request(raw)

    def read_count(self, raw: bytes) -> Json:
        """Return a request to count the tokens of a prompt: the same without `max_tokens`.

        Raises:
            CallFailed: 400 that names the field that is wrong.
        """
        request = read_json_object(raw)
        checked(request, "model", str, "a string")
        checked(request, "messages", list, "a list")
        return request

    def count_to_chat(self, request: Json) -> Json:
        """Return what the prompt is made of in chat completions; it may end with a message of the assistant.

        Raises:
            CallFailed: as `to_chat`.
        """
        chat = chat_request(request)
        shown = {name: chat[name] for name in ("messages", "tools", "chat_template_kwargs") if name in chat}
        ended = bool(chat["messages"]) and chat["messages"][-1]["role"] == "assistant"
        return {**shown, "add_generation_prompt": not ended}

    @override
    def to_chat(self, request: Json) -> Json:
        chat = chat_request(request)
        refuse_prefill(request)
        return chat

    @override
    def from_chat(self, reply: Json, request: Json) -> Json:
        choice = cast(Json, reply["choices"][0])
        message = object_in(choice, "message")
        called, refused = bool(message.get("tool_calls")), bool(message.get("refusal"))
        reason, sequence = stop_reason(choice, request, called=called, refused=refused)
        return {
            "id": reply.get("id"),
            "type": "message",
            "role": "assistant",
            "model": reply.get("model"),
            "content": blocks_of(message, reply.get("id")),
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage_of(reply.get("usage")),
        }

    @override
    def write_stream(self, request: Json) -> StreamWriter:
        return MessageEvents(request)

    @override
    def failure(self, failed: CallFailed) -> Reply:
        if failed.own_words is not None and self.has_form_of(failed.own_words):
            return Reply(failed.status, failed.own_words, failed.headers)
        never = {"x-should-retry": "false"} if failed.status == 501 else {}  # the client library tries any 5xx again
        return json_reply(_error(failed), failed.status, {**failed.headers, **never})

    @override
    def has_form_of(self, error: bytes) -> bool:
        words = read_json(error) or {}
        return words.get("type") == "error" and bool(object_in(words, "error").get("type"))

    @override
    def stream_failure(self, failed: CallFailed, sent: int) -> bytes:
        if failed.own_words is not None and self.has_form_of(failed.own_words):
            return event("error", read_json(failed.own_words) or {})
        return event("error", _error(failed))


def _error(failed: CallFailed) -> Json:
    kind = _ERRORS.get(failed.status) or ("api_error" if failed.status >= 500 else "invalid_request_error")
    error: Json = {"type": kind, "message": _said(failed)}
    if failed.code == THREAD_REFUSED:
        error["details"] = {"error_code": failed.code}
    return {"type": "error", "error": error}


def _said(failed: CallFailed) -> str:
    """Return the server's own message where it has one, else ours."""
    words = read_json(failed.own_words) if failed.own_words else None
    message = object_in(words or {}, "error").get("message")
    return message if isinstance(message, str) else failed.message
