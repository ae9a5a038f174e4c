"""Shared parts of the translations to chat completions: each field of a request is read, or refused by name.

Tools that only a vendor's server can run are not shown to our models. A `tool_choice` of such a tool, or of any tool
if none remains, is refused, because no reply could contain the call. Tools that the agent runs itself are not affected,
even if only a vendor's models know them (`bash_20250124`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agentlightning.llm_proxy.access.limits import shown
from agentlightning.llm_proxy.dialects.json_values import (
    Json,
    entries_of,
    fields_of,
    is_list,
    is_object,
    objects,
    wrong_type,
)
from agentlightning.llm_proxy.replies import CallFailed

logger = logging.getLogger(__name__)

Harmless = Mapping[str, tuple[object, ...]]
"""Values of fields that request the default behaviour."""
_noted: set[str] = set()


# --- fields ----------------------------------------------------------------------------------------------------------


def untranslatable(field: str, why: str) -> CallFailed:
    """Return the error for a field that chat completions cannot express."""
    text = f"{field!r} is not supported: {why}. The model server of this gateway supports chat completions only"
    return CallFailed(400, text, param=field, code="unsupported_value")


def note_ignored(field: str) -> None:
    """Log once per process that a field is accepted and has no effect; only for names in our lists."""
    kind = re.sub(r"\[\d+\]", "[]", field)
    if kind not in _noted:
        _noted.add(kind)
        logger.warning("the field %r of requests is ignored; logged once per process", kind)


def refuse_unknown(
    request: Json,
    known: Iterable[str],
    place: str = "",
    harmless: Harmless | None = None,
    ignored: Iterable[str] = (),
) -> None:
    """Refuse a request with an unsupported field. `harmless` values of other fields request the default behaviour.

    An `ignored` field is accepted: it does not change the meaning of the reply.

    Raises:
        CallFailed: 400 that names the field.
    """
    harmless = harmless or {}
    for name, value in request.items():
        if name in known or value is None or value in harmless.get(name, ()):
            continue
        if name in ignored:
            note_ignored(place + name)
            continue
        instead = ", ".join(repr(other) for other in harmless.get(name, ()))
        why = f"{shown(value)} has no equivalent" if instead else "it has no equivalent"
        raise untranslatable(place + name, f"{why}; supported values: {instead}" if instead else why)


def as_object(value: object, place: str) -> Json:
    """Return an object.

    Raises:
        CallFailed: 400, it is not an object.
    """
    if not is_object(value):
        raise wrong_type(place, "an object")
    return value


def as_objects(value: object, place: str) -> list[tuple[Json, str]]:
    """Return the objects of a list, each with its place.

    Raises:
        CallFailed: 400, it is not a list of objects.
    """
    if not is_list(value):
        raise wrong_type(place, "a list")
    places = [(entry, f"{place}[{index}]") for index, entry in enumerate(value)]
    return [(as_object(entry, where), where) for entry, where in places]


def as_text(value: object, place: str) -> str:
    """Return a string.

    Raises:
        CallFailed: 400, it is not a string.
    """
    if not isinstance(value, str):
        raise wrong_type(place, "a string")
    return value


def text_in(fields: Json, name: str, place: str) -> str:
    """Return the string in a field of the object at `place`.

    Raises:
        CallFailed: 400, it is not a string.
    """
    return as_text(fields.get(name), f"{place}.{name}")


def some_of(fields: Json, names: Iterable[str]) -> Json:
    """Return the fields of these names that are present and not null."""
    return {name: fields[name] for name in names if fields.get(name) is not None}


# --- messages and tools ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class AssistantTurn:
    """One turn of the assistant: its thoughts, text and calls in one message of a chat."""

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


def texts_joined(parts: list[Json], between: str) -> str | list[Json]:
    """Return parts of text as one text, other parts unchanged."""
    return between.join(part["text"] for part in parts) if all(part["type"] == "text" for part in parts) else parts


def named_function(name: str) -> Json:
    """Return the `tool_choice` of one function."""
    return {"tool_choice": {"type": "function", "function": {"name": name}}}


# --- tools of servers ------------------------------------------------------------------------------------------------

_DATED = re.compile(
    r"(web_search|web_search_preview|web_fetch|code_execution|tool_search_tool_regex|tool_search_tool_bm25|advisor)"
    r"_(\d{8}|\d{4}_\d\d_\d\d)"
)
_TYPES = frozenset(
    (
        *("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation"),
        *("computer_use", "computer_use_preview", "local_shell", "mcp", "mcp_toolset", "tool_search"),
    )
)


def is_run_by_server(tool: Json) -> bool:
    """True for a tool that only a vendor's server can run, in any dialect."""
    kind = tool.get("type")
    return isinstance(kind, str) and (kind in _TYPES or _DATED.fullmatch(kind) is not None)


