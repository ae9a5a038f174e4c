"""OpenAI's responses. In a translation to a chat completion, each field of a request is read, or refused by name.

A server that supports the dialect gets the request unchanged, and its reply, without tokens, is read for the record.

Sources: https://platform.openai.com/docs/api-reference/responses and .../responses-streaming. Differences:

- The contents of `previous_response_id` and `item_reference` are already part of the input (`responses_state`).
  A `conversation` and a stored `prompt` are refused: nothing is kept after the attempt.
- Without effect, since they do not change the reply: `store`, `service_tier`, `metadata` (returned), fields about users
  and caches, `max_tool_calls` (of tools that OpenAI runs), `stream_options`, additions by `include` to items that do
  not occur here, a summary of thoughts (they are returned in full), and of echoed items the `id`, `status`, `phase`,
  `annotations`, `logprobs` and the fields that the client library has parsed (`parsed`, `parsed_arguments`).
- Ignored, with one warning in the log: truncation and compaction of the context, which is always complete here
  (`truncation` that is `auto`, `context_management`, `image`), `access_programs`, `client_metadata`, and
  `defer_loading` of a tool: all tools are shown from the start. `encrypted_content` is read if this gateway made it and
  the item has no plain thought.
- A value that requests the default behaviour (`truncation` that is `disabled`, a caller that is `direct`) is accepted,
  and so is a request for parallel calls without tools.
- `developer` messages become `system` messages, which every chat template supports.
- Tools that only a vendor's server can run (`server_tools`) are not shown to the model, with one warning in the log.
  The functions of a `namespace` are shown one by one, as `<namespace>__<name>`; a call of one is returned with both
  names. The `description` of a `namespace` is not shown.
- A `custom` tool, which takes free text, is a function with one string, `input`; its grammar is in the
  description of that string and is not enforced. A call is returned as a `custom_tool_call`; in a stream its text is
  sent in one piece when the call is complete.
- Tools of an `additional_tools` item are tools of the request; if several have the same name, the last one is used.
- With `allowed_tools` the model sees no other tools, because most servers do not support that choice.
- A tool's result may contain images. A model server that does not support this returns its own error.
- In a translated stream, tool calls after the first one arrive when the reply continues with something else, or ends.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import secrets
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any, NamedTuple

from typing_extensions import override

from agentlightning.llm_proxy.access.limits import count_of, shown
from agentlightning.llm_proxy.dialects.base import (
    EventReader,
    StreamReader,
    StreamWriter,
    TranslatedDialect,
    chat_record,
    event,
    openai_error,
)
from agentlightning.llm_proxy.dialects.json_values import (
    Json,
    entries_of,
    is_list,
    is_object,
    object_in,
    objects,
    read_json,
    read_model_request,
    text_of,
    wrong_type,
)
from agentlightning.llm_proxy.dialects.pieces import PartWriter, Text
from agentlightning.llm_proxy.dialects.translation import (
    AssistantTurn,
    Harmless,
    adds_tools,
    as_object,
    as_objects,
    as_text,
    is_run_by_server,
    named_function,
    no_such_choice,
    note_ignored,
    refuse_unknown,
    server_tools,
    some_of,
    text_in,
    texts_joined,
    untranslatable,
    with_choice,
)
from agentlightning.llm_proxy.replies import CallFailed

_WHOLE = ("response.completed", "response.incomplete")
_ENDS = ("completed", "incomplete", "failed")
_FAILED = ("error", "response.failed")
_CUT = {"length": "max_output_tokens", "content_filter": "content_filter"}
_PREFIXES = {"reasoning": "rs", "message": "msg", "refusal": "msg", "call": "fc", "custom": "ctc"}
_PARTS = {"reasoning": "reasoning_text", "message": "output_text", "refusal": "refusal"}
"""Kinds of items that have a part with a text: the type of the part, and the name of the events that fill it."""
_ECHOED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "metadata", "previous_response_id", "prompt_cache_key"),
    *("safety_identifier", "temperature", "top_p", "user"),
)

SAME = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "user")
READ = ("input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "reasoning", "include")
WITHOUT_EFFECT = (
    *("store", "service_tier", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("max_tool_calls", "stream_options", "previous_response_id"),
)
HARMLESS: Harmless = {
    "background": (False,),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "context_management": ([],),
}
IGNORED = ("truncation", "context_management", "access_programs", "image", "client_metadata")
INCLUDED_ANYWAY = (
    "reasoning.encrypted_content",  # it is always there
    "message.input_image.image_url",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "web_search_call.action.sources",
    "web_search_call.results",
)
_ROLES = {"developer": "system", "system": "system", "user": "user"}
_ECHO = ("type", "id", "status", "internal_chat_message_metadata_passthrough")  # the last is sent by codex
_TEXT = ("type", "text", "annotations", "logprobs", "parsed", "prompt_cache_breakpoint")
_DIRECT: Harmless = {"caller": ({"type": "direct"},), "async": (False,)}
_TOOL = ("type", "name", "description", "parameters", "strict")
_HARMLESS_TOOL: Harmless = {"async": (False,), "defer_loading": (False,), "allowed_callers": (["direct"], [])}
_CUSTOM_TOOL = ("type", "name", "description", "format")


class Responses(TranslatedDialect):
    """`POST /responses`."""

    route = "responses"
    kind = "chat"
    prompt_field = ("input", (str, list), "a string or a list of items")
    reply_form = "JSON with the object 'response'"
    limit_names = ("max_output_tokens",)
    forwarded = ("openai-beta",)

    @override
    def read_count(self, raw: bytes) -> Json:
        request = read_model_request(raw, "input", (str, list, NoneType), "a string or a list of items")
        return {**request, "input": [] if request.get("input") is None else request["input"]}

    @override
    def prompt_of(self, request: Json) -> list[object]:
        value, instructions = request["input"], request.get("instructions")
        messages: list[object] = [{"role": "system", "content": instructions}] if instructions else []
        if isinstance(value, str):
            return [*messages, {"role": "user", "content": value}]
        for item in objects(value):
            kind = item.get("type") or "message"
            if kind == "message":
                messages.append({"role": item.get("role"), "content": item.get("content")})
            else:
                role = "tool" if str(kind).endswith("_output") else "assistant"
                messages.append({"role": role, "content": json.dumps(item, ensure_ascii=False)})
        return messages

    @override
    def prompt_to_chat(self, request: Json) -> Json:
        return _chat_request(request)

    @override
    def write_stream(self, request: Json) -> StreamWriter:
        return _ResponseEvents(request)

    @override
    def read_reply(self, raw: bytes) -> Json | None:
        reply = read_json(raw)
        return reply if reply is not None and reply.get("object") == "response" else None

    @override
    def record_of(self, reply: Json) -> Json:
        items, usage = objects(reply.get("output")), object_in(reply, "usage")
        fields = {"content": _texts_of(items, "message", "text"), "refusal": _texts_of(items, "message", "refusal")}
        fields["reasoning_content"] = _texts_of(items, "reasoning", "text")
        calls: list[Json] = [
            {"id": item.get("call_id"), "name": item.get("name"), "arguments": item.get("arguments", item.get("input"))}
            for item in items
            if item.get("type") in ("function_call", "custom_tool_call")
        ]
        incomplete_reason = object_in(reply, "incomplete_details").get("reason")
        reason = {cut: name for name, cut in _CUT.items()}.get(
            str(incomplete_reason), "tool_calls" if calls else "stop"
        )
        names = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens", "total_tokens": "total_tokens"}
        return chat_record(
            reply, fields, calls, reason, {name: count_of(usage.get(their)) for name, their in names.items()}
        )

    @override
    def read_stream(self, request: Json) -> StreamReader:
        return _ResponseStream()

    @override
    def stream_of(self, reply: Json, request: Json) -> bytes:
        start: Json = {"response": {**reply, "output": [], "status": "in_progress"}}
        events = [("response.created", start)]
        for index, item in enumerate(objects(reply.get("output"))):
            place: Json = {"output_index": index, "item": item}
            events += [("response.output_item.added", place), ("response.output_item.done", place)]
        status = reply.get("status")
        events.append((f"response.{status if status in _ENDS else 'completed'}", {"response": reply}))
        return b"".join(event(kind, {"sequence_number": n, **fields}) for n, (kind, fields) in enumerate(events))

    @override
    def has_form_of(self, error: bytes) -> bool:
        return bool(object_in(read_json(error) or {}, "error"))

    @override
    def stream_failure(self, failed: CallFailed, sent: int) -> bytes:
        server_error = read_json(failed.upstream_error) if failed.upstream_error else None
        if server_error is not None and server_error.get("type") in _FAILED:
            return event(server_error["type"], server_error)
        error = openai_error(failed)
        fields = {name: error[name] for name in ("code", "message", "param")}
        return event("error", {"sequence_number": sent, **fields, "error": error})


# --- requests: tools -------------------------------------------------------------------------------------------------


class _AgentTool(NamedTuple):
    """A tool as the agent names it."""

    name: str
    space: str | None = None
    """Its namespace."""
    is_custom: bool = False


def _chat_request(request: Json) -> Json:
    for name in ("conversation", "prompt"):
        if request.get(name) is not None:
            why = "the gateway does not store it; continue a response by its 'previous_response_id', or send the items"
            raise untranslatable(name, why)
    refuse_unknown(request, (*SAME, *READ, *WITHOUT_EFFECT, "prompt_cache_options"), "", HARMLESS, IGNORED)
    included = request.get("include")
    if included is not None and not is_list(included):
        raise wrong_type("include", "a list")
    for index, name in enumerate(entries_of(included)):
        if name not in INCLUDED_ANYWAY:
            why = f"{shown(name)} is not available; for logprobs, use chat/completions"
            raise untranslatable(f"include[{index}]", why)
    if request.get("prompt_cache_options") is not None:
        options = as_object(request["prompt_cache_options"], "prompt_cache_options")
        refuse_unknown(options, ("mode", "ttl"), "prompt_cache_options.", {"prewarm": (False,)})
    chat = some_of(request, SAME)
    chat["messages"] = _messages(request["input"])
    if request.get("instructions") is not None:
        chat["messages"].insert(0, {"role": "system", "content": as_text(request["instructions"], "instructions")})
    if request.get("max_output_tokens") is not None:
        chat["max_tokens"] = request["max_output_tokens"]
    if tools := _functions(request):
        chat["tools"] = tools
    else:
        chat.pop("parallel_tool_calls", None)  # servers refuse it without tools
    if request.get("tool_choice") is not None:
        chat.update(_tool_choice(request["tool_choice"], tools))
    chat = with_choice(chat, server_tools(request))
    for name, read in (("text", _text_config), ("reasoning", _reasoning)):
        if request.get(name) is not None:
            chat.update(read(as_object(request[name], name)))
    return {**chat, "stream_options": {"include_usage": True}} if chat.get("stream") else chat


def _functions(request: Json) -> list[Json]:
    """Return the tools shown to the model."""
    functions: list[Json] = []
    is_special: dict[str, bool] = {}
    for tool, place, space in _flat(_tools_of(request)):
        if is_run_by_server(tool):
            continue
        if tool.get("type") not in ("function", "custom"):
            raise untranslatable(f"{place}.type", f"the tool {shown(tool.get('type'))} has no equivalent")
        is_custom = tool["type"] == "custom"
        field_names = _CUSTOM_TOOL if is_custom else _TOOL
        refuse_unknown(tool, field_names, f"{place}.", _HARMLESS_TOOL, ("defer_loading",))
        name = _flat_name(space, text_in(tool, "name", place))
        special = is_custom or space is not None
        if name in is_special and (special or is_special[name]):
            raise untranslatable(f"{place}.name", f"another tool has the same name {shown(name)} for the model")
        is_special[name] = special
        function = {"name": name, **some_of(tool, _TOOL[2:])}
        function.update({"parameters": _text_parameter(tool, place)} if is_custom else {})
        functions.append({"type": "function", "function": function})
    return functions


def _flat_name(space: object, name: str) -> str:
    """Return the model's name for a function of a namespace; without a namespace the function's own name."""
    return f"{space}{'' if space.endswith('__') else '__'}{name}" if isinstance(space, str) and space else name


def _agent_tools(request: Json) -> dict[str, _AgentTool]:
    """Return the tools that have another name or form for the model than for the agent, by the model's names."""
    flat = _flat(_tools_of(request))
    tools = [_AgentTool(str(tool.get("name")), space, tool.get("type") == "custom") for tool, _, space in flat]
    return {_flat_name(tool.space, tool.name): tool for tool in tools if tool.space is not None or tool.is_custom}


