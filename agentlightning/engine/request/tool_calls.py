"""Converts tool calls between the text of a model and the form of the OpenAI API.

The syntax is the one that the model's chat template writes (`syntax_of`), named as in vLLM's `--tool-call-parser`:

- `hermes`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of times, after free text (Hermes,
  Qwen 2.5 and 3, the demo); a list of such objects in one pair of tags is SmolLM's form.
- `qwen3_coder`: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`. A value is of
  the type that the tool's schema gives: a text stays one, `123` too; without a type it is read as JSON if it is one.
- `llama3_json`: a reply that is nothing but `{"name": ..., "parameters": {...}}`, after `<|python_tag|>` or not,
  or several of them parted by `;`. Plain JSON with `arguments`, or a list, is read as well.

What does not parse stays text: a malformed call is the policy's own mistake, and the agent gets to see it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, cast

Syntax = Literal["hermes", "qwen3_coder", "llama3_json"]

CALL_OPENING: Final = "<tool_call>"
CALL_CLOSING: Final = "</tool_call>"
_IMAGES: Final = ("image_url", "image", "input_image")
_PYTHON_TAG: Final = "<|python_tag|>"
_FUNCTION: Final = re.compile(r"<function=([^>\n]+)>(.*)</function>", re.DOTALL)
_PARAMETER: Final = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_CALL: Final = re.compile(f"{CALL_OPENING}(.*?){CALL_CLOSING}", re.DOTALL)

_TYPES: Final[dict[type, set[str]]] = {
    str: set(),  # with quotes of its own: the text is that with the quotes
    int: {"integer", "number"},
    float: {"number"},
    bool: {"boolean"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}
"""The names in JSON schema of what JSON is read as."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call: the tool's name and its arguments as JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply of the model: text (None if there is none beside the calls) and calls in order."""

    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()


def syntax_of(template: str) -> Syntax:
    """Return how a chat template writes calls; `hermes` if it does not tell."""
    if "<function=" in template:
        return "qwen3_coder"
    return "llama3_json" if CALL_OPENING not in template and '"parameters"' in template else "hermes"


def parse_reply(text: str, syntax: Syntax = "hermes", tools: Iterable[Mapping[str, Any]] = ()) -> Reply:
    """Return text and tool calls of a completion; all of it is text if any call in it is malformed. `tools` are those
    that were offered, whose schemas say of which type a value without quotes is."""
    try:
        if syntax == "llama3_json":
            calls = _calls_in(text.strip().removeprefix(_PYTHON_TAG), tagged=False)
            return Reply(None, tuple(calls)) if calls else Reply(content=text)
        read = _calls_in if syntax == "hermes" else partial(_calls_in_tags, schemas=_parameters_of(tools))
        calls = [call for body in _CALL.findall(text) for call in read(body)]
    except (ValueError, RecursionError):
        return Reply(content=text)
    return Reply(_CALL.sub("", text).strip() or None, tuple(calls)) if calls else Reply(content=text)


def _calls_in(text: str, *, tagged: bool = True) -> list[ToolCall]:
    """Return the calls that a text of nothing but JSON holds: one, a list, or several parted by semicolons.

    Without tags a call must name its arguments, if there are none too: else it may be any answer with a name in it.
    """
    calls: list[ToolCall] = []
    rest = text.strip()
    while rest:
        value, end = json.JSONDecoder().raw_decode(rest)
        calls += [
            _call_of(one, tagged) for one in (cast("list[object]", value) if isinstance(value, list) else [value])
        ]
        rest = rest[end:].lstrip()
        if rest and not rest.startswith(";"):
            raise ValueError("calls are followed by text")
        rest = rest[1:].lstrip()
    return calls


def _call_of(value: object, tagged: bool) -> ToolCall:
    fields = cast("dict[str, object]", value) if isinstance(value, dict) else {}
    name, arguments = fields.get("name"), fields.get("arguments", fields.get("parameters", {} if tagged else None))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("a call has a name and arguments")
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _parameters_of(tools: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, object]]:
    """Return the schemas of each tool's parameters."""
    functions = [_fields(tool.get("function")) for tool in tools]
    return {str(each.get("name")): _fields(_fields(each.get("parameters")).get("properties")) for each in functions}


def _calls_in_tags(text: str, schemas: Mapping[str, Mapping[str, object]]) -> list[ToolCall]:
    function = _FUNCTION.fullmatch(text.strip())
    if function is None:
        raise ValueError("a call is one <function=...>")
    types = {key: _types_of(schema) for key, schema in schemas.get(function[1], {}).items()}
    arguments = {key: _value(value, types.get(key, set())) for key, value in _PARAMETER.findall(function[2])}
    if _PARAMETER.sub("", function[2]).strip():
        raise ValueError("a function holds parameters alone")
    return [ToolCall(function[1], json.dumps(arguments, ensure_ascii=False))]


def _types_of(schema: object) -> set[str]:
    """Return the JSON types that a schema allows; none if it does not say."""
    fields = _fields(schema)
    given = fields.get("type")
    types = {kind for kind in (given if isinstance(given, list) else [given]) if isinstance(kind, str)}
    for name in ("anyOf", "oneOf"):
        branches = fields.get(name)
        types.update(*(_types_of(branch) for branch in (branches if isinstance(branches, list) else [])))
    return types


def _value(text: str, types: set[str]) -> object:
    """Return the value that stands in a tag; `types` are those that it may have, none if all."""
    if types == {"string"}:
        return text
    try:
        value = json.loads(text, parse_constant=_no_json)
    except ValueError:
        return text
    return text if "string" in types and _TYPES[type(value)].isdisjoint(types) else value


def _no_json(word: str) -> object:
    raise ValueError(f"{word} is no JSON")


def _fields(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def messages_for_template(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return OpenAI messages as chat templates expect them: arguments as objects, text parts joined to one text.

    Raises:
        ValueError: A message has no role, arguments are not a JSON object, or a part of the content is not text.
    """
    shaped: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{where}: 'role' is missing")
        shaped.append({**message, "content": _text(message.get("content"), where)})
        if message.get("tool_calls"):
            shaped[-1]["tool_calls"] = [_call_for_template(call, where) for call in message["tool_calls"]]
    return shaped


def _text(content: object, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = cast("list[Mapping[str, Any]]", content)
        if all(isinstance(part, dict) and part.get("type") == "text" and "text" in part for part in parts):
            return "".join(part["text"] for part in parts)
        if images := [part for part in parts if isinstance(part, dict) and part.get("type") in _IMAGES]:
            raise ValueError(
                f"{where}: a part of 'content' is of type {images[0]['type']!r}, and images are refused: the rows that "
                "the policy learns from hold tokens of text alone. Put what it shows into words, or ask another model "
                "of the gateway for them"
            )
    raise ValueError(f"{where}: 'content' must be a text or a list of text parts; the model reads nothing else")


def _call_for_template(call: Mapping[str, Any], where: str) -> dict[str, object]:
    try:
        function = call["function"]
        arguments: object = json.loads(function["arguments"] or "{}")
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{where}: a tool call needs 'function' with 'name' and JSON 'arguments' ({error})") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}: the arguments of a tool call must be a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}
