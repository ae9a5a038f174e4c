"""Reads the requests of the chat API: each field is honoured, or refused by its name with 400.

Fields that cannot change the reply are accepted, and listed so that they can be noted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from agentlightning.engine.completion import Adjustments
from agentlightning.errors import did_you_mean

Fields = Mapping[str, Any]
_READ: Final = frozenset(
    {
        *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format"),
        *("temperature", "top_p", "top_k", "min_p", "seed", "n", "logit_bias"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty"),
        *("max_tokens", "max_completion_tokens", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output"),
        *("logprobs", "top_logprobs", "return_token_ids", "stream", "stream_options"),
        *("chat_template_kwargs", "reasoning_effort"),
    }
)
_WITHOUT_EFFECT: Final = frozenset(
    {
        *("metadata", "prediction", "priority", "prompt_cache_key", "prompt_cache_retention", "request_id"),
        *("safety_identifier", "service_tier", "store", "user", "verbosity"),
    }
)
_ONLY_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {  # fields that ask for nothing when they have this value
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "ignore_eos": (False,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "web_search_options": (),
}
_INSTEAD: Final[Mapping[str, str]] = {
    "best_of": "ask for 'n' replies and choose among them",
    "function_call": "use 'tool_choice'",
    "functions": "use 'tools'",
}
_LEAST_TEMPERATURE: Final = 0.01
_LEAST_PENALTY: Final = 0.01  # far below it logits are infinite, and there is no distribution
_MOST_CHOICES: Final = 128
_MOST_STOPS: Final = 64
_LONGEST_STOP: Final = 1000
_MOST_TOP_LOGPROBS: Final = 20
_MOST_BIASES: Final = 10_000


class RequestError(ValueError):
    """A request that is answered with an error in the form of the OpenAI API.

    Attributes:
        status: HTTP status.
        param: the field at fault, None if it is not one field.
        code: short word for programs.
        retry_after: seconds after which it may be tried again, None if that would not help.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str = "invalid_value",
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    def body(self) -> dict[str, Any]:
        """Return the error in the form of the API."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True)
class JsonShape:
    """A JSON value that fits a schema."""

    schema: Mapping[str, Any]
    strict: bool = False  # a keyword of the schema that the library does not know is an error, and not ignored


@dataclass(frozen=True, slots=True)
class Constraint:
    """A reply that is one JSON value, or calls of these tools; either one if both are set."""

    value: JsonShape | None
    functions: Sequence[tuple[str, JsonShape]]  # name and arguments of the tools that may be called
    several: bool  # more than one call may be made
    param: str  # the field of the request that asked for it, for errors


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for chat completions, checked."""

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None  # None also when the request says `tool_choice="none"`
    constraint: Constraint | None  # None for any reply
    one_call: bool  # at most one tool call may be made
    temperature: float  # divides the logits; 0 takes the likeliest token
    top_p: float
    adjustments: Adjustments  # without `ends`
    max_new_tokens: int | None  # None leaves it to the engine
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    include_stop: bool
    seed: int | None  # None leaves it to the engine
    n: int
    logprobs: bool
    top_logprobs: int  # 0 to 20
    return_token_ids: bool
    template_fields: dict[str, Any]  # further variables of the chat template
    without_effect: tuple[str, ...]  # names of fields that change nothing


