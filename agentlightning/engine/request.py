"""Reads the requests of the chat API. An unsupported field is rejected with 400 and its name.

Fields that cannot change the reply are accepted and logged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, field_validator

from agentlightning.engine.completion import Adjustments
from agentlightning.errors import did_you_mean

Fields = Mapping[str, Any]
_WITHOUT_EFFECT: Final = frozenset(
    {
        *("metadata", "prediction", "priority", "prompt_cache_key", "prompt_cache_retention", "request_id"),
        *("safety_identifier", "service_tier", "store", "user", "verbosity"),
    }
)
_ONLY_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {  # fields without effect at these values
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
    "best_of": "request 'n' replies and choose among them",
    "function_call": "use 'tool_choice'",
    "functions": "use 'tools'",
}
_LEAST_TEMPERATURE: Final = 0.01
_LEAST_PENALTY: Final = 0.01  # far below it logits become infinite, and the distribution is undefined


class RequestError(ValueError):
    """An error response in the format of the OpenAI API."""

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
        self.status = status
        """HTTP status."""
        self.param = param
        """The field with the error; None if the error is not in one field."""
        self.code = code
        """Short error code for programs."""
        self.retry_after = retry_after
        """Seconds after which a retry may succeed; None if it would not."""

    def body(self) -> dict[str, Any]:
        """Return the error in the format of the API."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True)
class JsonShape:
    """A JSON value that matches a schema."""

    schema: Mapping[str, Any]
    strict: bool = False
    """Whether a schema keyword that the library does not know is an error."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A reply that must be one JSON value, or calls of these tools; either of them if both are set."""

    value: JsonShape | None
    functions: Sequence[tuple[str, JsonShape]]
    """Name and arguments of the tools that may be called."""
    several: bool
    """Whether several calls are allowed."""
    param: str
    """The field of the request, for errors."""


def _as_flag(value: object) -> object:
    return bool(value) if value in (True, False) else value


def _as_texts(value: object) -> object:
    return ([value] if value else []) if isinstance(value, str) else value


