"""A request of Anthropic's messages as a chat completion. Each field is read, or refused by its name.

Source: https://platform.claude.com/docs/en/api/messages, versions 2023-06-01 and 2026-10-21. What is not one to one:

- `temperature`, `top_p` and `top_k`, which the second version no longer has, are served in both.
- Without effect, since it says nothing about the answer: `service_tier`, `speed`, `cache_control` wherever it stands,
  `eager_input_streaming` of a tool, the `signature` of a thought, what the client library adds to a block that it has
  parsed (`parsed_output`). A header `anthropic-beta` only unlocks fields, each of which is judged here by itself.
- Ignored, and said so once in the log: what bounds or compacts a context, which comes whole here (`context_management`,
  `compaction`), where and for whom a request is served (`inference_geo`, `workspace_id`, `user_profile_id`,
  `billing_policy`, `container` without skills), what follows a refusal (`fallbacks`, `fallback_credit_token`),
  `diagnostics`, `betas`, and `defer_loading` of a tool: all tools are shown at once, and a `tool_reference` is the
  tool's name. `redacted_thinking` of another server cannot be read and is left out.
- Tools that only Anthropic's server can run (`server_tools`) are not shown to the model, which is said once in the log.
- A value that says what holds anyway (a caller that is `direct`, a tool that is `custom`) is let pass.
- A thinking budget is bounded by `max_tokens` alone, and `display` hides no thoughts.
- An error flag of a tool's result becomes the word "Error:" before its text.
- A tool's result may hold images, which not every model server takes in that place; it says so itself.
- A `document` of text and a `search_result` become text, their title first; without citations (`enabled` is false).
- A last message of the assistant (prefill) is gone on with by engines that can (vLLM, SGLang), else refused.
- Turns of one role that follow each other become one, as Anthropic combines them.
"""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

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
from agentlightning.llm_proxy.dialects.json_values import Json, entries_of, wrong_type
from agentlightning.llm_proxy.dialects.server_tools import is_run_by_server, server_tools, with_choice
from agentlightning.llm_proxy.replies import CallFailed

SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
READ = ("messages", "system", "stop_sequences", "tools", "tool_choice", "thinking", "metadata", "output_config")
THREAD_REFUSED = "thread_unsupported_request"
"""The code with which clients go on by themselves, without a thread and with the whole conversation."""
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
_TEXT = ("type", "text", "cache_control", "parsed_output")
_DIRECT: Harmless = {"caller": ({"type": "direct"},)}
_TOOL = ("type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming")
_HARMLESS_TOOL: Harmless = {"allowed_callers": (["direct"], []), "defer_loading": (False,), "input_examples": ([],)}
_IGNORED_OF_TOOL = ("defer_loading",)


def chat_request(request: Json) -> Json:
    """Return the request as a chat completion.

    Raises:
        CallFailed: 400 that names the field that cannot be translated.
    """
    if request.get("thread") is not None:
        text = "'thread' cannot be served: nothing is stored here between calls; send the whole conversation again"
        raise CallFailed(400, text, param="thread", code=THREAD_REFUSED)
    refuse_unknown(request, (*SAME, *READ, *WITHOUT_EFFECT, "container"), harmless=HARMLESS, ignored=IGNORED)
    if request.get("container") is not None:
        _ignore_container(request["container"])
    chat: Json = {name: request[name] for name in SAME if request.get(name) is not None}
    messages: list[Json] = []
    if request.get("system") is not None:
        messages.append({"role": "system", "content": _texts(request["system"], "system")})
    chat["messages"] = [*messages, *_messages(request["messages"])]
    if request.get("stop_sequences"):
        chat["stop"] = entries_of(request["stop_sequences"])
        if not chat["stop"] or not all(isinstance(entry, str) for entry in chat["stop"]):
            raise wrong_type("stop_sequences", "a list of strings")
    if request.get("tools"):
        tools: list[Json] = []
        for tool, place in as_objects(request["tools"], "tools"):
            if is_run_by_server(tool):
                continue
            if tool.get("type") not in (None, "custom"):
                why = f"only Anthropic's models know the tool {shown(tool['type'])}; give it an 'input_schema' instead"
                raise untranslatable(f"{place}.type", why)
            refuse_unknown(tool, _TOOL, f"{place}.", _HARMLESS_TOOL, _IGNORED_OF_TOOL)
            schema = as_object(tool.get("input_schema"), f"{place}.input_schema")
            function: Json = {"name": as_text(tool.get("name"), f"{place}.name"), "parameters": schema}
            function.update({name: tool[name] for name in ("description", "strict") if tool.get(name) is not None})
            tools.append({"type": "function", "function": function})
        chat.update({"tools": tools} if tools else {})
    for name, read in _OBJECTS.items():
        if request.get(name) is not None:
            chat.update(read(as_object(request[name], name)))
    chat = with_choice(chat, (kind for kind, _ in server_tools(request)))
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat


def with_prefill(chat: Json) -> Json:
    """Return a chat that goes on with a last message of the assistant, in the words of vLLM and SGLang."""
    if not chat["messages"] or chat["messages"][-1]["role"] != "assistant":
        return chat
    return {**chat, "add_generation_prompt": False, "continue_final_message": True}


def check_prefill(chat: Json, *, goes_on: bool) -> None:
    """Let a chat pass that does not end with a message of the assistant, or whose engine goes on with it.

    Raises:
        CallFailed: 400, the engine would answer that message.
    """
    if chat.get("continue_final_message") and not goes_on:
        why = "the engine there answers a last message of the assistant and does not go on with it (prefill)"
        raise untranslatable("messages", why)


def _ignore_container(container: object) -> None:
    """Let pass which container tools of Anthropic's would run in, as they do not run here; skills are refused."""
    if not isinstance(container, str):
        refuse_unknown(as_object(container, "container"), ("id",), "container.", {"skills": ([],)})
    note_ignored("container")


def _texts(content: object, place: str) -> str:
    """Return text, or blocks of text as one."""
    if isinstance(content, str):
        return content
    return "\n\n".join(_text(block, where) for block, where in as_objects(content, place))


def _text(block: Json, place: str) -> str:
    if block.get("type") != "text":
        raise untranslatable(f"{place}.type", f"a block of type {shown(block.get('type'))} has no counterpart there")
    refuse_unknown(block, _TEXT, f"{place}.", {"citations": ([],)})
    return as_text(block.get("text"), f"{place}.text")


def _messages(given: object) -> list[Json]:
    """Return the messages of a chat: turns of the user or the assistant that follow each other are one turn."""
    turns: list[Json] = []
    for message, place in as_objects(given, "messages"):
        refuse_unknown(message, ("role", "content"), f"{place}.")
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            text = f"'{place}.role' must be 'user', 'assistant' or 'system'"
            raise CallFailed(400, text, param=f"{place}.role", code="invalid_value")
        if role == "system" or isinstance(content, str):
            turns.append({"role": role, "content": _texts(content, f"{place}.content")})
        else:
            blocks = as_objects(content, f"{place}.content")
            turns += [_assistant(blocks)] if role == "assistant" else _user(blocks)
    messages: list[Json] = []
    for role, grouped in groupby(turns, key=lambda turn: turn["role"]):
        same = list(grouped)
        if len(same) == 1 or role not in ("user", "assistant"):
            messages += same
        elif role == "user":
            parts = [part for turn in same for part in _parts(turn["content"])]
            messages.append({"role": "user", "content": _content(parts)})
        else:
            turn: Json = {"role": "assistant", "content": "".join(turn["content"] or "" for turn in same) or None}
            if any("reasoning_content" in turn for turn in same):
                turn["reasoning_content"] = "".join(turn.get("reasoning_content", "") for turn in same)
            if any("tool_calls" in turn for turn in same):
                turn["tool_calls"] = [call for turn in same for call in turn.get("tool_calls", ())]
            messages.append(turn)
    return messages


def _parts(content: Any) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _content(parts: list[Json]) -> str | list[Json]:
    """Return parts of text as one text, others as they are."""
    return "\n\n".join(part["text"] for part in parts) if all(part["type"] == "text" for part in parts) else parts


def _assistant(blocks: list[tuple[Json, str]]) -> Json:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for block, place in blocks:
        kind = block.get("type")
        if kind == "thinking":
            refuse_unknown(block, ("type", "thinking", "signature", "cache_control"), f"{place}.")
            thoughts.append(as_text(block.get("thinking"), f"{place}.thinking"))
        elif kind == "redacted_thinking":
            refuse_unknown(block, ("type", "data", "cache_control"), f"{place}.")
            note_ignored(f"{place}.data")
        elif kind == "tool_use":
            refuse_unknown(block, ("type", "id", "name", "input", "cache_control"), f"{place}.", _DIRECT)
            arguments = json.dumps(as_object(block.get("input") or {}, f"{place}.input"), ensure_ascii=False)
            function = {"name": as_text(block.get("name"), f"{place}.name"), "arguments": arguments}
            calls.append({"id": as_text(block.get("id"), f"{place}.id"), "type": "function", "function": function})
        else:
            texts.append(_text(block, place))
    message: Json = {"role": "assistant", "content": "".join(texts) or None}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(blocks: list[tuple[Json, str]]) -> list[Json]:
    """Return the results of tools as messages of their own, in front of what else the user says."""
    results: list[Json] = []
    for block, place in blocks:
        if block.get("type") != "tool_result":
            continue
        refuse_unknown(block, ("type", "tool_use_id", "content", "is_error", "cache_control"), f"{place}.")
        content = "" if block.get("content") is None else block["content"]
        if not isinstance(content, str):
            content = _content([_result(part, where) for part, where in as_objects(content, f"{place}.content")])
        if block.get("is_error"):
            is_text = isinstance(content, str)
            content = f"Error: {content}" if is_text else [{"type": "text", "text": "Error:"}, *content]
        tool_use_id = as_text(block.get("tool_use_id"), f"{place}.tool_use_id")
        results.append({"role": "tool", "tool_call_id": tool_use_id, "content": content})
    parts = [_part(block, place) for block, place in blocks if block.get("type") != "tool_result"]
    return [*results, {"role": "user", "content": _content(parts)}] if parts else results


