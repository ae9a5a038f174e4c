"""Chat replies as OpenAI's responses, whole or as a stream of events; and responses as chat replies, for the record.

In a stream one item follows the other, each added, filled and done.
Source: https://platform.openai.com/docs/api-reference/responses-streaming.
"""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import override

from agentlightning.llm_proxy.access.limits import count_of
from agentlightning.llm_proxy.dialects.base import StreamWriter, event
from agentlightning.llm_proxy.dialects.chat import thought_in
from agentlightning.llm_proxy.dialects.json_values import Json, is_object, object_in, objects, read_json, text_of
from agentlightning.llm_proxy.dialects.pieces import Text
from agentlightning.llm_proxy.dialects.responses.requests import AgentTool, agent_tools
from agentlightning.llm_proxy.dialects.sealed import sealed
from agentlightning.llm_proxy.dialects.tool_calls import MessageToolCall, ToolCallStream, tool_calls_of

_ECHOED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "metadata", "previous_response_id", "prompt_cache_key"),
    *("safety_identifier", "temperature", "top_p", "user"),
)
_CUT = {"length": "max_output_tokens", "content_filter": "content_filter"}
_PREFIX = {"reasoning": "rs", "message": "msg", "refusal": "msg", "function_call": "fc"}
NO_TOOLS: Mapping[str, AgentTool] = {}
_PART = {"reasoning": "reasoning_text", "message": "output_text", "refusal": "refusal"}
"""Kinds of items that have a part with a text: the type of the part, and the name of the events that fill it."""


def item_of(
    kind: str,
    reply_id: object,
    place: int,
    text: str = "",
    call: MessageToolCall | None = None,
    status: str = "completed",
    tools: Mapping[str, AgentTool] = NO_TOOLS,
) -> Json:
    """Return one item; `place` is its index in the output. One without text is empty, as a stream begins it."""
    head: Json = {"id": f"{_PREFIX[kind]}_{reply_id}_{place}", "type": "message" if kind == "refusal" else kind}
    if call is not None:
        tool = tools.get(call.name) or AgentTool(call.name)
        named: Json = {"call_id": call.id, "name": tool.name}
        named.update({"namespace": tool.space} if tool.space is not None else {})
        if tool.is_custom:
            own = {"id": f"ctc_{reply_id}_{place}", "type": "custom_tool_call"}
            return {**own, **named, "input": free_text(text), "status": status}
        return {**head, **named, "arguments": text, "status": status}
    parts = [part_of(kind, text)] if text or (kind == "message" and status != "in_progress") else []
    if kind == "reasoning":
        kept = {"encrypted_content": sealed(text)} if text else {}
        return {**head, "summary": [], "content": parts, **kept, "status": status}
    return {**head, "role": "assistant", "status": status, "content": parts}


def free_text(arguments: str) -> str:
    """Return what is said to a custom tool; arguments of another form as the model wrote them."""
    said = (read_json(arguments) or {}).get("input")
    return said if isinstance(said, str) else arguments


def part_of(kind: str, text: str) -> Json:
    """Return the one part of an item that holds its text."""
    if kind == "refusal":
        return {"type": "refusal", "refusal": text}
    extra: Json = {"annotations": [], "logprobs": []} if kind == "message" else {}
    return {"type": _PART[kind], "text": text, **extra}


def last_status(finish_reason: object) -> str:
    """Return the status of the last item of a reply, and of the response itself."""
    return "incomplete" if str(finish_reason) in _CUT else "completed"


