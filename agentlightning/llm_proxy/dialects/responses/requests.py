"""A request of OpenAI's responses as a chat completion. Each field is read, or refused by its name.

Source: https://platform.openai.com/docs/api-reference/responses. What is not one to one:

- What `previous_response_id` and an `item_reference` stand for is part of the input already (`responses_state.turns`).
  A `conversation` and a stored `prompt` are refused: nothing outlives the attempt here.
- Without effect, since it says nothing about the answer: `store`, `service_tier`, `metadata` (given back), what is said
  of users and caches, `max_tool_calls` (of tools that OpenAI runs), `stream_options`, what `include`
  adds to items that do not occur here, a summary of thoughts (they come whole), and of echoed items the `id`, `status`,
  `phase`, `annotations` and `logprobs` and what the client library has parsed of them (`parsed`, `parsed_arguments`).
- Ignored, and said so once in the log: what shortens or compacts a context, which comes whole here (`truncation` that
  is `auto`, `context_management`, `image`), `access_programs`, `client_metadata`, and `defer_loading` of a tool: all
  tools are shown at once. `encrypted_content` is read where this gateway made it and the thought is not beside it.
- A value that says what holds anyway (`truncation` that is `disabled`, a caller that is `direct`) is let pass, and so
  is a wish for parallel calls where there are no tools.
- `developer` messages become `system` messages, which every chat template knows.
- Tools that only a vendor's server can run (`server_tools`) are not shown to the model, which is said once in the log.
  The functions of a `namespace` are shown one by one, as `<namespace>__<name>`; a call of one comes back with both;
  the `description` of a `namespace` is not shown.
- A `custom` tool, to which free text is said, is a function with one string, `input`; its grammar stands in the
  description of that and is not enforced. A call comes back as a `custom_tool_call`; in a stream its text comes in one
  piece when the call is whole.
- Tools of an `additional_tools` item are tools of the request; of several with one name the last one counts.
- Of `allowed_tools` the model sees no others: most servers do not know that choice.
- A tool's result may hold images, which not every model server takes in that place; it says so itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from agentlightning.llm_proxy.access.limits import shown
from agentlightning.llm_proxy.dialects.fields import (
    Harmless,
    as_object,
    as_objects,
    as_text,
    note_ignored,
    refuse_unknown,
    untranslatable,
)
from agentlightning.llm_proxy.dialects.json_values import Json, entries_of, is_list, objects, wrong_type
from agentlightning.llm_proxy.dialects.sealed import unsealed
from agentlightning.llm_proxy.dialects.server_tools import (
    adds_tools,
    is_run_by_server,
    no_such_choice,
    server_tools,
    with_choice,
)
from agentlightning.llm_proxy.replies import CallFailed

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

_MEMORY = ("conversation", "prompt")
_ROLES = {"developer": "system", "system": "system", "user": "user"}
_ECHO = ("type", "id", "status")
_TEXT = ("type", "text", "annotations", "logprobs", "parsed", "prompt_cache_breakpoint")
_DIRECT: Harmless = {"caller": ({"type": "direct"},), "async": (False,)}
_TOOL = ("type", "name", "description", "parameters", "strict")
_HARMLESS_TOOL: Harmless = {"async": (False,), "defer_loading": (False,), "allowed_callers": (["direct"], [])}
_IGNORED_OF_TOOL = ("defer_loading",)
_CUSTOM_TOOL = ("type", "name", "description", "format")


class AgentTool(NamedTuple):
    """A tool as the agent knows it."""

    name: str
    space: str | None = None
    """Its namespace."""
    is_custom: bool = False


def chat_request(request: Json) -> Json:
    """Return the request as a chat completion.

    Raises:
        CallFailed: 400 that names the field that cannot be translated.
    """
    for name in _MEMORY:
        if request.get(name) is not None:
            why = "it is not known here; continue a response by its 'previous_response_id', or send the items"
            raise untranslatable(name, why)
    refuse_unknown(request, (*SAME, *READ, *WITHOUT_EFFECT, "prompt_cache_options"), "", HARMLESS, IGNORED)
    included = request.get("include")
    if included is not None and not is_list(included):
        raise wrong_type("include", "a list")
    for index, name in enumerate(entries_of(included)):
        if name not in INCLUDED_ANYWAY:
            why = f"{shown(name)} is not given here; chat/completions gives logprobs"
            raise untranslatable(f"include[{index}]", why)
    if request.get("prompt_cache_options") is not None:
        options = as_object(request["prompt_cache_options"], "prompt_cache_options")
        refuse_unknown(options, ("mode", "ttl"), "prompt_cache_options.", {"prewarm": (False,)})
    chat: Json = {name: request[name] for name in SAME if request.get(name) is not None}
    messages: list[Json] = []
    if request.get("instructions") is not None:
        messages.append({"role": "system", "content": as_text(request["instructions"], "instructions")})
    chat["messages"] = [*messages, *_messages(request["input"])]
    if request.get("max_output_tokens") is not None:
        chat["max_tokens"] = request["max_output_tokens"]
    if given := _tools_of(request):
        tools: list[Json] = []
        is_special: dict[str, bool] = {}
        for tool, place, space in _flat(given):
            if is_run_by_server(tool):
                continue
            if tool.get("type") not in ("function", "custom"):
                raise untranslatable(f"{place}.type", f"the tool {shown(tool.get('type'))} has no counterpart there")
            is_custom = tool["type"] == "custom"
            known = _CUSTOM_TOOL if is_custom else _TOOL
            refuse_unknown(tool, known, f"{place}.", _HARMLESS_TOOL, _IGNORED_OF_TOOL)
            name = flat_name(space, as_text(tool.get("name"), f"{place}.name"))
            special = is_custom or space is not None
            if name in is_special and (special or is_special[name]):
                raise untranslatable(f"{place}.name", f"the model sees another tool as {shown(name)} too")
            is_special[name] = special
            function: Json = {"name": name}
            function.update({name: tool[name] for name in _TOOL[2:] if tool.get(name) is not None})
            function.update({"parameters": _text_parameter(tool, place)} if is_custom else {})
            tools.append({"type": "function", "function": function})
        chat.update({"tools": tools} if tools else {})
    if "tools" not in chat:
        chat.pop("parallel_tool_calls", None)  # servers refuse it without tools
    if request.get("tool_choice") is not None:
        chat.update(_tool_choice(request["tool_choice"], chat.get("tools", [])))
    chat = with_choice(chat, (kind for kind, _ in server_tools(request)))
    for name, read in (("text", _text_config), ("reasoning", _reasoning)):
        if request.get(name) is not None:
            chat.update(read(as_object(request[name], name)))
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat


def flat_name(space: object, name: str) -> str:
    """Return the name under which the model sees a function of a namespace; without one its own."""
    return f"{space}{'' if space.endswith('__') else '__'}{name}" if isinstance(space, str) and space else name


def agent_tools(request: Json) -> dict[str, AgentTool]:
    """Return the tools that the model sees otherwise than the agent, by the names that the model sees."""
    flat = _flat(_tools_of(request))
    tools = [AgentTool(str(tool.get("name")), space, tool.get("type") == "custom") for tool, _, space in flat]
    return {flat_name(tool.space, tool.name): tool for tool in tools if tool.space is not None or tool.is_custom}


def _tools_of(request: Json) -> list[tuple[Json, str]]:
    """Return the tools of the request, each with its place."""
    tools = as_objects(request.get("tools") or [], "tools")
    items = [
        (item, f"input[{index}]") for index, item in enumerate(entries_of(request.get("input"))) if adds_tools(item)
    ]
    if not items:
        return tools
    for item, place in items:
        refuse_unknown(item, ("type", "id", "role", "tools"), f"{place}.")
        tools += as_objects(item.get("tools"), f"{place}.tools")
    return list({(str(tool.get("type")), str(tool.get("name"))): (tool, place) for tool, place in tools}.values())


def _text_parameter(tool: Json, place: str) -> Json:
    """Return the parameters of the function that stands for a custom tool: its free text."""
    text: Json = {"type": "string"}
    if tool.get("format") is not None:
        wanted = as_object(tool["format"], f"{place}.format")
        is_grammar = wanted.get("type") == "grammar"
        if not is_grammar and wanted.get("type") != "text":
            why = f"{shown(wanted.get('type'))} is neither 'text' nor 'grammar'"
            raise untranslatable(f"{place}.format.type", why)
        names = ("syntax", "definition") if is_grammar else ()
        refuse_unknown(wanted, ("type", *names), f"{place}.format.")
        if is_grammar:
            syntax, definition = (as_text(wanted.get(name), f"{place}.format.{name}") for name in names)
            text["description"] = f"Text that follows this {syntax} grammar:\n{definition}"
    return {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}


def _flat(tools: list[tuple[Json, str]]) -> Iterator[tuple[Json, str, str | None]]:
    """Yield each tool with its place and its namespace; those of a namespace one by one."""
    for tool, place in tools:
        if tool.get("type") != "namespace":
            yield tool, place, None
            continue
        refuse_unknown(tool, ("type", "name", "description", "tools"), f"{place}.")
        space = as_text(tool.get("name"), f"{place}.name")
        yield from ((inner, where, space) for inner, where in as_objects(tool.get("tools"), f"{place}.tools"))


# --- input -----------------------------------------------------------------------------------------------------------


def _messages(given: object) -> list[Json]:
    """Return the input as chat messages: what the assistant thought, said and called in one turn is one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Json] = []
    turn: _Turn | None = None
    for item, place in as_objects(given, "input"):
        if adds_tools(item):
            continue
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind not in ("function_call", "custom_tool_call", "reasoning") and not (
            kind == "message" and item.get("role") == "assistant"
        ):
            messages += [turn.message, _other(item, kind, place)] if turn is not None else [_other(item, kind, place)]
            turn = None
            continue
        turn = turn or _Turn()
        if kind == "custom_tool_call":
            refuse_unknown(item, (*_ECHO, "call_id", "name", "namespace", "input"), f"{place}.", _DIRECT)
            call_id, name, said = (
                as_text(item.get(field), f"{place}.{field}") for field in ("call_id", "name", "input")
            )
            arguments = json.dumps({"input": said}, ensure_ascii=False)
            turn.call(call_id, flat_name(item.get("namespace"), name), arguments)
        elif kind == "function_call":
            known = (*_ECHO, "call_id", "name", "namespace", "arguments", "parsed_arguments")
            refuse_unknown(item, known, f"{place}.", _DIRECT)
            names = ("call_id", "name", "arguments")
            call_id, name, arguments = (as_text(item.get(field), f"{place}.{field}") for field in names)
            turn.call(call_id, flat_name(item.get("namespace"), name), arguments)
        elif kind == "reasoning":
            refuse_unknown(item, (*_ECHO, "summary", "content", "encrypted_content"), f"{place}.")
            turn.thoughts.append(_thought(item, place))
        else:
            turn.texts.append(_assistant_text(item, place))
    return messages if turn is None else [*messages, turn.message]


