"""Reads which tools a request offers, which of them must be called, and what form its reply must have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agentlightning.engine.request.constraint import Constraint, JsonShape
from agentlightning.engine.request.fields import RequestError

Tool = dict[str, Any]


def tools_of(fields: Mapping[str, object]) -> list[Tool] | None:
    """Return the tools that may be called; None if there are none, or none may be called.

    Raises:
        RequestError: they are no list of function tools.
    """
    tools = fields.get("tools", [])
    if not isinstance(tools, list) or not all(_is_function(tool) for tool in cast("list[object]", tools)):
        raise RequestError("'tools' must be a list of function tools, each with a 'name'", param="tools")
    return cast("list[Tool]", tools) if tools and fields.get("tool_choice") != "none" else None


def constraint_of(fields: Mapping[str, object], tools: Sequence[Tool] | None, *, several: bool) -> Constraint | None:
    """Return what the reply must be: calls where `tool_choice` forces one, JSON where `response_format` says so.

    With tools that may but need not be called, a reply in JSON or calls.

    Raises:
        RequestError: a choice or a format that is none, or a tool that is not offered.
    """
    forced, value = _forced(fields, tools), _value(fields)
    if forced is not None:
        named = isinstance(fields["tool_choice"], dict) and len(forced) == 1
        return Constraint(None, _functions(forced), several and not named, "tools")
    if value is None:
        return None
    return Constraint(value, _functions(tools or []), several)


def _is_function(tool: object) -> bool:
    function = cast("Tool", tool).get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(cast("Tool", function).get("name"), str)


def _forced(fields: Mapping[str, object], tools: Sequence[Tool] | None) -> Sequence[Tool] | None:
    """Return the tools of which one must be called; None if none must be."""
    choice = fields.get("tool_choice", "auto")
    if choice in ("auto", "none"):
        return None
    name: object = None
    if isinstance(choice, dict):
        function = cast("Tool", choice).get("function")
        name = cast("Tool", function).get("name") if isinstance(function, dict) else None
    if choice != "required" and not isinstance(name, str):
        raise RequestError(
            f"'tool_choice' must be 'auto', 'none', 'required' or "
            f'{{"type": "function", "function": {{"name": ...}}}}, not {json.dumps(choice)}',
            param="tool_choice",
        )
    offered = [tool["function"]["name"] for tool in tools or []]
    if not offered:
        raise RequestError("'tool_choice' forces a call, and 'tools' offers none", param="tool_choice")
    if name is None:
        return tools
    if name not in offered:
        text = f"'tool_choice' names {name!r}; 'tools' offers {', '.join(map(repr, offered))}"
        raise RequestError(text, param="tool_choice")
    return [tool for tool in tools or [] if tool["function"]["name"] == name][:1]


def _functions(tools: Sequence[Tool]) -> list[tuple[str, JsonShape]]:
    shapes: list[tuple[str, JsonShape]] = []
    for tool in tools:
        function = cast("Tool", tool["function"])
        parameters: object = function.get("parameters") or {}
        if not isinstance(parameters, dict) or cast("Tool", parameters).get("type", "object") != "object":
            text = f"the parameters of the tool {function['name']!r} must be a JSON schema of type 'object'"
            raise RequestError(text, param="tools")
        schema = {**cast("Tool", parameters), "type": "object"}
        shapes.append((function["name"], JsonShape(schema, strict=function.get("strict") is True)))
    return shapes


def _value(fields: Mapping[str, object]) -> JsonShape | None:
    """Return the JSON value that `response_format` asks for; None if it asks for text."""
    given = fields.get("response_format", {"type": "text"})
    kind = cast("Tool", given).get("type") if isinstance(given, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return JsonShape({"type": "object"})
    form = cast("Tool", given).get("json_schema") if kind == "json_schema" else None
    schema = cast("Tool", form).get("schema", {}) if isinstance(form, dict) else None
    if not isinstance(schema, dict):
        raise RequestError(
            "'response_format' must be of type 'text', 'json_object', or 'json_schema' with "
            f'{{"name": ..., "schema": {{...}}}} in \'json_schema\'; got {json.dumps(given)[:200]}',
            param="response_format",
        )
    return JsonShape(cast("Tool", schema), strict=cast("Tool", form).get("strict") is True)