def items_of(
    message: Json, reply_id: object, finish_reason: object, tools: Mapping[str, AgentTool] = NO_TOOLS
) -> list[Json]:
    """Return the items of a whole message: thoughts, words, tool calls; `tools` as `requests.agent_tools` gives."""
    texts = {"reasoning": thought_in(message), "message": text_of(message.get("content"))}
    texts["refusal"] = text_of(message.get("refusal"))
    said: list[tuple[str, str, MessageToolCall | None]] = [(kind, text, None) for kind, text in texts.items() if text]
    said += [("function_call", call.arguments, call) for call in tool_calls_of(message, reply_id)]
    last = last_status(finish_reason)
    statuses = ["completed"] * (len(said) - 1) + [last]
    return [
        item_of(kind, reply_id, place, text, call, statuses[place], tools)
        for place, (kind, text, call) in enumerate(said or [("message", "", None)])
    ]


def response_of(request: Json, reply: Json, items: list[Json], finish_reason: object) -> Json:
    """Return the response; `finish_reason` None is one that is still being made."""
    why = _CUT.get(str(finish_reason))
    reasoning = object_in(request, "reasoning")
    return {
        "id": text_of(reply.get("id")),
        "object": "response",
        "created_at": count_of(reply.get("created")),
        "status": "in_progress" if finish_reason is None else last_status(finish_reason),
        "background": False,
        "error": None,
        "incomplete_details": {"reason": why} if why else None,
        "model": text_of(reply.get("model")),
        "output": items,
        **{name: request.get(name) for name in _ECHOED},
        "parallel_tool_calls": request.get("parallel_tool_calls", True),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "store": request.get("store") is not False,
        "text": request.get("text") or {"format": {"type": "text"}},
        "tool_choice": request.get("tool_choice") or "auto",
        "tools": request.get("tools") or [],
        "truncation": "disabled",
        "usage": usage_of(reply.get("usage")),
    }


def usage_of(usage: object) -> Json | None:
    """Return the tokens used; None where the server says nothing."""
    if not is_object(usage):
        return None
    prompt, completion = count_of(usage.get("prompt_tokens")), count_of(usage.get("completion_tokens"))
    cached = count_of(object_in(usage, "prompt_tokens_details").get("cached_tokens"))
    thought = count_of(object_in(usage, "completion_tokens_details").get("reasoning_tokens"))
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": count_of(usage.get("total_tokens")) or prompt + completion,
    }


def chat_of(response: Json) -> Json:
    """Return a response in the shape of a chat completion, for the record."""
    items = objects(response.get("output"))
    said: Json = {"role": "assistant", "content": _texts(items, "message", "text") or None}
    for kind, part, name in (("message", "refusal", "refusal"), ("reasoning", "text", "reasoning_content")):
        if text := _texts(items, kind, part):
            said[name] = text
    if calls := [item for item in items if item.get("type") in ("function_call", "custom_tool_call")]:
        said["tool_calls"] = [
            {
                "id": call.get("call_id"),
                "function": {"name": call.get("name"), "arguments": call.get("arguments", call.get("input"))},
            }
            for call in calls
        ]
    why = object_in(response, "incomplete_details").get("reason")
    reason = {cut: name for name, cut in _CUT.items()}.get(str(why), "tool_calls" if calls else "stop")
    usage = object_in(response, "usage")
    counts = {
        "prompt_tokens": count_of(usage.get("input_tokens")),
        "completion_tokens": count_of(usage.get("output_tokens")),
        "total_tokens": count_of(usage.get("total_tokens")),
    }
    choice = {"index": 0, "message": said, "finish_reason": reason}
    return {"id": response.get("id"), "model": response.get("model"), "choices": [choice], "usage": counts}


def _texts(items: list[Json], kind: str, name: str) -> str:
    parts = [part for item in items if item.get("type") == kind for part in objects(item.get("content"))]
    return "".join(str(part.get(name) or "") for part in parts)


