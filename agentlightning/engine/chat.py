"""Converts between messages and tokens: renders prompts, reads completions as messages with tool calls.

Tool calls have the syntax of the model's chat template. The names are those of vLLM's `--tool-call-parser`:

- `hermes`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of times, after free text (Hermes,
  Qwen 2.5 and 3, the demo); a list of such objects in one pair of tags is SmolLM's form.
- `qwen3_coder`: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`. A value has
  the type in the tool's schema: a string stays a string, even `123`; without a type, valid JSON is parsed.
- `llama3_json`: a reply that consists of `{"name": ..., "parameters": {...}}`, with or without `<|python_tag|>`
  before it, or of several separated by `;`. Plain JSON with `arguments`, or a list, is also read.

Text that does not parse remains text: a malformed call is the policy's mistake, and the agent sees it.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from agentlightning.engine.request import RequestError

Syntax = Literal["hermes", "qwen3_coder", "llama3_json"]

CALL_OPENING: Final = "<tool_call>"
CALL_CLOSING: Final = "</tool_call>"
_RESERVED: Final = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"} - {"kwargs"}
"""Reserved names, which cannot be variables of the template."""
_IMAGES: Final = ("image_url", "image", "input_image")
_PYTHON_TAG: Final = "<|python_tag|>"
_FUNCTION: Final = re.compile(r"<function=([^>\n]+)>(.*)</function>", re.DOTALL)
_PARAMETER: Final = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_CALL: Final = re.compile(f"{CALL_OPENING}(.*?){CALL_CLOSING}", re.DOTALL)
_TYPES: Final[dict[type, set[str]]] = {  # the JSON schema names of JSON types
    str: set(),  # a value with quotes: they are part of the string
    int: {"integer", "number"},
    float: {"number"},
    bool: {"boolean"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call."""

    name: str
    arguments: str
    """JSON."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply of the model."""

    content: str | None
    """None if the reply has only calls."""
    tool_calls: tuple[ToolCall, ...] = ()


class ChatFormat:
    """The chat template and vocabulary of one tokenizer. Used by one thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def copy(self) -> ChatFormat:
        """Return a copy for another thread, because two threads must not use a fast tokenizer concurrently."""
        return ChatFormat(copy.deepcopy(self._tokenizer))

    def template_reads(self, name: str) -> bool:
        """Return whether the chat template contains the name of a variable."""
        return name in str(self._tokenizer.chat_template)

    def prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_fields: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of the prompt. `template_fields` are additional variables of the template.

        Raises:
            RequestError: a message is malformed, the template rejects the conversation, or a variable is reserved.
        """
        if reserved := sorted(_RESERVED & (template_fields or {}).keys()):
            raise RequestError(
                f"'chat_template_kwargs' accepts only variables of the template; remove {', '.join(reserved)}",
                param="chat_template_kwargs",
            )
        try:
            text = self._tokenizer.apply_chat_template(
                messages_for_template(messages),
                tools=cast("list[Any]", list(tools)) if tools else None,
                add_generation_prompt=True,
                tokenize=False,
                **(template_fields or {}),
            )
        except (ValueError, TypeError, TemplateError) as error:
            text = f"the model's chat template rejects the messages: {error}"
            raise RequestError(text, param="messages") from error
        prompt_ids = self._tokenizer(cast("str", text), add_special_tokens=False)["input_ids"]
        if not prompt_ids:
            raise RequestError("the chat template returned an empty prompt", param="messages")
        return cast("list[int]", prompt_ids)

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, including special ones."""
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return cast("str", text)  # of one sequence

    def reply(self, token_ids: Sequence[int], *, with_tools: bool) -> Reply:
        """Return the reply for tokens, without the end token; tool calls are parsed if tools were offered."""
        whole = self.text(token_ids)
        return self.read(whole) if with_tools else Reply(content=whole)

    def read(self, text: str, tools: Sequence[Mapping[str, Any]] = (), *, constrained: bool = False) -> Reply:
        """Return text and tool calls, read in the syntax of the chat template; under a grammar calls always have the
        syntax of Hermes."""
        return parse_reply(text, "hermes" if constrained else syntax_of(str(self._tokenizer.chat_template)), tools)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's text of each token."""
        return cast("list[str]", self._tokenizer.convert_ids_to_tokens(list(token_ids)))