_Flag = Annotated[bool, BeforeValidator(_as_flag)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_StopText = Annotated[str, Field(min_length=1, max_length=1000)]
_TokenId = Annotated[int, Field(ge=0)]


class ChatRequest(BaseModel):
    """A request for chat completions, checked. Its fields have the names of the API."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    """None also if the request has `tool_choice="none"`."""
    tool_choice: Any = "auto"
    parallel_tool_calls: _Flag = True
    response_format: Any = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """Divides the logits; 0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: int | None = None
    """None uses the engine's default."""
    n: Annotated[int, Field(ge=1, le=128)] = 1
    logit_bias: Annotated[dict[str, _Bias], Field(max_length=10_000)] = {}
    frequency_penalty: _Penalty = 0.0
    presence_penalty: _Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=_LEAST_PENALTY, le=10)] = 1.0
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    stop: Annotated[list[_StopText], Field(max_length=64), BeforeValidator(_as_texts)] = []
    stop_token_ids: list[_TokenId] = []
    include_stop_str_in_output: _Flag = False
    logprobs: _Flag = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    return_token_ids: _Flag = False
    stream: Any = False
    """Read by the server."""
    stream_options: Any = None
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None

    _constraint: Constraint | None = PrivateAttr(None)

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, temperature: float) -> float:
        if 0 < temperature < _LEAST_TEMPERATURE:
            raise ValueError(f"must be 0 or at least {_LEAST_TEMPERATURE}")
        return temperature

    @field_validator("logit_bias")
    @classmethod
    def _check_tokens(cls, biases: dict[str, float]) -> dict[str, float]:
        if not all(token.isdecimal() for token in biases):
            raise ValueError("must be an object of token ids and numbers from -100 to 100")
        return biases

    @field_validator("tools")
    @classmethod
    def _check_tools(cls, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not all(isinstance(_name_in(tool), str) for tool in tools):
            raise ValueError("must be a list of function tools, each with a 'name'")
        return tools

    @property
    def constraint(self) -> Constraint | None:
        """The required format of the reply; None allows any reply."""
        return self._constraint

    @property
    def one_call(self) -> bool:
        """Whether at most one tool call is allowed."""
        return not self.parallel_tool_calls and bool(self.tools)

    @property
    def adjustments(self) -> Adjustments:
        """The changes of the distribution, without `ends`."""
        return Adjustments(
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()},
            min_tokens=self.min_tokens,
        )

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum number of tokens of the reply; None uses the engine's limit."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def template_fields(self) -> dict[str, Any]:
        """Additional variables of the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **self.chat_template_kwargs}

    @property
    def without_effect(self) -> list[str]:
        """Names of the fields without effect."""
        return sorted(_WITHOUT_EFFECT & (self.model_extra or {}).keys())


def parse_request(body: object) -> ChatRequest:
    """Return the request in the body of a call.

    Raises:
        RequestError: a field is missing, has a wrong value, or is not supported by the engine. The message names it.
    """
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object with 'model' and 'messages'")
    fields = {name: value for name, value in cast("dict[str, Any]", body).items() if value is not None}
    _refuse_unsupported(fields)
    try:
        request = ChatRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name, text = str(first["loc"][0]), first["msg"].removeprefix("Value error, ")
        raise RequestError(f"{name!r}: {text}; got {json.dumps(fields.get(name))[:200]}", param=name) from None
    if request.top_logprobs and not request.logprobs:
        raise RequestError("'top_logprobs' requires 'logprobs': true", param="top_logprobs")
    if request.tool_choice == "none" or not request.tools:
        request.tools = None
    request._constraint = _constraint_of(request)
    return request


def _refuse_unsupported(fields: Fields) -> None:
    for name, value in fields.items():
        if name in ChatRequest.model_fields or name in _WITHOUT_EFFECT:
            continue
        if name not in _ONLY_NEUTRAL:
            text = f"unknown field {name!r}{did_you_mean(name, ChatRequest.model_fields)}"
            raise RequestError(text, param=name, code="unknown_parameter")
        if value not in _ONLY_NEUTRAL[name]:
            instead = _INSTEAD.get(name, f"leave {name!r} out")
            text = f"the embedded engine does not support {name}={json.dumps(value)}; {instead}"
            raise RequestError(text, param=name, code="unsupported_value")


def _name_in(tool: object) -> object:
    function = cast("Fields", tool).get("function") if isinstance(tool, dict) else None
    return cast("Fields", function).get("name") if isinstance(function, dict) else None


def _constraint_of(request: ChatRequest) -> Constraint | None:
    tools, several = request.tools or [], bool(request.parallel_tool_calls)
    forced, value = _forced_tools(request.tool_choice, tools), _response_format(request.response_format)
    if forced is not None:
        return Constraint(None, _functions(forced), several and request.tool_choice == "required", "tools")
    return None if value is None else Constraint(value, _functions(tools), several, "response_format")


def _forced_tools(choice: object, tools: Sequence[Fields]) -> Sequence[Fields] | None:
    """Return the tools of which one must be called; None if no call is required."""
    if choice in ("auto", "none"):
        return None
    name = _name_in(choice)
    if choice != "required" and not isinstance(name, str):
        raise RequestError(
            f"'tool_choice' must be 'auto', 'none', 'required' or "
            f'{{"type": "function", "function": {{"name": ...}}}}; got {json.dumps(choice)}',
            param="tool_choice",
        )
    offered = [tool["function"]["name"] for tool in tools]
    if not offered:
        raise RequestError("'tool_choice' requires a call, but 'tools' is empty", param="tool_choice")
    if name is None:
        return tools
    if name not in offered:
        text = f"'tool_choice' names {name!r}, but 'tools' has only {', '.join(map(repr, offered))}"
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


def _response_format(value: object) -> JsonShape | None:
    """Return the JSON value that `response_format` requests; None if it requests text."""
    kind = cast("Fields", value).get("type") if isinstance(value, dict) else None
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        return JsonShape({"type": "object"})
    form = cast("Fields", value).get("json_schema") if kind == "json_schema" else None
    schema = cast("Fields", form).get("schema", {}) if isinstance(form, dict) else None
    if not isinstance(schema, dict):
        raise RequestError(
            "'response_format' must be of type 'text', 'json_object', or 'json_schema' with "
            f'{{"name": ..., "schema": {{...}}}} in \'json_schema\'; got {json.dumps(value)[:200]}',
            param="response_format",
        )
    return JsonShape(cast("Fields", schema), strict=cast("Fields", form).get("strict") is True)