def _tools_of(request: Json) -> list[tuple[Json, str]]:
    """Return the tools of the request, each with its place."""
    tools = as_objects(request.get("tools") or [], "tools")
    items = [(item, f"input[{i}]") for i, item in enumerate(entries_of(request.get("input"))) if adds_tools(item)]
    if not items:
        return tools
    for item, place in items:
        refuse_unknown(item, ("type", "id", "role", "tools"), f"{place}.")
        tools += as_objects(item.get("tools"), f"{place}.tools")
    return list({(str(tool.get("type")), str(tool.get("name"))): (tool, place) for tool, place in tools}.values())


def _text_parameter(tool: Json, place: str) -> Json:
    """Return the parameters of the function that replaces a custom tool: its free text."""
    text: Json = {"type": "string"}
    if tool.get("format") is not None:
        place = f"{place}.format"
        text_format = as_object(tool["format"], place)
        kind = text_format.get("type")
        if kind not in ("grammar", "text"):
            raise untranslatable(f"{place}.type", f"{shown(kind)} is neither 'text' nor 'grammar'")
        names = ("syntax", "definition") if kind == "grammar" else ()
        refuse_unknown(text_format, ("type", *names), f"{place}.")
        if kind == "grammar":
            syntax, definition = (text_in(text_format, name, place) for name in names)
            text["description"] = f"Text that follows this {syntax} grammar:\n{definition}"
    return {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}