@dataclass(slots=True)
class _Turn:
    """What the assistant thought, said and called between two messages of others."""

    thoughts: list[str] = field(default_factory=list[str])
    texts: list[str] = field(default_factory=list[str])
    calls: list[Json] = field(default_factory=list[Json])

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call of a tool."""
        self.calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    @property
    def message(self) -> Json:
        message: Json = {"role": "assistant", "content": "".join(self.texts) if self.texts else None}
        message.update({"tool_calls": self.calls} if self.calls else {})
        message.update({"reasoning_content": "".join(self.thoughts)} if any(self.thoughts) else {})
        return message


def _thought(item: Json, place: str) -> str:
    """Return a thought: from its content, else from what the gateway sealed, else from the summary."""
    content, summary = ("".join(str(p.get("text") or "") for p in objects(item.get(n))) for n in ("content", "summary"))
    if content or not item.get("encrypted_content"):
        return content or summary
    where = f"{place}.encrypted_content"
    thought = unsealed(as_text(item["encrypted_content"], where))
    if thought is None and not summary:
        text = (
            f"The encrypted content for item {shown(item.get('id'))} could not be verified ({where!r}): this gateway "
            "did not make it, or did before it was restarted. Leave the item out, or send its 'content'"
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
            texts.append(as_text(part.get("refusal"), f"{where}.refusal"))
        else:
            texts.append(_text(part, where))
    return "".join(texts)


def _text(part: Json, place: str) -> str:
    if part.get("type") not in ("input_text", "output_text", "text"):
        raise untranslatable(f"{place}.type", f"content of type {shown(part.get('type'))} has no counterpart there")
    refuse_unknown(part, _TEXT, f"{place}.")
    return as_text(part.get("text"), f"{place}.text")


def _other(item: Json, kind: object, place: str) -> Json:
    """Return a message that is none of the assistant's."""
    if kind in ("function_call_output", "custom_tool_call_output"):
        refuse_unknown(item, (*_ECHO, "call_id", "output", "name"), f"{place}.", _DIRECT)
        output = item.get("output")
        content = output if isinstance(output, str) else _content(output, f"{place}.output")
        named = {"name": item["name"]} if item.get("name") else {}
        call_id = as_text(item.get("call_id"), f"{place}.call_id")
        return {"role": "tool", "tool_call_id": call_id, **named, "content": content}
    if kind != "message":
        raise untranslatable(f"{place}.type", f"an item of type {shown(kind)} has no counterpart there")
    refuse_unknown(item, (*_ECHO, "role", "content", "phase"), f"{place}.")
    role = _ROLES.get(str(item.get("role")))
    if role is None:
        text = f"'{place}.role' must be one of {', '.join((*_ROLES, 'assistant'))}"
        raise CallFailed(400, text, param=f"{place}.role", code="invalid_value")
    content = item.get("content")
    return {"role": role, "content": content if isinstance(content, str) else _content(content, f"{place}.content")}