def _result(block: Json, place: str) -> Json:
    """Return a part of a tool's result."""
    if block.get("type") != "tool_reference":
        return _part(block, place)
    refuse_unknown(block, ("type", "tool_name", "cache_control"), f"{place}.")
    return {"type": "text", "text": as_text(block.get("tool_name"), f"{place}.tool_name")}


def _part(block: Json, place: str) -> Json:
    if block.get("type") in ("document", "search_result"):
        return {"type": "text", "text": _document(block, place)}
    if block.get("type") != "image":
        return {"type": "text", "text": _text(block, place)}
    refuse_unknown(block, ("type", "source", "cache_control"), f"{place}.")
    place = f"{place}.source"
    source = as_object(block.get("source"), place)
    if source.get("type") == "url":
        refuse_unknown(source, ("type", "url"), f"{place}.")
        url = as_text(source.get("url"), f"{place}.url")
    elif source.get("type") == "base64":
        refuse_unknown(source, ("type", "media_type", "data"), f"{place}.")
        media_type = as_text(source.get("media_type"), f"{place}.media_type")
        url = f"data:{media_type};base64,{as_text(source.get('data'), f'{place}.data')}"
    else:
        raise untranslatable(f"{place}.type", f"an image from {shown(source.get('type'))} has no counterpart there")
    return {"type": "image_url", "image_url": {"url": url}}


def _document(block: Json, place: str) -> str:
    """Return a document of text, or a result of a search, as text: what it is called, then what it says."""
    harmless: Harmless = {"citations": ({}, {"enabled": False})}
    if block["type"] == "search_result":
        refuse_unknown(block, ("type", "content", "source", "title", "cache_control"), f"{place}.", harmless)
        said = _texts(block.get("content"), f"{place}.content")
        return "\n\n".join([*(as_text(block.get(name), f"{place}.{name}") for name in ("title", "source")), said])
    refuse_unknown(block, ("type", "source", "title", "context", "cache_control"), f"{place}.", harmless)
    named = [as_text(block[name], f"{place}.{name}") for name in ("title", "context") if block.get(name) is not None]
    block_place, place = place, f"{place}.source"
    source = as_object(block.get("source"), place)
    if source.get("type") == "text":
        refuse_unknown(source, ("type", "data"), f"{place}.", {"media_type": ("text/plain",)})
        return "\n\n".join([*named, as_text(source.get("data"), f"{place}.data")])
    if source.get("type") == "content":
        refuse_unknown(source, ("type", "content"), f"{place}.")
        return "\n\n".join([*named, _texts(source.get("content"), f"{place}.content")])
    why = f"a document from {shown(source.get('type'))} has no counterpart there; one of text or content has"
    raise untranslatable(f"{block_place}.type", why)


def _tool_choice(choice: Json) -> Json:
    kind = choice.get("type")
    named = ("name",) if kind == "tool" else ()
    refuse_unknown(choice, ("type", "disable_parallel_tool_use", *named), "tool_choice.")
    chat: Json = {}
    if kind == "tool":
        name = as_text(choice.get("name"), "tool_choice.name")
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in _CHOICES:
        chat["tool_choice"] = _CHOICES[kind]
    else:
        raise untranslatable("tool_choice.type", f"{shown(kind)} is none of auto, any, tool and none")
    if choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    return chat


def _thinking(thinking: Json) -> Json:
    """Return what chat templates call it: Qwen and most others in one way, DeepSeek and Granite in the other."""
    refuse_unknown(thinking, ("type", "budget_tokens", "display"), "thinking.")
    if (thinks := _THINKS.get(str(thinking.get("type")))) is None:
        raise untranslatable("thinking.type", f"{shown(thinking.get('type'))} is none of {', '.join(_THINKS)}")
    return {"chat_template_kwargs": {"enable_thinking": thinks, "thinking": thinks}}


def _output(config: Json) -> Json:
    refuse_unknown(config, ("effort", "format"), "output_config.")
    chat: Json = {}
    if config.get("effort") is not None:
        chat["reasoning_effort"] = config["effort"]
    if config.get("format") is not None:
        wanted = as_object(config["format"], "output_config.format")
        refuse_unknown(wanted, ("type", "schema"), "output_config.format.")
        if wanted.get("type") != "json_schema":
            raise untranslatable("output_config.format.type", f"{shown(wanted.get('type'))} is not 'json_schema'")
        schema = {"name": "output", "strict": True, "schema": wanted.get("schema")}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return chat


def _user_of(metadata: Json) -> Json:
    refuse_unknown(metadata, ("user_id",), "metadata.")
    return {"user": metadata["user_id"]} if metadata.get("user_id") else {}


_OBJECTS = {"tool_choice": _tool_choice, "thinking": _thinking, "output_config": _output, "metadata": _user_of}
"""Fields that are objects, and what each becomes in a chat completion."""