class ResponseEvents(StreamWriter):
    """Writes the events of one response."""

    def __init__(self, request: Json) -> None:
        self._request = request
        self._tools = agent_tools(request)
        self._reply: Json = {}
        self._number = 0
        self._items: list[Json] = []
        self._open: tuple[str, int] | None = None
        """The item that is being filled: its kind, and for a tool call its number."""
        self._text = Text()
        self._call: MessageToolCall | None = None
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
            if choice.get("index", 0) != 0:
                continue
            delta = object_in(choice, "delta")
            texts = {"reasoning": thought_in(delta), "message": text_of(delta.get("content"))}
            texts["refusal"] = text_of(delta.get("refusal"))
            for kind, text in texts.items():
                if text:
                    events += self._in_item(kind, 0) + self._fill(text)
            events += self._function_calls(self._calls.feed(delta))
            if choice.get("finish_reason") is not None:
                self._finish_reason = str(choice["finish_reason"])
        return events

    @override
    def end(self) -> bytes:
        events = self._function_calls(self._calls.end())
        if not self._items and self._open is None:  # an empty answer is a message without words
            events += self._in_item("message", 0)
        events += self._close(last_status(self._finish_reason))
        self.reply = response = response_of(self._request, self._reply, self._items, self._finish_reason)
        return events + self._event(f"response.{response['status']}", {"response": response})

    def _function_calls(self, pieces: list[tuple[int, MessageToolCall]]) -> bytes:
        events = b""
        for number, call in pieces:
            events += self._in_item("function_call", number, call)
            if call.arguments:
                events += self._fill(call.arguments)
        return events

    def _in_item(self, kind: str, which: int, call: MessageToolCall | None = None) -> bytes:
        """Go on with the open item if it is this one, else end it and add this one."""
        if self._open == (kind, which):
            return b""
        events = b"" if call is not None else self._function_calls(self._calls.end())
        events += self._close("completed")
        self._open, self._text, self._call = (kind, which), Text(), call
        events += self._event("response.output_item.added", {**self._index, "item": self._item("in_progress")})
        if call is None:
            events += self._event("response.content_part.added", {**self._place, "part": part_of(kind, "")})
        return events

    def _fill(self, text: str) -> bytes:
        assert self._open is not None
        self._text.add(text)
        if self._is_custom:  # its text is known once the arguments are whole
            return b""
        if self._call is not None:
            place = {**self._index, "item_id": self._name}
            return self._event("response.function_call_arguments.delta", {**place, "delta": text})
        kind = self._open[0]
        return self._event(f"response.{_PART[kind]}.delta", {**self._place, "delta": text, **_extra(kind)})

    def _close(self, status: str) -> bytes:
        if self._open is None:
            return b""
        kind = self._open[0]
        if self._is_custom:
            said, fields = free_text(str(self._text)), {**self._index, "item_id": self._name}
            events = self._event("response.custom_tool_call_input.delta", {**fields, "delta": said})
            events += self._event("response.custom_tool_call_input.done", {**fields, "input": said})
        elif self._call is not None:
            fields = {**self._index, "item_id": self._name, "name": self._call.name, "arguments": str(self._text)}
            events = self._event("response.function_call_arguments.done", fields)
        else:
            text = {"refusal" if kind == "refusal" else "text": str(self._text), **_extra(kind)}
            events = self._event(f"response.{_PART[kind]}.done", {**self._place, **text})
            events += self._event("response.content_part.done", {**self._place, "part": part_of(kind, str(self._text))})
        item = self._item(status)
        events += self._event("response.output_item.done", {**self._index, "item": item})
        self._items.append(item)
        self._open = self._call = None
        return events

    @property
    def _is_custom(self) -> bool:
        """True if the open item is a call of a custom tool."""
        return self._call is not None and self._call.name in self._tools and self._tools[self._call.name].is_custom

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
        text = "" if status == "in_progress" else str(self._text)
        return item_of(self._open[0], self._reply.get("id"), len(self._items), text, self._call, status, self._tools)

    def _event(self, kind: str, fields: Json) -> bytes:
        self._number += 1
        return event(kind, {"sequence_number": self._number - 1, **fields})


def _extra(kind: str) -> Json:
    return {"logprobs": []} if kind == "message" else {}