def _flat(tools: list[tuple[Json, str]]) -> Iterator[tuple[Json, str, str | None]]:
    """Yield each tool, including those of namespaces, with its place and its namespace."""
    for tool, place in tools:
        if tool.get("type") != "namespace":
            yield tool, place, None
            continue
        refuse_unknown(tool, ("type", "name", "description", "tools"), f"{place}.")
        space = text_in(tool, "name", place)
        yield from ((inner, where, space) for inner, where in as_objects(tool.get("tools"), f"{place}.tools"))


def _tool_choice(choice: object, tools: list[Json]) -> Json:
    """Return the fields for the tools that may be called; `tools` are those of the chat."""
    if isinstance(choice, str):
        return {"tool_choice": choice}
    fields = as_object(choice, "tool_choice")
    if fields.get("type") == "allowed_tools":
        refuse_unknown(fields, ("type", "mode", "tools"), "tool_choice.")
        if fields.get("mode") not in ("auto", "required"):
            text = "'tool_choice.mode' must be 'auto' or 'required'"
            raise CallFailed(400, text, param="tool_choice.mode", code="invalid_value")
        by_name = {tool["function"]["name"]: tool for tool in tools}
        allowed = as_objects(fields.get("tools"), "tool_choice.tools")
        entries = [entry for entry, _ in allowed if not is_run_by_server(entry)]
        names = [_flat_name(entry.get("namespace"), str(entry.get("name"))) for entry in entries]
        if not names or not all(name in by_name for name in names):
            some = f"it must name tools of the request: {shown(list(by_name))}"
            text = f"'tool_choice' allows the tools {shown(names)}; {some}"
            raise CallFailed(400, text, param="tool_choice", code="invalid_value")
        return {"tools": [by_name[name] for name in names], "tool_choice": fields["mode"]}
    if is_run_by_server(fields):
        raise no_such_choice(fields["type"], [fields["type"]])
    if fields.get("type") not in ("function", "custom"):
        raise untranslatable("tool_choice.type", f"{shown(fields.get('type'))} has no equivalent")
    refuse_unknown(fields, ("type", "name", "namespace"), "tool_choice.")
    return named_function(_flat_name(fields.get("namespace"), text_in(fields, "name", "tool_choice")))


