"""Anthropic's messages. In a translation to a chat completion, each field of a request is read, or refused by name.

A server that supports the dialect gets the request unchanged, and its reply, without tokens, is read for the record. In
a translated reply in one piece, arguments of a tool call that are not a JSON object become `{"invalid_json": "..."}`,
because the block must contain an object; in a stream they are passed on unchanged.

Sources: https://platform.claude.com/docs/en/api/messages, versions 2023-06-01 and 2026-10-21, and .../streaming.
Differences:

- `temperature`, `top_p` and `top_k`, which the second version does not have, are accepted in both.
- Without effect, since they do not change the reply: `service_tier`, `speed`, `cache_control` in any place,
  `eager_input_streaming` of a tool, the `signature` of a thought, fields that the client library adds to a parsed block
  (`parsed_output`). A header `anthropic-beta` only enables fields; each field is handled separately.
- Ignored, with one warning in the log: limits and compaction of the context, which is always complete here
  (`context_management`, `compaction`), location and owner of the request (`inference_geo`, `workspace_id`,
  `user_profile_id`, `billing_policy`, `container` without skills), actions after a refusal (`fallbacks`,
  `fallback_credit_token`), `diagnostics`, `betas`, and `defer_loading` of a tool: all tools are shown from the start,
  and a `tool_reference` is the tool's name. `redacted_thinking` of another server cannot be read and is excluded.
- Tools that only Anthropic's server can run (`server_tools`) are not shown to the model, with one warning in the log.
- A value that requests the default behaviour (a caller that is `direct`, a tool that is `custom`) is accepted.
- A thinking budget is limited only by `max_tokens`, and `display` hides no thoughts.
- An error flag of a tool's result becomes the word "Error:" before its text.
- A tool's result may contain images. A model server that does not support this returns its own error.
- A `document` of text and a `search_result` become text, their title first; without citations (`enabled` is false).
- A last message of the assistant (prefill) is continued by engines that support this (vLLM, SGLang), else refused.
- Consecutive turns of one role become one, as at Anthropic.
- In a translated stream, tool calls after the first one arrive when the reply continues with something else, or ends.
"""

from __future__ import annotations

import base64
import hmac
import json
import secrets
from collections.abc import Mapping
from copy import deepcopy
from itertools import groupby
from typing import Any

from typing_extensions import override

from agentlightning.llm_proxy.access.limits import count_of, shown
from agentlightning.llm_proxy.dialects.base import (
    EventReader,
    StreamReader,
    StreamWriter,
    TranslatedDialect,
    chat_record,
    event,
)
from agentlightning.llm_proxy.dialects.json_values import (
    Json,
    check_field,
    entries_of,
    fields_of,
    object_in,
    objects,
    read_json,
    text_of,
    wrong_type,
)
from agentlightning.llm_proxy.dialects.pieces import PartWriter, Text
from agentlightning.llm_proxy.dialects.translation import (
    AssistantTurn,
    Harmless,
    as_object,
    as_objects,
    is_run_by_server,
    named_function,
    note_ignored,
    refuse_unknown,
    server_tools,
    some_of,
    text_in,
    texts_joined,
    untranslatable,
    with_choice,
)
from agentlightning.llm_proxy.replies import CallFailed, JsonReply, json_reply

_VERSION = "2023-06-01"
_GROWS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
"""The types of deltas with a part of a text, each with the field that contains the part."""
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
_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
_FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}

SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
READ = ("messages", "system", "stop_sequences", "tools", "tool_choice", "thinking", "metadata", "output_config")
THREAD_REFUSED = "thread_unsupported_request"
"""The error code after which clients continue without a thread, with the complete conversation."""
WITHOUT_EFFECT = ("service_tier", "speed", "cache_control")
HARMLESS: Harmless = {
    "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "mcp_servers": ([],),
}
IGNORED = (
    *("context_management", "compaction", "inference_geo", "workspace_id", "user_profile_id", "billing_policy"),
    *("fallbacks", "fallback_credit_token", "diagnostics", "betas"),
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKS = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
_BLOCK = ("type", "cache_control")
_TEXT = (*_BLOCK, "text", "parsed_output")
_DIRECT: Harmless = {"caller": ({"type": "direct"},)}
_TOOL = ("type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming")
_HARMLESS_TOOL: Harmless = {"allowed_callers": (["direct"], []), "defer_loading": (False,), "input_examples": ([],)}


class Messages(TranslatedDialect):
    """`POST /messages`."""

    route = "messages"
    kind = "chat"
    prompt_field = ("messages", list, "a list")
    reply_form = "JSON with the type 'message' and a list 'content'"
    forwarded = ("anthropic-version", "anthropic-beta")

    @override
    def key_headers(self, api_key: str | None) -> dict[str, str]:
        return {"anthropic-version": _VERSION, **({"x-api-key": api_key} if api_key else {})}

    @override
    def read_request(self, raw: bytes, model: str | None = None) -> Json:
        request = super().read_request(raw, model)
        check_field(request, "max_tokens", int, "an integer")
        return request

    @override
    def prompt_of(self, request: Json) -> list[object]:
        system = request.get("system")
        return [*([{"role": "system", "content": system}] if system else []), *request["messages"]]

    @override
    def prompt_to_chat(self, request: Json) -> Json:
        return _chat_request(request)

    @override
    def to_chat(self, request: Json) -> Json:
        """Return the request as a chat completion; a last message of the assistant is continued (vLLM, SGLang)."""
        chat = _chat_request(request)
        if not chat["messages"] or chat["messages"][-1]["role"] != "assistant":
            return chat
        return {**chat, "add_generation_prompt": False, "continue_final_message": True}

    @override
    def write_stream(self, request: Json) -> StreamWriter:
        return _MessageEvents(request)

    @override
    def read_reply(self, raw: bytes) -> Json | None:
        reply = read_json(raw)
        usable = reply is not None and reply.get("type") == "message" and isinstance(reply.get("content"), list)
        return reply if usable else None

    @override
    def record_of(self, reply: Json) -> Json:
        blocks, usage = objects(reply.get("content")), object_in(reply, "usage")
        fields = {"content": _texts_of(blocks, "text"), "reasoning_content": _texts_of(blocks, "thinking")}
        calls: list[Json] = [
            {"id": block.get("id"), "name": block.get("name"), "arguments": block.get("input")}
            for block in blocks
            if block.get("type") == "tool_use"
        ]
        count_names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        prompt, completion = (
            sum(count_of(usage.get(name)) for name in count_names),
            count_of(usage.get("output_tokens")),
        )
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        reason = reply.get("stop_reason")
        return chat_record(reply, fields, calls, _FINISH_REASONS.get(str(reason), reason), counts)

    @override
    def read_stream(self, request: Json) -> StreamReader:
        return _MessageStream()

    @override
    def stream_of(self, reply: Json, request: Json) -> bytes:
        start: Json = {**reply, "content": [], "stop_reason": None, "stop_sequence": None}
        events = [event("message_start", {"message": start})]
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
        last = {name: reply.get(name) for name in ("stop_reason", "stop_sequence")}
        events.append(event("message_delta", {"delta": last, "usage": object_in(reply, "usage")}))
        return b"".join([*events, event("message_stop", {})])

    # --- errors --------------------------------------------------------------------------------------------------

    @override
    def failure(self, failed: CallFailed) -> JsonReply:
        reply = super().failure(failed)
        if failed.status == 501:  # the client library retries any 5xx
            return json_reply(self.error_of(failed), 501, {**failed.headers, "x-should-retry": "false"})
        return reply

    @override
    def error_of(self, failed: CallFailed) -> Json:
        kind = _ERRORS.get(failed.status) or ("api_error" if failed.status >= 500 else "invalid_request_error")
        words = read_json(failed.upstream_error) if failed.upstream_error else None
        message = object_in(words or {}, "error").get("message")  # the server's own, if it has one
        error: Json = {"type": kind, "message": message if isinstance(message, str) else failed.message}
        if failed.code == THREAD_REFUSED:
            error["details"] = {"error_code": failed.code}
        return {"type": "error", "error": error}

    @override
    def has_form_of(self, error: bytes) -> bool:
        words = read_json(error) or {}
        return words.get("type") == "error" and bool(object_in(words, "error").get("type"))

    @override
    def stream_failure(self, failed: CallFailed, sent: int) -> bytes:
        if failed.upstream_error is not None and self.has_form_of(failed.upstream_error):
            return event("error", read_json(failed.upstream_error) or {})
        return event("error", self.error_of(failed))


def check_prefill(chat: Json, *, goes_on: bool) -> None:
    """Check that a chat does not end with a message of the assistant, or that its engine continues one.

    Raises:
        CallFailed: 400, the engine would reply to that message.
    """
    if chat.get("continue_final_message") and not goes_on:
        why = "the engine would reply to the last message of the assistant instead of continuing it (prefill)"
        raise untranslatable("messages", why)


# --- requests --------------------------------------------------------------------------------------------------------


def _chat_request(request: Json) -> Json:
    if request.get("thread") is not None:
        text = "'thread' is not supported: the gateway stores nothing between calls. Send the complete conversation"
        raise CallFailed(400, text, param="thread", code=THREAD_REFUSED)
    refuse_unknown(request, (*SAME, *READ, *WITHOUT_EFFECT, "container"), harmless=HARMLESS, ignored=IGNORED)
    if (container := request.get("container")) is not None:  # tools of Anthropic's would run there; skills are refused
        if not isinstance(container, str):
            refuse_unknown(as_object(container, "container"), ("id",), "container.", {"skills": ([],)})
        note_ignored("container")
    chat = some_of(request, SAME)
    chat["messages"] = _messages(request["messages"])
    if request.get("system") is not None:
        chat["messages"].insert(0, {"role": "system", "content": _texts(request["system"], "system")})
    if request.get("stop_sequences"):
        chat["stop"] = entries_of(request["stop_sequences"])
        if not chat["stop"] or not all(isinstance(entry, str) for entry in chat["stop"]):
            raise wrong_type("stop_sequences", "a list of strings")
    tools: list[Json] = []
    for tool, place in as_objects(request.get("tools") or [], "tools"):
        if is_run_by_server(tool):
            continue
        if tool.get("type") not in (None, "custom"):
            why = f"only Anthropic's models know the tool {shown(tool['type'])}; define a tool with an 'input_schema'"
            raise untranslatable(f"{place}.type", why)
        refuse_unknown(tool, _TOOL, f"{place}.", _HARMLESS_TOOL, ("defer_loading",))
        schema = as_object(tool.get("input_schema"), f"{place}.input_schema")
        function = {"name": text_in(tool, "name", place), "parameters": schema}
        function.update(some_of(tool, ("description", "strict")))
        tools.append({"type": "function", "function": function})
    chat.update({"tools": tools} if tools else {})
    for name, read in _OBJECTS.items():
        if request.get(name) is not None:
            chat.update(read(as_object(request[name], name)))
    chat = with_choice(chat, server_tools(request))
    return {**chat, "stream_options": {"include_usage": True}} if chat.get("stream") else chat


def _texts(content: object, place: str) -> str:
    """Return a text, or the joined blocks of text."""
    if isinstance(content, str):
        return content
    return "\n\n".join(_text(block, where) for block, where in as_objects(content, place))


def _text(block: Json, place: str) -> str:
    if block.get("type") != "text":
        raise untranslatable(f"{place}.type", f"a block of type {shown(block.get('type'))} has no equivalent")
    refuse_unknown(block, _TEXT, f"{place}.", {"citations": ([],)})
    return text_in(block, "text", place)


def _messages(value: object) -> list[Json]:
    """Return the messages of a chat: consecutive turns of the user or the assistant are one turn."""
    messages: list[Json] = []
    for role, turns in groupby(_turns(value), key=lambda turn: turn[0]):
        if role == "system":
            messages += [{"role": role, "content": _texts(content, f"{place}.content")} for _, content, place in turns]
        elif role == "assistant":
            turn = AssistantTurn()
            for _, content, place in turns:
                _add_to_turn(turn, content, f"{place}.content")
            messages.append(turn.message)
        else:
            parts = list[Json]()
            for _, content, place in turns:
                results, other_parts = _user(content, f"{place}.content")
                if results and parts:
                    messages.append({"role": "user", "content": texts_joined(parts, "\n\n")})
                    parts = list[Json]()
                messages += results
                parts += other_parts
            if parts:
                messages.append({"role": "user", "content": texts_joined(parts, "\n\n")})
    return messages


def _turns(value: object) -> list[tuple[str, Any, str]]:
    """Return role, content and place of each message."""
    turns: list[tuple[str, Any, str]] = []
    for message, place in as_objects(value, "messages"):
        refuse_unknown(message, ("role", "content"), f"{place}.")
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            text = f"'{place}.role' must be 'user', 'assistant' or 'system'"
            raise CallFailed(400, text, param=f"{place}.role", code="invalid_value")
        turns.append((role, message.get("content"), place))
    return turns


def _add_to_turn(turn: AssistantTurn, content: object, where: str) -> None:
    if isinstance(content, str):
        turn.texts.append(content)
        return
    for block, place in as_objects(content, where):
        kind = block.get("type")
        if kind == "thinking":
            refuse_unknown(block, (*_BLOCK, "thinking", "signature"), f"{place}.")
            turn.thoughts.append(text_in(block, "thinking", place))
        elif kind == "redacted_thinking":
            refuse_unknown(block, (*_BLOCK, "data"), f"{place}.")
            note_ignored(f"{place}.data")
        elif kind == "tool_use":
            refuse_unknown(block, (*_BLOCK, "id", "name", "input"), f"{place}.", _DIRECT)
            arguments = json.dumps(as_object(block.get("input") or {}, f"{place}.input"), ensure_ascii=False)
            turn.call(text_in(block, "id", place), text_in(block, "name", place), arguments)
        else:
            turn.texts.append(_text(block, place))


def _user(content: object, where: str) -> tuple[list[Json], list[Json]]:
    """Return the results of tools as separate messages, and the parts of the user's other content."""
    if isinstance(content, str):
        return [], [{"type": "text", "text": content}]
    results: list[Json] = []
    parts: list[Json] = []
    for block, place in as_objects(content, where):
        if block.get("type") != "tool_result":
            parts.append(_part(block, place))
            continue
        refuse_unknown(block, (*_BLOCK, "tool_use_id", "content", "is_error"), f"{place}.")
        result = "" if block.get("content") is None else block["content"]
        if not isinstance(result, str):
            result = texts_joined([_result(part, at) for part, at in as_objects(result, f"{place}.content")], "\n\n")
        if block.get("is_error"):
            is_text = isinstance(result, str)
            result = f"Error: {result}" if is_text else [{"type": "text", "text": "Error:"}, *result]
        results.append({"role": "tool", "tool_call_id": text_in(block, "tool_use_id", place), "content": result})
    return results, parts


def _result(block: Json, place: str) -> Json:
    """Return a part of a tool's result."""
    if block.get("type") != "tool_reference":
        return _part(block, place)
    refuse_unknown(block, (*_BLOCK, "tool_name"), f"{place}.")
    return {"type": "text", "text": text_in(block, "tool_name", place)}


def _part(block: Json, place: str) -> Json:
    if block.get("type") in ("document", "search_result"):
        return {"type": "text", "text": _document(block, place)}
    if block.get("type") != "image":
        return {"type": "text", "text": _text(block, place)}
    refuse_unknown(block, (*_BLOCK, "source"), f"{place}.")
    place = f"{place}.source"
    source = as_object(block.get("source"), place)
    if source.get("type") == "url":
        refuse_unknown(source, ("type", "url"), f"{place}.")
        url = text_in(source, "url", place)
    elif source.get("type") == "base64":
        refuse_unknown(source, ("type", "media_type", "data"), f"{place}.")
        url = f"data:{text_in(source, 'media_type', place)};base64,{text_in(source, 'data', place)}"
    else:
        raise untranslatable(f"{place}.type", f"an image from {shown(source.get('type'))} has no equivalent")
    return {"type": "image_url", "image_url": {"url": url}}


def _document(block: Json, place: str) -> str:
    """Return a document of text, or a result of a search, as text: its title, then its content."""
    harmless: Harmless = {"citations": ({}, {"enabled": False})}
    if block["type"] == "search_result":
        refuse_unknown(block, (*_BLOCK, "content", "source", "title"), f"{place}.", harmless)
        text = _texts(block.get("content"), f"{place}.content")
        return "\n\n".join([text_in(block, "title", place), text_in(block, "source", place), text])
    refuse_unknown(block, (*_BLOCK, "source", "title", "context"), f"{place}.", harmless)
    titles = [text_in(block, name, place) for name in some_of(block, ("title", "context"))]
    where = f"{place}.source"
    source = as_object(block.get("source"), where)
    if source.get("type") == "text":
        refuse_unknown(source, ("type", "data"), f"{where}.", {"media_type": ("text/plain",)})
        return "\n\n".join([*titles, text_in(source, "data", where)])
    if source.get("type") == "content":
        refuse_unknown(source, ("type", "content"), f"{where}.")
        return "\n\n".join([*titles, _texts(source.get("content"), f"{where}.content")])
    why = f"a document from {shown(source.get('type'))} has no equivalent; use 'text' or 'content'"
    raise untranslatable(f"{place}.type", why)


def _tool_choice(choice: Json) -> Json:
    kind = choice.get("type")
    fields = ("name",) if kind == "tool" else ()
    refuse_unknown(choice, ("type", "disable_parallel_tool_use", *fields), "tool_choice.")
    if kind == "tool":
        chat = named_function(text_in(choice, "name", "tool_choice"))
    elif isinstance(kind, str) and kind in _CHOICES:
        chat = {"tool_choice": _CHOICES[kind]}
    else:
        raise untranslatable("tool_choice.type", f"{shown(kind)} is not one of auto, any, tool, none")
    return {**chat, "parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else chat


def _thinking(thinking: Json) -> Json:
    """Return the chat template's settings for thinking: Qwen and most others have one, DeepSeek and Granite another."""
    refuse_unknown(thinking, ("type", "budget_tokens", "display"), "thinking.")
    if (thinks := _THINKS.get(str(thinking.get("type")))) is None:
        raise untranslatable("thinking.type", f"{shown(thinking.get('type'))} is not one of {', '.join(_THINKS)}")
    return {"chat_template_kwargs": {"enable_thinking": thinks, "thinking": thinks}}


def _output(config: Json) -> Json:
    refuse_unknown(config, ("effort", "format"), "output_config.")
    chat: Json = {} if config.get("effort") is None else {"reasoning_effort": config["effort"]}
    if config.get("format") is not None:
        text_format = as_object(config["format"], "output_config.format")
        refuse_unknown(text_format, ("type", "schema"), "output_config.format.")
        if text_format.get("type") != "json_schema":
            raise untranslatable("output_config.format.type", f"{shown(text_format.get('type'))} is not 'json_schema'")
        schema = {"name": "output", "strict": True, "schema": text_format.get("schema")}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return chat


def _user_of(metadata: Json) -> Json:
    refuse_unknown(metadata, ("user_id",), "metadata.")
    return {"user": metadata["user_id"]} if metadata.get("user_id") else {}


_OBJECTS = {"tool_choice": _tool_choice, "thinking": _thinking, "output_config": _output, "metadata": _user_of}
"""Fields that are objects, and the function that translates each to a chat completion."""


# --- replies ---------------------------------------------------------------------------------------------------------


def _texts_of(blocks: list[Json], kind: str) -> str:
    return "".join(str(block.get(kind) or "") for block in blocks if block.get("type") == kind)


class _MessageStream(EventReader):
    """One stream of events, from which the reply is assembled."""

    errors = ("error",)

    def __init__(self) -> None:
        self._message: Json = {}
        self._blocks: dict[int, Json] = {}
        self._texts: dict[int, dict[str, Text]] = {}
        """Contents of the blocks, by field."""

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


class _MessageEvents(PartWriter):
    """Writes the events of one message, and the message itself."""

    kinds: Mapping[str, str] = {"thought": "thinking", "content": "text", "refusal": "text"}
    _key = secrets.token_bytes(32)
    """Key for the `signature` of a thought; never verified, because clients also send the thought back."""

    def __init__(self, request: Json) -> None:
        super().__init__(request)
        self._content: list[Json] = []
        self._text = Text()
        """Text of the open block."""

    @override
    def begin(self) -> bytes:
        return event("message_start", {"message": self._message([], None, None, None)})

    @override
    def open(self) -> bytes:
        self._text = Text()
        if self.call is not None:
            block: Json = {"type": "tool_use", "id": self.call.id, "name": self.call.name, "input": {}}
        elif self.part == "thinking":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            block = {"type": "text", "text": ""}
        self._content.append(block)
        return event("content_block_start", {**self._index, "content_block": block})

    @override
    def fill(self, text: str) -> bytes:
        self._text.add(text)
        name = "partial_json" if self.call is not None else str(self.part)
        return self._delta("input_json_delta" if self.call is not None else f"{name}_delta", name, text)

    @override
    def close(self, *, last: bool) -> bytes:
        signed, block, text = b"", self._content[-1], str(self._text)
        if self.call is not None:
            value = read_json(text.strip() or "{}")
            block["input"] = {"invalid_json": text} if value is None else value
        else:
            block[str(self.part)] = text
        if self.part == "thinking":
            code = hmac.digest(self._key, text.encode("utf-8", "surrogatepass"), "sha256")
            block["signature"] = base64.urlsafe_b64encode(code).decode()
            signed = self._delta("signature_delta", "signature", block["signature"])
        return signed + event("content_block_stop", self._index)

    @override
    def finish(self) -> bytes:
        reason, sequence = self._stop_reason()
        self.reply = self._message(self._content, reason, sequence, self.usage)
        delta = {"delta": {"stop_reason": reason, "stop_sequence": sequence}, "usage": self.reply["usage"]}
        return event("message_delta", delta) + event("message_stop", {})

    @property
    def _index(self) -> Json:
        return {"index": len(self._content) - 1}

    def _delta(self, kind: str, name: str, text: str) -> bytes:
        return event("content_block_delta", {**self._index, "delta": {"type": kind, name: text}})

    def _stop_reason(self) -> tuple[str, str | None]:
        """Return the stop reason and, if it was one of the caller's stop sequences (vLLM and SGLang), that sequence.

        Some engines report `stop` for a message that calls tools or refuses.
        """
        finish_reason = self.choice.get("finish_reason")
        sequence = self.choice.get("stop_reason") or self.choice.get("matched_stop")
        if finish_reason == "stop":
            if isinstance(sequence, str) and sequence in entries_of(self.request.get("stop_sequences")):
                return "stop_sequence", sequence
            if self.said & {"call", "refusal"}:
                return "tool_use" if "call" in self.said else "refusal", None
        return _REASONS.get(str(finish_reason), "end_turn"), None

    def _message(self, content: list[Json], reason: str | None, sequence: str | None, usage: object) -> Json:
        fields = fields_of(usage)  # 0 where the server reports none
        cached = count_of(object_in(fields, "prompt_tokens_details").get("cached_tokens"))
        return {
            "id": text_of(self.head["id"]),
            "type": "message",
            "role": "assistant",
            "model": text_of(self.head["model"]),
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": {
                "input_tokens": max(0, count_of(fields.get("prompt_tokens")) - cached),
                "output_tokens": count_of(fields.get("completion_tokens")),
                "cache_read_input_tokens": cached,
                "cache_creation_input_tokens": 0,
            },
        }