def message_body(reply: Reply, ids: int | None = None) -> dict[str, Any]:
    """Return the reply as an assistant message of the API; `ids` generates the ids of tool calls, random by default."""
    if not reply.tool_calls:
        return {"role": "assistant", "content": reply.content or ""}
    calls = [
        {
            "id": f"call_{uuid.uuid4().hex if ids is None else f'{ids:016x}{number:04x}'}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(reply.tool_calls)
    ]
    return {"role": "assistant", "content": reply.content, "tool_calls": calls}


def syntax_of(template: str) -> Syntax:
    """Return the tool call syntax of a chat template; `hermes` if it has none."""
    if "<function=" in template:
        return "qwen3_coder"
    return "llama3_json" if CALL_OPENING not in template and '"parameters"' in template else "hermes"


def parse_reply(text: str, syntax: Syntax = "hermes", tools: Sequence[Mapping[str, Any]] = ()) -> Reply:
    """Return text and tool calls of a completion; if any call is malformed, everything is text. The schemas of the
    offered `tools` set the type of a value without quotes."""
    try:
        if syntax == "llama3_json":
            calls = _calls_in(text.strip().removeprefix(_PYTHON_TAG), tagged=False)
            return Reply(None, tuple(calls)) if calls else Reply(content=text)
        read = _calls_in if syntax == "hermes" else partial(_calls_in_tags, tools=tools)
        calls = [call for body in _CALL.findall(text) for call in read(body)]
    except (ValueError, RecursionError):
        return Reply(content=text)
    return Reply(_CALL.sub("", text).strip() or None, tuple(calls)) if calls else Reply(content=text)


def _calls_in(text: str, *, tagged: bool = True) -> list[ToolCall]:
    """Return the calls in a JSON text: one, a list, or several separated by semicolons.

    Without tags a call must name its arguments, even if there are none: otherwise it may be any answer with a name.
    """
    calls: list[ToolCall] = []
    rest = text.strip()
    while rest:
        value, end = json.JSONDecoder().raw_decode(rest)
        values = cast("list[object]", value) if isinstance(value, list) else [value]
        calls += [_call_of(each, tagged) for each in values]
        rest = rest[end:].lstrip()
        if rest and not rest.startswith(";"):
            raise ValueError("the tool calls are followed by text")
        rest = rest[1:].lstrip()
    return calls


def _call_of(value: object, tagged: bool) -> ToolCall:
    fields = cast("dict[str, object]", value) if isinstance(value, dict) else {}
    name, arguments = fields.get("name"), fields.get("arguments", fields.get("parameters", {} if tagged else None))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("a tool call needs a name and arguments")
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _calls_in_tags(text: str, tools: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
    function = _FUNCTION.fullmatch(text.strip())
    if function is None:
        raise ValueError("a tool call must be one <function=...>")
    functions = {str(each.get("name")): each for each in (_fields(tool.get("function")) for tool in tools)}
    schemas = _fields(_fields(functions.get(function[1], {}).get("parameters")).get("properties"))
    types = {key: _types_of(schema) for key, schema in schemas.items()}
    arguments = {key: _value(value, types.get(key, set())) for key, value in _PARAMETER.findall(function[2])}
    if _PARAMETER.sub("", function[2]).strip():
        raise ValueError("a function may contain only parameters")
    return [ToolCall(function[1], json.dumps(arguments, ensure_ascii=False))]


def _types_of(schema: object) -> set[str]:
    """Return the JSON types that a schema allows; an empty set for any."""
    fields = _fields(schema)
    named = fields.get("type")
    types = {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
    for name in ("anyOf", "oneOf"):
        branches = fields.get(name)
        types.update(*(_types_of(branch) for branch in (branches if isinstance(branches, list) else [])))
    return types


def _value(text: str, types: set[str]) -> object:
    """Return the value in a tag; an empty set of `types` allows all."""
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
    """Return OpenAI messages as chat templates expect them: arguments as objects, text parts joined into one text.

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
                f"{where}: a part of 'content' is of type {images[0]['type']!r}, but images are not supported: the "
                "policy learns only from text tokens. Describe the image in words, or send images to another model of "
                "the gateway"
            )
    raise ValueError(f"{where}: 'content' must be a string or a list of text parts")


def _call_for_template(call: Mapping[str, Any], where: str) -> dict[str, object]:
    try:
        function = call["function"]
        arguments: object = json.loads(function["arguments"] or "{}")
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{where}: a tool call needs 'function' with 'name' and JSON 'arguments' ({error})") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}: the arguments of a tool call must be a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}
