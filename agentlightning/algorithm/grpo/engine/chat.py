"""Converts between the chat API and tokens: checks requests, renders prompts, reads completions as messages.

The engine honours a field of the request or refuses it by name with 400; only fields that cannot change what is sampled
are left unread.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from agentlightning.algorithm.grpo.engine.tool_calls import Reply, messages_for_template, parse_reply
from agentlightning.errors import did_you_mean

_READ: Final = frozenset(
    {
        "model",
        "messages",
        "tools",
        "tool_choice",
        "temperature",
        "top_p",
        "max_tokens",
        "max_completion_tokens",
        "seed",
        "logprobs",
        "return_token_ids",
        "stream",
        "stream_options",
    }
)
_WITHOUT_EFFECT: Final = frozenset(
    {"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
)
_ONLY_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {  # fields that ask for nothing when they have this value
    "n": (1,),
    "stop": ([], ""),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_k": (0, -1),
    "min_p": (0,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
}
_LEAST_TEMPERATURE: Final = 0.01


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
class ChatRequest:
    """A request for one chat completion, checked.

    Attributes:
        tools: None also when the request says `tool_choice="none"`.
        max_new_tokens: None leaves it to the engine.
        seed: None leaves it to the engine.
    """

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    temperature: float
    top_p: float
    max_new_tokens: int | None
    seed: int | None
    logprobs: bool
    return_token_ids: bool


def parse_request(body: object) -> ChatRequest:
    """Return the request in the body of a call.

    Raises:
        RequestError: A field is missing, has a wrong value, or asks for what the engine does not do; it is named.
    """
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object with 'model' and 'messages'")
    fields = {name: value for name, value in cast("dict[str, object]", body).items() if value is not None}
    _refuse_unsupported(fields)
    model, messages = _typed(fields, "model", str), _typed(fields, "messages", list)
    if not messages or not all(isinstance(message, dict) for message in messages):
        raise RequestError("'messages' must be a list of at least one message object", param="messages")
    tools, temperature = _tools(fields), _number(fields, "temperature", 1.0, low=0.0, high=2.0)
    if 0 < temperature < _LEAST_TEMPERATURE:
        raise RequestError(
            f"'temperature' must be 0 or at least {_LEAST_TEMPERATURE}, not {temperature}", param="temperature"
        )
    return ChatRequest(
        model=model,
        messages=messages,
        tools=tools,
        temperature=temperature,
        top_p=_number(fields, "top_p", 1.0, low=0.0, high=1.0, low_included=False),
        max_new_tokens=_max_new_tokens(fields),
        seed=_typed(fields, "seed", int) if "seed" in fields else None,
        logprobs=_flag(fields, "logprobs"),
        return_token_ids=_flag(fields, "return_token_ids"),
    )


class ChatFormat:
    """The chat template and vocabulary of one tokenizer. Used by one thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        """Return what the model reads before it replies.

        Raises:
            RequestError: A message is malformed or the template refuses the conversation.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                messages_for_template(messages),
                tools=cast("list[Any]", list(tools)) if tools else None,
                add_generation_prompt=True,
                tokenize=False,
            )
        except (ValueError, TypeError, TemplateError) as error:
            raise RequestError(
                f"the messages do not fit the model's chat template: {error}", param="messages"
            ) from error
        prompt_ids = self._tokenizer(cast("str", text), add_special_tokens=False)["input_ids"]
        if not prompt_ids:
            raise RequestError("the chat template gives an empty prompt", param="messages")
        return cast("list[int]", prompt_ids)

    def reply(self, token_ids: Sequence[int], *, with_tools: bool) -> Reply:
        """Return the reply in tokens, the one that ends it left out; tool calls are read if tools were offered."""
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        whole = cast("str", text)  # of one sequence
        return parse_reply(whole) if with_tools else Reply(content=whole)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary writes it."""
        return cast("list[str]", self._tokenizer.convert_ids_to_tokens(list(token_ids)))


def message_body(reply: Reply) -> dict[str, Any]:
    """Return the reply as an assistant message of the API; each tool call gets an id of its own."""
    if not reply.tool_calls:
        return {"role": "assistant", "content": reply.content or ""}
    calls = [
        {
            "id": f"call_{uuid.uuid4().hex}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in reply.tool_calls
    ]
    return {"role": "assistant", "content": reply.content, "tool_calls": calls}


def _refuse_unsupported(fields: Mapping[str, object]) -> None:
    for name, value in fields.items():
        if name in _READ or name in _WITHOUT_EFFECT:
            continue
        if name not in _ONLY_NEUTRAL:
            text = f"unknown field {name!r}{did_you_mean(name, _READ)}"
            raise RequestError(text, param=name, code="unknown_parameter")
        if value not in _ONLY_NEUTRAL[name]:
            raise RequestError(
                f"the embedded engine does not support {name}={json.dumps(value)}; leave {name!r} out",
                param=name,
                code="unsupported_value",
            )


def _typed(fields: Mapping[str, object], name: str, kind: type[Any]) -> Any:
    value = fields.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise RequestError(f"{name!r} must be of type {kind.__name__}, not {json.dumps(value)}", param=name)
    return value


def _tools(fields: Mapping[str, object]) -> list[dict[str, Any]] | None:
    choice = fields.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise RequestError(
            f"the embedded engine does not support tool_choice={json.dumps(choice)}; use 'auto' or 'none'",
            param="tool_choice",
            code="unsupported_value",
        )
    tools = fields.get("tools", [])
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and "function" in tool for tool in tools):
        raise RequestError("'tools' must be a list of function tools", param="tools")
    return cast("list[dict[str, Any]]", tools) if tools and choice == "auto" else None


def _number(
    fields: Mapping[str, Any], name: str, default: float, *, low: float, high: float, low_included: bool = True
) -> float:
    value = fields.get(name, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (value == low and not low_included):
        raise RequestError(f"{name!r} must be a number from {low} to {high}, not {json.dumps(value)}", param=name)
    return float(value)


def _max_new_tokens(fields: Mapping[str, object]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        if name in fields:
            value = _typed(fields, name, int)
            if value < 1:
                raise RequestError(f"{name!r} must be at least 1, not {value}", param=name)
            return value
    return None


def _flag(fields: Mapping[str, object], name: str) -> bool:
    value = fields.get(name, False)
    if value not in (True, False):  # 0 and 1 too
        raise RequestError(f"{name!r} must be true or false, not {json.dumps(value)}", param=name)
    return bool(value)