# --- requests: input, and the rest -----------------------------------------------------------------------------------


def _messages(value: object) -> list[Json]:
    """Return the input as chat messages: thoughts, text and calls of the assistant in one turn are one message."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages: list[Json] = []
    turn: AssistantTurn | None = None
    for item, place in as_objects(value, "input"):
        if adds_tools(item):
            continue
        kind = item.get("type") or ("message" if "role" in item else None)
        by_assistant = kind in ("function_call", "custom_tool_call", "reasoning") or (
            kind == "message" and item.get("role") == "assistant"
        )
        if by_assistant:
            turn = turn or AssistantTurn()
            _add_to_turn(turn, str(kind), item, place)
            continue
        messages += [turn.message] if turn is not None else []
        messages.append(_other(item, kind, place))
        turn = None
    return messages if turn is None else [*messages, turn.message]


def _add_to_turn(turn: AssistantTurn, kind: str, item: Json, place: str) -> None:
    if kind == "reasoning":
        refuse_unknown(item, (*_ECHO, "summary", "content", "encrypted_content"), f"{place}.")
        turn.thoughts.append(_thought(item, place))
    elif kind == "message":
        turn.texts.append(_assistant_text(item, place))
    else:
        is_custom = kind == "custom_tool_call"
        text_fields = ("input",) if is_custom else ("arguments", "parsed_arguments")
        refuse_unknown(item, (*_ECHO, "call_id", "name", "namespace", *text_fields), f"{place}.", _DIRECT)
        call_id, name, arguments = (text_in(item, field, place) for field in ("call_id", "name", text_fields[0]))
        if is_custom:
            arguments = json.dumps({"input": arguments}, ensure_ascii=False)
        turn.call(call_id, _flat_name(item.get("namespace"), name), arguments)


def _thought(item: Json, place: str) -> str:
    """Return a thought: from its content, else from the sealed text, else from the summary."""
    content, summary = ("".join(str(p.get("text") or "") for p in objects(item.get(n))) for n in ("content", "summary"))
    if content or not item.get("encrypted_content"):
        return content or summary
    thought = _unsealed(text_in(item, "encrypted_content", place))
    where = f"{place}.encrypted_content"
    if thought is None and not summary:
        text = (
            f"The encrypted content for item {shown(item.get('id'))} could not be verified ({where!r}): it is from "
            "another gateway, or from before a restart of this one. Remove the item, or send its 'content'"
        )
        raise CallFailed(400, text, param=where, code="invalid_encrypted_content")
    if thought is None:
        note_ignored(where)
    return summary if thought is None else thought


def _assistant_text(item: Json, place: str) -> str:
    refuse_unknown(item, (*_ECHO, "role", "content", "phase"), f"{place}.")
    content = item.get("content")
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part, where in as_objects(content, f"{place}.content"):
        if part.get("type") == "refusal":
            refuse_unknown(part, ("type", "refusal"), f"{where}.")
            texts.append(text_in(part, "refusal", where))
        else:
            texts.append(_text(part, where))
    return "".join(texts)


def _text(part: Json, place: str) -> str:
    if part.get("type") not in ("input_text", "output_text", "text"):
        raise untranslatable(f"{place}.type", f"content of type {shown(part.get('type'))} has no equivalent")
    refuse_unknown(part, _TEXT, f"{place}.")
    return text_in(part, "text", place)


def _other(item: Json, kind: object, place: str) -> Json:
    """Return a message that is not from the assistant."""
    if kind in ("function_call_output", "custom_tool_call_output"):
        refuse_unknown(item, (*_ECHO, "call_id", "output", "name"), f"{place}.", _DIRECT)
        content = _content(item.get("output"), f"{place}.output")
        name_field = {"name": item["name"]} if item.get("name") else {}
        return {"role": "tool", "tool_call_id": text_in(item, "call_id", place), **name_field, "content": content}
    if kind != "message":
        raise untranslatable(f"{place}.type", f"an item of type {shown(kind)} has no equivalent")
    refuse_unknown(item, (*_ECHO, "role", "content", "phase"), f"{place}.")
    role = _ROLES.get(str(item.get("role")))
    if role is None:
        text = f"'{place}.role' must be one of {', '.join((*_ROLES, 'assistant'))}"
        raise CallFailed(400, text, param=f"{place}.role", code="invalid_value")
    return {"role": role, "content": _content(item.get("content"), f"{place}.content")}


def _content(value: object, place: str) -> str | list[Json]:
    """Return parts that are all text as one text, other parts unchanged."""
    if isinstance(value, str):
        return value
    parts: list[Json] = []
    for part, where in as_objects(value, place):
        if part.get("type") == "input_image":
            refuse_unknown(part, ("type", "image_url", "detail", "prompt_cache_breakpoint"), f"{where}.")
            image = {"url": text_in(part, "image_url", where)}
            image.update({"detail": part["detail"]} if part.get("detail") else {})
            parts.append({"type": "image_url", "image_url": image})
        elif part.get("type") == "input_audio":
            refuse_unknown(part, ("type", "input_audio"), f"{where}.")
            audio = as_object(part.get("input_audio"), f"{where}.input_audio")
            parts.append({"type": "input_audio", "input_audio": audio})
        else:
            parts.append({"type": "text", "text": _text(part, where)})
    return texts_joined(parts, "")


def _text_config(text: Json) -> Json:
    refuse_unknown(text, ("format", "verbosity"), "text.")
    chat = some_of(text, ("verbosity",))
    text_format = as_object(text.get("format") or {"type": "text"}, "text.format")
    kind = text_format.get("type")
    schema_fields = ("name", "description", "schema", "strict") if kind == "json_schema" else ()
    refuse_unknown(text_format, ("type", *schema_fields), "text.format.")
    if kind == "json_object":
        chat["response_format"] = {"type": "json_object"}
    elif kind == "json_schema":
        chat["response_format"] = {"type": "json_schema", "json_schema": some_of(text_format, schema_fields)}
    elif kind != "text":
        raise untranslatable("text.format.type", f"{shown(kind)} has no equivalent")
    return chat


def _reasoning(reasoning: Json) -> Json:
    harmless = {"context": ("auto", "all_turns"), "mode": ("standard",)}
    refuse_unknown(reasoning, ("effort", "summary", "generate_summary"), "reasoning.", harmless)
    return {} if reasoning.get("effort") is None else {"reasoning_effort": reasoning["effort"]}


# --- thoughts in the form in which clients keep them: to be sent back, not to be written by others -------------------

_KEY = secrets.token_bytes(32)
_CODE = 32
"""Bytes of the code before the text."""


def sealed(text: str) -> str:
    """Return `encrypted_content`: the plain text and an authentication code of this process.

    Clients that keep only this field can return the exact thought of the model. It is not encrypted: the thought is
    also in clear text next to it.
    """
    raw = text.encode("utf-8", "surrogatepass")
    return base64.urlsafe_b64encode(hmac.digest(_KEY, raw, "sha256") + raw).decode()


def _unsealed(value: str) -> str | None:
    """Return the text of a sealed thought; None if this process did not make it."""
    try:
        raw = base64.b64decode(value.encode("ascii"), b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    if not hmac.compare_digest(raw[:_CODE], hmac.digest(_KEY, raw[_CODE:], "sha256")):
        return None
    return raw[_CODE:].decode("utf-8", "surrogatepass")


# --- replies ---------------------------------------------------------------------------------------------------------


def _texts_of(items: list[Json], kind: str, name: str) -> str:
    parts = [part for item in items if item.get("type") == kind for part in objects(item.get("content"))]
    return "".join(str(part.get(name) or "") for part in parts)


class _ResponseStream(EventReader):
    """One stream of events. The last one contains the complete response; until then completed items are kept."""

    errors = _FAILED

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


class _ResponseEvents(PartWriter):
    """Writes the events of one response, and the response itself. Items are written one after another."""

    kinds: Mapping[str, str] = {"thought": "reasoning", "content": "message", "refusal": "refusal"}
    empty = "message"

    def __init__(self, request: Json) -> None:
        super().__init__(request)
        self._tools = _agent_tools(request)
        self._events = 0
        self._items: list[Json] = []
        self._text = Text()
        """Text of the open item."""
        self._tool: _AgentTool | None = None
        """Tool that the open item calls."""

    @override
    def begin(self) -> bytes:
        fields = {"response": self._response("in_progress", None)}
        return self._event("response.created", fields) + self._event("response.in_progress", fields)

    @override
    def open(self) -> bytes:
        self._text = Text()
        self._tool = None if self.call is None else self._tools.get(self.call.name) or _AgentTool(self.call.name)
        item = self._item("in_progress", "")
        events = self._event("response.output_item.added", {**self._index, "item": item})
        if self._tool is None:
            events += self._event("response.content_part.added", {**self._place, "part": self._part("")})
        return events

    @override
    def fill(self, text: str) -> bytes:
        self._text.add(text)
        if self._tool is None:
            delta = {**self._place, "delta": text, **self._extra}
            return self._event(f"response.{_PARTS[str(self.part)]}.delta", delta)
        if self._tool.is_custom:  # its text is known once the arguments are whole
            return b""
        return self._event("response.function_call_arguments.delta", {**self._index, **self._named, "delta": text})

    @override
    def close(self, *, last: bool) -> bytes:
        text = str(self._text)
        item = self._item(self._last_status if last else "completed", text)
        if self._tool is None:
            name = "refusal" if self.part == "refusal" else "text"
            done = {**self._place, name: text, **self._extra}
            events = self._event(f"response.{_PARTS[str(self.part)]}.done", done)
            events += self._event("response.content_part.done", {**self._place, "part": self._part(text)})
        elif self._tool.is_custom:
            place, input_text = {**self._index, **self._named}, item["input"]
            events = self._event("response.custom_tool_call_input.delta", {**place, "delta": input_text})
            events += self._event("response.custom_tool_call_input.done", {**place, "input": input_text})
        else:
            assert self.call is not None
            done = {**self._index, **self._named, "name": self.call.name, "arguments": text}
            events = self._event("response.function_call_arguments.done", done)
        events += self._event("response.output_item.done", {**self._index, "item": item})
        self._items.append(item)
        return events

    @override
    def finish(self) -> bytes:
        reason = str(self.choice.get("finish_reason"))
        self.reply = self._response(self._last_status, _CUT.get(reason))
        return self._event(f"response.{self._last_status}", {"response": self.reply})

    @property
    def _last_status(self) -> str:
        """The status of the last item of the reply, and of the response itself."""
        return "incomplete" if str(self.choice.get("finish_reason")) in _CUT else "completed"

    @property
    def _index(self) -> Json:
        return {"output_index": len(self._items)}

    @property
    def _named(self) -> Json:
        prefix = "custom" if self._tool is not None and self._tool.is_custom else str(self.part)
        return {"item_id": f"{_PREFIXES[prefix]}_{self.head['id']}_{len(self._items)}"}

    @property
    def _place(self) -> Json:
        return {**self._named, **self._index, "content_index": 0}

    @property
    def _extra(self) -> Json:
        return {"logprobs": []} if self.part == "message" else {}

    def _part(self, text: str) -> Json:
        """Return the one part of the open item that holds its text."""
        if self.part == "refusal":
            return {"type": "refusal", "refusal": text}
        extra: Json = {"annotations": [], "logprobs": []} if self.part == "message" else {}
        return {"type": _PARTS[str(self.part)], "text": text, **extra}

    def _item(self, status: str, text: str) -> Json:
        """Return the open item; without text, in the form at the beginning of a stream."""
        name: Json = {"id": self._named["item_id"]}
        if self._tool is not None:
            assert self.call is not None
            space = {} if self._tool.space is None else {"namespace": self._tool.space}
            called: Json = {"call_id": self.call.id, "name": self._tool.name, **space}
            if not self._tool.is_custom:
                return {**name, "type": "function_call", **called, "arguments": text, "status": status}
            input_text = (read_json(text) or {}).get("input")  # arguments of another form pass unchanged
            input_text = input_text if isinstance(input_text, str) else text
            return {**name, "type": "custom_tool_call", **called, "input": input_text, "status": status}
        parts = [self._part(text)] if text or (self.part == "message" and status != "in_progress") else []
        if self.part == "reasoning":
            sealed_thought = {"encrypted_content": sealed(text)} if text else {}
            return {**name, "type": "reasoning", "summary": [], "content": parts, **sealed_thought, "status": status}
        return {**name, "type": "message", "role": "assistant", "status": status, "content": parts}

    def _response(self, status: str, why: str | None) -> Json:
        request, reasoning = self.request, object_in(self.request, "reasoning")
        return {
            "id": text_of(self.head["id"]),
            "object": "response",
            "created_at": count_of(self.head["created"]),
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": why} if why else None,
            "model": text_of(self.head["model"]),
            "output": self._items[:],
            **{name: request.get(name) for name in _ECHOED},
            "parallel_tool_calls": request.get("parallel_tool_calls", True),
            "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
            "store": request.get("store") is not False,
            "text": request.get("text") or {"format": {"type": "text"}},
            "tool_choice": request.get("tool_choice") or "auto",
            "tools": request.get("tools") or [],
            "truncation": "disabled",
            "usage": _usage_of(self.usage),
        }

    def _event(self, kind: str, fields: Json) -> bytes:
        self._events += 1
        return event(kind, {"sequence_number": self._events - 1, **fields})


def _usage_of(usage: Any) -> Json | None:
    """Return the used tokens; None if the server does not report them."""
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