def parse_request(body: object) -> ChatRequest:
    """Return the request in the body of a call.

    Raises:
        RequestError: A field is missing, has a wrong value, or asks for what the engine does not do; it is named.
    """
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object with 'model' and 'messages'")
    fields = {name: value for name, value in cast("dict[str, Any]", body).items() if value is not None}
    _refuse_unsupported(fields)
    model, messages = _typed(fields, "model", str), _typed(fields, "messages", list)
    if not messages or not all(isinstance(message, dict) for message in messages):
        raise RequestError("'messages' must be a list of at least one message object", param="messages")
    temperature = _number(fields, "temperature", 1.0, low=0.0, high=2.0)
    if 0 < temperature < _LEAST_TEMPERATURE:
        text = f"'temperature' must be 0 or at least {_LEAST_TEMPERATURE}, not {temperature}"
        raise RequestError(text, param="temperature")
    limit = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    tools, one_call = _tools(fields), not _flag(fields, "parallel_tool_calls", default=True)
    return ChatRequest(
        model=model,
        messages=messages,
        tools=tools,
        constraint=_constraint(fields, tools or [], several=not one_call),
        one_call=one_call and bool(tools),
        temperature=temperature,
        top_p=_number(fields, "top_p", 1.0, low=0.0, high=1.0, low_included=False),
        adjustments=Adjustments(
            top_k=max(0, _integer(fields, "top_k", 0, low=-1)),
            min_p=_number(fields, "min_p", 0.0, low=0.0, high=1.0),
            frequency_penalty=_number(fields, "frequency_penalty", 0.0, low=-2.0, high=2.0),
            presence_penalty=_number(fields, "presence_penalty", 0.0, low=-2.0, high=2.0),
            repetition_penalty=_number(fields, "repetition_penalty", 1.0, low=_LEAST_PENALTY, high=10.0),
            logit_bias=_logit_bias(fields),
            min_tokens=_integer(fields, "min_tokens", 0, low=0),
        ),
        max_new_tokens=_integer(fields, limit, 1, low=1) if limit in fields else None,
        stop=_stop(fields),
        stop_token_ids=_stop_token_ids(fields),
        include_stop=_flag(fields, "include_stop_str_in_output"),
        seed=_optional(fields, "seed", int),
        n=_integer(fields, "n", 1, low=1, high=_MOST_CHOICES),
        logprobs=_flag(fields, "logprobs"),
        top_logprobs=_top_logprobs(fields),
        return_token_ids=_flag(fields, "return_token_ids"),
        template_fields=_template_fields(fields),
        without_effect=tuple(sorted(_WITHOUT_EFFECT & fields.keys())),
    )


def _refuse_unsupported(fields: Fields) -> None:
    for name, value in fields.items():
        if name in _READ or name in _WITHOUT_EFFECT:
            continue
        if name not in _ONLY_NEUTRAL:
            text = f"unknown field {name!r}{did_you_mean(name, _READ)}"
            raise RequestError(text, param=name, code="unknown_parameter")
        if value not in _ONLY_NEUTRAL[name]:
            instead = _INSTEAD.get(name, f"leave {name!r} out")
            text = f"the embedded engine does not support {name}={json.dumps(value)}; {instead}"
            raise RequestError(text, param=name, code="unsupported_value")


def _typed(fields: Fields, name: str, kind: type[Any]) -> Any:
    value = fields.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise RequestError(f"{name!r} must be of type {kind.__name__}, not {json.dumps(value)}", param=name)
    return value


def _optional(fields: Fields, name: str, kind: type[Any]) -> Any:
    return _typed(fields, name, kind) if name in fields else None


def _integer(fields: Fields, name: str, default: int, *, low: int, high: int | None = None) -> int:
    value = _typed(fields, name, int) if name in fields else default
    if value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name!r} must be {wanted}, not {value}", param=name)
    return value


def _number(fields: Fields, name: str, default: float, *, low: float, high: float, low_included: bool = True) -> float:
    value = fields.get(name, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (value == low and not low_included):
        raise RequestError(f"{name!r} must be a number from {low} to {high}, not {json.dumps(value)}", param=name)
    return float(value)


def _flag(fields: Fields, name: str, *, default: bool = False) -> bool:
    value = fields.get(name, default)
    if value not in (True, False):
        raise RequestError(f"{name!r} must be true or false, not {json.dumps(value)}", param=name)
    return bool(value)


def _logit_bias(fields: Fields) -> dict[int, float]:
    biases = _optional(fields, "logit_bias", dict) or {}
    if len(biases) > _MOST_BIASES:
        text = f"'logit_bias' must name at most {_MOST_BIASES} tokens, not {len(biases)}"
        raise RequestError(text, param="logit_bias")
    try:
        return {
            int(token): _number({"logit_bias": value}, "logit_bias", 0.0, low=-100.0, high=100.0)
            for token, value in biases.items()
        }
    except ValueError as error:
        text = f"'logit_bias' must be an object of token ids and numbers from -100 to 100 ({error})"
        raise RequestError(text, param="logit_bias") from error


def _stop(fields: Fields) -> tuple[str, ...]:
    stop = fields.get("stop", [])
    texts: Any = ([stop] if stop else []) if isinstance(stop, str) else stop
    valid = isinstance(texts, list) and all(isinstance(text, str) and 0 < len(text) <= _LONGEST_STOP for text in texts)
    if not valid or len(texts) > _MOST_STOPS:
        raise RequestError(
            f"'stop' must be a text or a list of at most {_MOST_STOPS} texts of 1 to {_LONGEST_STOP} characters",
            param="stop",
        )
    return tuple(texts)


def _stop_token_ids(fields: Fields) -> frozenset[int]:
    ids = fields.get("stop_token_ids", [])
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in cast("list[object]", ids)):
        raise RequestError("'stop_token_ids' must be a list of token ids", param="stop_token_ids")
    return frozenset(cast("list[int]", ids))


