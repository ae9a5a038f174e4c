"""A chat stream as the events of OpenAI's responses: one item after the other, each added, filled and done.

Source: https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

from typing_extensions import override

from agentlightning.llm_proxy.dialects.base import Json, StreamWriter, json_bytes, object_in, objects
from agentlightning.llm_proxy.dialects.message_parts import thought_in
from agentlightning.llm_proxy.dialects.response_items import item_of, last_status, part_of, response_of
from agentlightning.llm_proxy.dialects.tool_calls import ToolCall, ToolCallStream
from agentlightning.llm_proxy.sse import frame_of

_TEXT = {"message": "output_text", "refusal": "refusal", "reasoning": "reasoning_text"}
"""Kinds of items that have a part with a text, and the name of the events that fill it."""


def event(kind: str, fields: Json) -> bytes:
    """Return one event."""
    return frame_of(json_bytes({"type": kind, **fields}), kind)


class ResponseEvents(StreamWriter):
    """Writes the events of one response."""

    def __init__(self, request: Json) -> None:
        self._request = request
        self._reply: Json = {}
        self._number = 0
        self._items: list[Json] = []
        self._open: tuple[str, int] | None = None
        """The item that is being filled: its kind, and for a tool call its number."""
        self._text = ""
        self._call: ToolCall | None = None
        self._calls = ToolCallStream()
        self._finish_reason = "stop"

    @override
    def feed(self, chunk: Json) -> bytes:
        events = b""
        if not self._reply:
            self._reply = {name: chunk.get(name) for name in ("id", "created", "model")}
            self._calls.reply_id = chunk.get("id")
            begun = {"response": response_of(self._request, self._reply, [], None)}
            events += self._event("response.created", begun) + self._event("response.in_progress", begun)
        if chunk.get("usage") is not None:
            self._reply["usage"] = chunk["usage"]
        for choice in objects(chunk.get("choices")):
            if choice.get("index", 0) == 0:
                events += self._delta(object_in(choice, "delta"))
                if choice.get("finish_reason") is not None:
                    self._finish_reason = str(choice["finish_reason"])
        return events

    @override
    def end(self) -> bytes:
        events = self._function_calls(self._calls.end())
        if not self._items and self._open is None:  # an empty answer is a message without words
            events += self._in_item("message", 0)
        events += self._close(last_status(self._finish_reason))
        response = response_of(self._request, self._reply, self._items, self._finish_reason)
        return events + self._event(f"response.{response['status']}", {"response": response})

    def _delta(self, delta: Json) -> bytes:
        events = b""
        texts = {"reasoning": thought_in(delta), "message": delta.get("content"), "refusal": delta.get("refusal")}
        for kind, text in texts.items():
            if text:
                events += self._in_item(kind, 0) + self._fill(text)
        return events + self._function_calls(self._calls.feed(delta))

    def _function_calls(self, pieces: list[tuple[int, ToolCall]]) -> bytes:
        events = b""
        for number, call in pieces:
            events += self._in_item("function_call", number, call)
            if call.arguments:
                events += self._fill(call.arguments)
        return events

    def _in_item(self, kind: str, which: int, call: ToolCall | None = None) -> bytes:
        """Go on with the open item if it is this one, else end it and add this one."""
        if self._open == (kind, which):
            return b""
        events = b"" if call is not None else self._function_calls(self._calls.end())
        events += self._close("completed")
        self._open, self._text, self._call = (kind, which), "", call
        events += self._event("response.output_item.added", {**self._index, "item": self._item("in_progress")})
        if call is None:
            events += self._event("response.content_part.added", {**self._place, "part": part_of(kind, "")})
        return events

    def _fill(self, text: str) -> bytes:
        assert self._open is not None
        self._text += text
        if self._call is not None:
            place = {**self._index, "item_id": self._name}
            return self._event("response.function_call_arguments.delta", {**place, "delta": text})
        kind = self._open[0]
        return self._event(f"response.{_TEXT[kind]}.delta", {**self._place, "delta": text, **_extra(kind)})

    def _close(self, status: str) -> bytes:
        if self._open is None:
            return b""
        kind = self._open[0]
        if self._call is not None:
            fields = {**self._index, "item_id": self._name, "name": self._call.name, "arguments": self._text}
            events = self._event("response.function_call_arguments.done", fields)
        else:
            text = {"refusal" if kind == "refusal" else "text": self._text, **_extra(kind)}
            events = self._event(f"response.{_TEXT[kind]}.done", {**self._place, **text})
            events += self._event("response.content_part.done", {**self._place, "part": part_of(kind, self._text)})
        item = self._item(status)
        events += self._event("response.output_item.done", {**self._index, "item": item})
        self._items.append(item)
        self._open = self._call = None
        return events

    @property
    def _name(self) -> str:
        return self._item("in_progress")["id"]

    @property
    def _index(self) -> Json:
        return {"output_index": len(self._items)}

    @property
    def _place(self) -> Json:
        return {"item_id": self._name, "output_index": len(self._items), "content_index": 0}

    def _item(self, status: str) -> Json:
        assert self._open is not None
        text = "" if status == "in_progress" else self._text
        return item_of(self._open[0], self._reply.get("id"), len(self._items), text, self._call, status)

    def _event(self, kind: str, fields: Json) -> bytes:
        self._number += 1
        return event(kind, {"sequence_number": self._number - 1, **fields})


def _extra(kind: str) -> Json:
    return {"logprobs": []} if kind == "message" else {}