def _content(given: object, place: str) -> str | list[Json]:
    """Return parts of text as one text, others as they are."""
    parts: list[Json] = []
    for part, where in as_objects(given, place):
        if part.get("type") == "input_image":
            refuse_unknown(part, ("type", "image_url", "detail", "prompt_cache_breakpoint"), f"{where}.")
            image = {"url": as_text(part.get("image_url"), f"{where}.image_url")}
            image.update({"detail": part["detail"]} if part.get("detail") else {})
            parts.append({"type": "image_url", "image_url": image})
        elif part.get("type") == "input_audio":
            refuse_unknown(part, ("type", "input_audio"), f"{where}.")
            audio = as_object(part.get("input_audio"), f"{where}.input_audio")
            parts.append({"type": "input_audio", "input_audio": audio})
        else:
            parts.append({"type": "text", "text": _text(part, where)})
    return "".join(part["text"] for part in parts) if all(part["type"] == "text" for part in parts) else parts


# --- the rest --------------------------------------------------------------------------------------------------------


def _tool_choice(choice: object, tools: list[Json]) -> Json:
    """Return the fields that say which tools may be called; `tools` are those of the chat."""
    if isinstance(choice, str):
        return {"tool_choice": choice}
    named = as_object(choice, "tool_choice")
    if named.get("type") == "allowed_tools":
        refuse_unknown(named, ("type", "mode", "tools"), "tool_choice.")
        if named.get("mode") not in ("auto", "required"):
            text = "'tool_choice.mode' must be 'auto' or 'required'"
            raise CallFailed(400, text, param="tool_choice.mode", code="invalid_value")
        given = {tool["function"]["name"]: tool for tool in tools}
        allowed = as_objects(named.get("tools"), "tool_choice.tools")
        entries = [entry for entry, _ in allowed if not is_run_by_server(entry)]
        names = [flat_name(entry.get("namespace"), str(entry.get("name"))) for entry in entries]
        if not names or not all(name in given for name in names):
            some = f"it must name some of the request's: {shown(list(given))}"
            text = f"'tool_choice' allows the tools {shown(names)}; {some}"
            raise CallFailed(400, text, param="tool_choice", code="invalid_value")
        return {"tools": [given[name] for name in names], "tool_choice": named["mode"]}
    if is_run_by_server(named):
        raise no_such_choice(named["type"], [named["type"]])
    if named.get("type") not in ("function", "custom"):
        raise untranslatable("tool_choice.type", f"{shown(named.get('type'))} has no counterpart there")
    refuse_unknown(named, ("type", "name", "namespace"), "tool_choice.")
    name = flat_name(named.get("namespace"), as_text(named.get("name"), "tool_choice.name"))
    return {"tool_choice": {"type": "function", "function": {"name": name}}}


def _text_config(text: Json) -> Json:
    refuse_unknown(text, ("format", "verbosity"), "text.")
    chat: Json = {"verbosity": text["verbosity"]} if text.get("verbosity") is not None else {}
    wanted = as_object(text.get("format") or {"type": "text"}, "text.format")
    kind = wanted.get("type")
    schema_fields = ("name", "description", "schema", "strict") if kind == "json_schema" else ()
    refuse_unknown(wanted, ("type", *schema_fields), "text.format.")
    if kind == "json_object":
        chat["response_format"] = {"type": "json_object"}
    elif kind == "json_schema":
        schema = {name: wanted[name] for name in schema_fields if wanted.get(name) is not None}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif kind != "text":
        raise untranslatable("text.format.type", f"{shown(kind)} has no counterpart there")
    return chat


def _reasoning(reasoning: Json) -> Json:
    harmless = {"context": ("auto", "all_turns"), "mode": ("standard",)}
    refuse_unknown(reasoning, ("effort", "summary", "generate_summary"), "reasoning.", harmless)
    return {} if reasoning.get("effort") is None else {"reasoning_effort": reasoning["effort"]}