def adds_tools(item: object) -> bool:
    """True for an item of the Responses API that adds tools to those of the request."""
    return fields_of(item).get("type") == "additional_tools"


def server_tools(request: Json) -> list[tuple[str, str]]:
    """Return the type and the place of each such tool of a request, including those in a namespace."""
    tools = _server_tools(request.get("tools"), "tools")
    for index, item in enumerate(entries_of(request.get("input"))):
        tools += _server_tools(fields_of(item).get("tools"), f"input[{index}].tools") if adds_tools(item) else []
    return tools


def _server_tools(tools: object, place: str) -> list[tuple[str, str]]:
    kinds: list[tuple[str, str]] = []
    for index, tool in enumerate(fields_of(entry) for entry in entries_of(tools)):
        where = f"{place}[{index}]"
        if is_run_by_server(tool):
            kinds.append((tool["type"], where))
        elif tool.get("type") == "namespace":
            kinds += _server_tools(tool.get("tools"), f"{where}.tools")
    return kinds


def refuse_server_tools(request: Json) -> None:
    """Check that a request has no tool that only a vendor's server can run.

    Raises:
        CallFailed: 400, it has one; names the first.
    """
    for kind, place in server_tools(request):
        text = (
            f"'{place}.type' is not supported: only a vendor's server can run {kind!r}, and this policy refuses such "
            "tools. Remove the tool, or set server_tools='drop' in the policy"
        )
        raise CallFailed(400, text, param=f"{place}.type", code="unsupported_value")


def with_choice(chat: Json, tools: list[tuple[str, str]]) -> Json:
    """Return a chat completion without `tools`, which `server_tools` returned.

    Raises:
        CallFailed: 400, the choice is an excluded tool, or requires a tool when none remains.
    """
    if not tools:
        return chat
    left_out = sorted({kind for kind, _ in tools})
    for kind in left_out:
        note_ignored(f"tools of type {kind}")
    choice = chat.get("tool_choice")
    names = [fields_of(tool.get("function")).get("name") for tool in objects(chat.get("tools"))]
    function_name = fields_of(fields_of(choice).get("function")).get("name")
    if (choice == "required" and not names) or (function_name is not None and function_name not in names):
        raise no_such_choice(function_name if function_name is not None else choice, left_out)
    if names:
        return chat
    needless = ("tools", "tool_choice", "parallel_tool_calls")  # which servers refuse without tools
    return {name: value for name, value in chat.items() if name not in needless}


def no_such_choice(choice: object, left_out: Sequence[str]) -> CallFailed:
    """Return the error for a `tool_choice` of an excluded tool."""
    text = (
        f"'tool_choice' is {choice!r}, but only a vendor's server can run {', '.join(left_out)}, which the model "
        "therefore does not see. Choose a function of the request, or 'auto'"
    )
    return CallFailed(400, text, param="tool_choice", code="unsupported_value")


def without_server_tools(request: Json) -> Json:
    """Return a chat completion without tools that only a vendor's server can run.

    Raises:
        CallFailed: as `with_choice`.
    """
    if not (unseen := server_tools(request)):
        return request
    choice = fields_of(request.get("tool_choice"))
    if is_run_by_server(choice):
        raise no_such_choice(choice["type"], [kind for kind, _ in unseen])
    tools = [tool for tool in entries_of(request["tools"]) if not is_run_by_server(fields_of(tool))]
    return with_choice({**request, "tools": tools}, unseen)
