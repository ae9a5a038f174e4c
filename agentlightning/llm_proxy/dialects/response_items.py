"""A chat message as the items of a response, with the response around them; and a response as a chat reply."""

from __future__ import annotations

from typing import Any, cast

from agentlightning.llm_proxy.dialects.base import Json, object_in, objects
from agentlightning.llm_proxy.dialects.message_parts import thought_in
from agentlightning.llm_proxy.dialects.tool_calls import ToolCall, tool_calls_of

_ECHOED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "metadata", "previous_response_id", "prompt_cache_key"),
    *("safety_identifier", "temperature", "top_p", "user"),
)
_CUT = {"length": "max_output_tokens", "content_filter": "content_filter"}
_PREFIX = {"reasoning": "rs", "message": "msg", "refusal": "msg", "function_call": "fc"}
_PART = {"reasoning": "reasoning_text", "message": "output_text", "refusal": "refusal"}


def item_of(
    kind: str, reply_id: Any, place: int, text: str = "", call: ToolCall | None = None, status: str = "completed"
) -> Json:
    """Return one item; `place` is its index in the output. One without text is empty, as a stream begins it."""
    head: Json = {"id": f"{_PREFIX[kind]}_{reply_id}_{place}", "type": "message" if kind == "refusal" else kind}
    if call is not None:
        return {**head, "call_id": call.id, "name": call.name, "arguments": text, "status": status}
    parts = [part_of(kind, text)] if text or (kind == "message" and status != "in_progress") else []
    if kind == "reasoning":
        return {**head, "summary": [], "content": parts, "status": status}
    return {**head, "role": "assistant", "status": status, "content": parts}


def part_of(kind: str, text: str) -> Json:
    """Return the one part of an item that holds its text."""
    if kind == "refusal":
        return {"type": "refusal", "refusal": text}
    extra: Json = {"annotations": [], "logprobs": []} if kind == "message" else {}
    return {"type": _PART[kind], "text": text, **extra}


def last_status(finish_reason: Any) -> str:
    """Return the status of the last item of a reply, and of the response itself."""
    return "incomplete" if finish_reason in _CUT else "completed"


def items_of(message: Json, reply_id: Any, finish_reason: Any) -> list[Json]:
    """Return the items of a whole message: thoughts, words, tool calls."""
    texts = {"reasoning": thought_in(message), "message": message.get("content"), "refusal": message.get("refusal")}
    said: list[tuple[str, str, ToolCall | None]] = [(kind, text, None) for kind, text in texts.items() if text]
    said += [("function_call", call.arguments, call) for call in tool_calls_of(message, reply_id)]
    last = last_status(finish_reason)
    statuses = ["completed"] * (len(said) - 1) + [last]
    return [
        item_of(kind, reply_id, place, text, call, statuses[place])
        for place, (kind, text, call) in enumerate(said or [("message", "", None)])
    ]


def response_of(request: Json, reply: Json, items: list[Json], finish_reason: Any) -> Json:
    """Return the response; `finish_reason` None is one that is still being made."""
    why = _CUT.get(str(finish_reason))
    reasoning = object_in(request, "reasoning")
    return {
        "id": reply.get("id"),
        "object": "response",
        "created_at": reply.get("created") or 0,
        "status": "in_progress" if finish_reason is None else last_status(finish_reason),
        "background": False,
        "error": None,
        "incomplete_details": {"reason": why} if why else None,
        "model": reply.get("model"),
        "output": items,
        **{name: request.get(name) for name in _ECHOED},
        "parallel_tool_calls": request.get("parallel_tool_calls", True),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "store": False,
        "text": request.get("text") or {"format": {"type": "text"}},
        "tool_choice": request.get("tool_choice") or "auto",
        "tools": request.get("tools") or [],
        "truncation": "disabled",
        "usage": usage_of(reply.get("usage")),
    }


def usage_of(usage: Any) -> Json | None:
    """Return the tokens used; None where the server says nothing."""
    if not isinstance(usage, dict):
        return None
    fields = cast(Json, usage)
    prompt, completion = fields.get("prompt_tokens") or 0, fields.get("completion_tokens") or 0
    cached = object_in(fields, "prompt_tokens_details").get("cached_tokens") or 0
    thought = object_in(fields, "completion_tokens_details").get("reasoning_tokens") or 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": fields.get("total_tokens") or prompt + completion,
    }


def chat_of(response: Json) -> Json:
    """Return a response in the shape of a chat completion, for the record."""
    items = objects(response.get("output"))
    said: Json = {"role": "assistant", "content": _texts(items, "message", "text") or None}
    for kind, part, name in (("message", "refusal", "refusal"), ("reasoning", "text", "reasoning_content")):
        if text := _texts(items, kind, part):
            said[name] = text
    calls = [item for item in items if item.get("type") == "function_call"]
    if calls:
        functions = [{name: call.get(name) for name in ("name", "arguments")} for call in calls]
        ids = [call.get("call_id") for call in calls]
        said["tool_calls"] = [{"id": id_, "function": function} for id_, function in zip(ids, functions, strict=True)]
    why = object_in(response, "incomplete_details").get("reason")
    reason = {cut: name for name, cut in _CUT.items()}.get(str(why), "tool_calls" if calls else "stop")
    usage = object_in(response, "usage")
    counts = {
        "prompt_tokens": usage.get("input_tokens") or 0,
        "completion_tokens": usage.get("output_tokens") or 0,
        "total_tokens": usage.get("total_tokens") or 0,
    }
    choice = {"index": 0, "message": said, "finish_reason": reason}
    return {"id": response.get("id"), "model": response.get("model"), "choices": [choice], "usage": counts}


def _texts(items: list[Json], kind: str, name: str) -> str:
    parts = [part for item in items if item.get("type") == kind for part in objects(item.get("content"))]
    return "".join(str(part.get(name) or "") for part in parts)
