"""Tools that only a vendor's server can run, or that a vendor's models alone know: a model of ours is not shown them.

A `tool_choice` of such a tool, or of any tool where none is left, is refused: no reply could hold the call.
Tools that an agent runs itself, though only a vendor's models know them (`bash_20250124`), are none of these.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentlightning.llm_proxy.dialects.json_values import Json, entries_of, fields_of, objects
from agentlightning.llm_proxy.dialects.translation import note_ignored
from agentlightning.llm_proxy.replies import CallFailed

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
    """True for a tool of such a type, in any dialect."""
    kind = tool.get("type")
    return isinstance(kind, str) and (kind in _TYPES or _DATED.fullmatch(kind) is not None)


def adds_tools(item: object) -> bool:
    """True for an item of the Responses API that adds tools to those of the request."""
    return fields_of(item).get("type") == "additional_tools"


def server_tools(request: Json) -> list[tuple[str, str]]:
    """Return type and place of each such tool of a request, also of those in a namespace."""
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
    """Let a request pass that has no such tool.

    Raises:
        CallFailed: 400 that names the first one.
    """
    for kind, place in server_tools(request):
        text = (
            f"'{place}.type' cannot be served: only a vendor's server can run {kind!r}, and this policy refuses such "
            "tools; leave it out, or give the policy server_tools='drop'"
        )
        raise CallFailed(400, text, param=f"{place}.type", code="unsupported_value")


def with_choice(chat: Json, tools: list[tuple[str, str]]) -> Json:
    """Return a chat completion of which `tools`, as `server_tools` gives them, were left out.

    Raises:
        CallFailed: 400, it names a tool that was left out, or asks for one where none is left.
    """
    if not tools:
        return chat
    left_out = sorted({kind for kind, _ in tools})
    for kind in left_out:
        note_ignored(f"tools of type {kind}")
    choice = chat.get("tool_choice")
    names = [fields_of(tool.get("function")).get("name") for tool in objects(chat.get("tools"))]
    named = fields_of(fields_of(choice).get("function")).get("name")
    if (choice == "required" and not names) or (named is not None and named not in names):
        raise no_such_choice(named if named is not None else choice, left_out)
    if names:
        return chat
    needless = ("tools", "tool_choice", "parallel_tool_calls")  # which servers refuse without tools
    return {name: value for name, value in chat.items() if name not in needless}


def no_such_choice(choice: object, left_out: Sequence[str]) -> CallFailed:
    """Return the refusal of a `tool_choice` that asks for a tool which is left out."""
    text = (
        f"'tool_choice' asks for {choice!r}, but only a vendor's server can run {', '.join(left_out)}, so that the "
        "model does not see it; name a function of the request, or choose 'auto'"
    )
    return CallFailed(400, text, param="tool_choice", code="unsupported_value")


def without_server_tools(request: Json) -> Json:
    """Return a chat completion without such tools.

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