def _top_logprobs(fields: Fields) -> int:
    wanted = _integer(fields, "top_logprobs", 0, low=0, high=_MOST_TOP_LOGPROBS)
    if wanted and not _flag(fields, "logprobs"):
        raise RequestError("'top_logprobs' needs 'logprobs': true", param="top_logprobs")
    return wanted


def _template_fields(fields: Fields) -> dict[str, Any]:
    effort = _optional(fields, "reasoning_effort", str)
    variables = _optional(fields, "chat_template_kwargs", dict) or {}
    return variables if effort is None else {"reasoning_effort": effort, **variables}


def _tools(fields: Fields) -> list[dict[str, Any]] | None:
    tools = fields.get("tools", [])
    if not isinstance(tools, list) or not all(isinstance(_name_in(tool), str) for tool in cast("list[object]", tools)):
        raise RequestError("'tools' must be a list of function tools, each with a 'name'", param="tools")
    return cast("list[dict[str, Any]]", tools) if tools and fields.get("tool_choice") != "none" else None


def _name_in(tool: object) -> object:
    function = cast("Fields", tool).get("function") if isinstance(tool, dict) else None
    return cast("Fields", function).get("name") if isinstance(function, dict) else None


def _constraint(fields: Fields, tools: Sequence[Fields], *, several: bool) -> Constraint | None:
    forced, value = _forced_tools(fields, tools), _response_format(fields)
    if forced is not None:
        named = isinstance(fields["tool_choice"], dict)
        return Constraint(None, _functions(forced), several and not named, "tools")
    return None if value is None else Constraint(value, _functions(tools), several, "response_format")


def _forced_tools(fields: Fields, tools: Sequence[Fields]) -> Sequence[Fields] | None:
    """Return the tools of which one must be called; None if none must be."""
    choice = fields.get("tool_choice", "auto")
    if choice in ("auto", "none"):
        return None
    name = _name_in(choice)
    if choice != "required" and not isinstance(name, str):
        raise RequestError(
            f"'tool_choice' must be 'auto', 'none', 'required' or "
            f'{{"type": "function", "function": {{"name": ...}}}}, not {json.dumps(choice)}',
            param="tool_choice",
        )
    offered = [tool["function"]["name"] for tool in tools]
    if not offered:
        raise RequestError("'tool_choice' forces a call, and 'tools' offers none", param="tool_choice")
    if name is None:
        return tools
    if name not in offered:
        text = f"'tool_choice' names {name!r}; 'tools' offers {', '.join(map(repr, offered))}"
        raise RequestError(text, param="tool_choice")
    return [tools[offered.index(name)]]


def _functions(tools: Sequence[Fields]) -> list[tuple[str, JsonShape]]:
    shapes: list[tuple[str, JsonShape]] = []
    for function in (tool["function"] for tool in tools):
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, dict) or cast("Fields", parameters).get("type", "object") != "object":
            text = f"the parameters of the tool {function['name']!r} must be a JSON schema of type 'object'"
            raise RequestError(text, param="tools")
        schema = {**cast("Fields", parameters), "type": "object"}
        shapes.append((function["name"], JsonShape(schema, strict=function.get("strict") is True)))
    return shapes


def _response_format(fields: Fields) -> JsonShape | None:
    """Return the JSON value that `response_format` asks for; None if it asks for text."""
    wanted = fields.get("response_format", {"type": "text"})
    kind = cast("Fields", wanted).get("type") if isinstance(wanted, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return JsonShape({"type": "object"})
    form = cast("Fields", wanted).get("json_schema") if kind == "json_schema" else None
    schema = cast("Fields", form).get("schema", {}) if isinstance(form, dict) else None
    if not isinstance(schema, dict):
        raise RequestError(
            "'response_format' must be of type 'text', 'json_object', or 'json_schema' with "
            f'{{"name": ..., "schema": {{...}}}} in \'json_schema\'; got {json.dumps(wanted)[:200]}',
            param="response_format",
        )
    return JsonShape(cast("Fields", schema), strict=cast("Fields", form).get("strict") is True)
