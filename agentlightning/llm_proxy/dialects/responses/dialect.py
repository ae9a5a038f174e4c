"""OpenAI's responses: the dialect of agents, and the wire dialect of servers that speak it themselves.

Requests are translated in `requests`, replies and streams in `replies`. A server that speaks the dialect gets the
request as it is, gives no tokens, and its reply is read for the record.
"""

from __future__ import annotations

import json
from types import NoneType
from typing import cast

from typing_extensions import override

from agentlightning.llm_proxy.dialects.base import (
    EventReader,
    StreamReader,
    StreamWriter,
    TranslatedDialect,
    WireDialect,
    event,
    openai_error,
)
from agentlightning.llm_proxy.dialects.json_values import Json, object_in, objects, read_json, read_model_request
from agentlightning.llm_proxy.dialects.responses.replies import ResponseEvents, chat_of, items_of, response_of
from agentlightning.llm_proxy.dialects.responses.requests import agent_tools, chat_request
from agentlightning.llm_proxy.replies import CallFailed

_WHOLE = ("response.completed", "response.incomplete")
_ENDS = ("completed", "incomplete", "failed")
FAILED = ("error", "response.failed")


class NativeResponses(WireDialect):
    """`POST /responses` at a server that speaks it."""

    route = "responses"
    kind = "chat"
    reply_form = "JSON with the object 'response'"
    limit_names = ("max_output_tokens",)
    forwarded = ("openai-beta",)

    @override
    def read_request(self, raw: bytes, model: str | None = None) -> Json:
        return read_model_request(raw, "input", (str, list), "a string or a list of items", model)

    @override
    def prompt_of(self, request: Json) -> list[object]:
        given, instructions = request["input"], request.get("instructions")
        said: list[object] = [{"role": "system", "content": instructions}] if instructions else []
        if isinstance(given, str):
            return [*said, {"role": "user", "content": given}]
        for item in objects(given):
            kind = item.get("type") or "message"
            if kind == "message":
                said.append({"role": item.get("role"), "content": item.get("content")})
            else:
                role = "tool" if str(kind).endswith("_output") else "assistant"
                said.append({"role": role, "content": json.dumps(item, ensure_ascii=False)})
        return said

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
        begun: Json = {"response": {**reply, "output": [], "status": "in_progress"}}
        events = [("response.created", begun)]
        for index, item in enumerate(objects(reply.get("output"))):
            place: Json = {"output_index": index, "item": item}
            events += [("response.output_item.added", place), ("response.output_item.done", place)]
        status = reply.get("status")
        events.append((f"response.{status if status in _ENDS else 'completed'}", {"response": reply}))
        return b"".join(event(kind, {"sequence_number": n, **fields}) for n, (kind, fields) in enumerate(events))


class _ResponseStream(EventReader):
    """One stream of events. The last one holds the whole response; until then its items are kept as they are done."""

    errors = FAILED

    def __init__(self) -> None:
        self._response: Json = {}
        self._items: list[Json] = []

    @override
    def collect(self, fields: Json) -> None:
        kind = fields.get("type")
        if kind == "response.output_item.done":
            self._items.append(object_in(fields, "item"))
        if response := object_in(fields, "response"):
            self._response = response
        self.ended = kind in _WHOLE

    @override
    def reply(self) -> Json | None:
        if not self._response:
            return None
        return self._response if self.ended else {**self._response, "output": self._items}


class Responses(TranslatedDialect):
    """`POST /responses`."""

    @override
    def read_count(self, raw: bytes) -> Json:
        request = read_model_request(raw, "input", (str, list, NoneType), "a string or a list of items")
        return {**request, "input": [] if request.get("input") is None else request["input"]}

    @override
    def to_chat(self, request: Json) -> Json:
        return chat_request(request)

    @override
    def from_chat(self, reply: Json, request: Json) -> Json:
        choice = cast(Json, reply["choices"][0])
        reason = choice.get("finish_reason") or "stop"
        items = items_of(object_in(choice, "message"), reply.get("id"), reason, agent_tools(request))
        return response_of(request, reply, items, reason)

    @override
    def write_stream(self, request: Json) -> StreamWriter:
        return ResponseEvents(request)

    @override
    def stream_failure(self, failed: CallFailed, sent: int) -> bytes:
        own = read_json(failed.upstream_error) if failed.upstream_error else None
        if own is not None and own.get("type") in FAILED:
            return event(own["type"], own)
        error = openai_error(failed)
        said = {name: error[name] for name in ("code", "message", "param")}
        return event("error", {"sequence_number": sent, **said, "error": error})
