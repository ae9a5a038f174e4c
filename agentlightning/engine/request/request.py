"""Reads the requests of the chat API: each field is honoured, or refused by its name with 400.

Fields that cannot change the reply are accepted; which of them came is told, so that it can be noted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from agentlightning.engine.request.constraint import Constraint
from agentlightning.engine.request.fields import RequestError, flag, integer, number, typed
from agentlightning.engine.request.tool_choice import constraint_of, tools_of
from agentlightning.errors import did_you_mean

__all__ = ["ChatRequest", "RequestError", "SamplingFields", "parse_request"]

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
WITHOUT_EFFECT: Final = frozenset(
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFields:
    """How tokens are drawn, beside temperature and `top_p`, as the request says it; see `Adjustments`.

    Attributes:
        top_k: only so many of the likeliest tokens; 0 for all.
        min_p: only tokens with at least this share of the likeliest one's probability.
        frequency_penalty: taken off a token's logit for each time it was drawn.
        presence_penalty: taken off a token's logit if it was drawn.
        repetition_penalty: divides the positive logits of tokens in prompt or reply, and multiplies the negative ones.
        logit_bias: added to the logits of these tokens.
        min_tokens: nothing ends the reply before so many tokens are drawn.
    """

    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for chat completions, checked.

    Attributes:
        model: the name that the client gave.
        messages: the conversation, as the chat template gets it.
        tools: as the template gets them; None also when the request says `tool_choice="none"`.
        constraint: what the reply must be; None for anything.
        one_call: at most one tool call may be made.
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: only the likeliest tokens that together have this probability.
        sampling: the other settings by which tokens are drawn.
        max_new_tokens: None leaves it to the engine.
        stop: texts that end a reply.
        stop_token_ids: tokens that end a reply.
        include_stop: the stop text stays in the reply.
        seed: None leaves it to the engine.
        n: how many replies.
        logprobs: log-probabilities of the reply's tokens are asked for.
        top_logprobs: how many of the likeliest tokens are told at each place, 0 to 20.
        return_token_ids: token ids of prompt and replies are asked for.
        template_fields: further variables of the chat template.
        without_effect: names of fields that came and change nothing.
    """

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    constraint: Constraint | None
    one_call: bool
    temperature: float
    top_p: float
    sampling: SamplingFields
    max_new_tokens: int | None
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    include_stop: bool
    seed: int | None
    n: int
    logprobs: bool
    top_logprobs: int
    return_token_ids: bool
    template_fields: dict[str, Any]
    without_effect: tuple[str, ...]


def parse_request(body: object) -> ChatRequest:
    """Return the request in the body of a call.

    Raises:
        RequestError: A field is missing, has a wrong value, or asks for what the engine does not do; it is named.
    """
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object with 'model' and 'messages'")
    fields = {name: value for name, value in cast("dict[str, object]", body).items() if value is not None}
    _refuse_unsupported(fields)
    model, messages = typed(fields, "model", str), typed(fields, "messages", list)
    if not messages or not all(isinstance(message, dict) for message in messages):
        raise RequestError("'messages' must be a list of at least one message object", param="messages")
    temperature = number(fields, "temperature", 1.0, low=0.0, high=2.0)
    if 0 < temperature < _LEAST_TEMPERATURE:
        raise RequestError(
            f"'temperature' must be 0 or at least {_LEAST_TEMPERATURE}, not {temperature}", param="temperature"
        )
    tools, one_call = tools_of(fields), not flag(fields, "parallel_tool_calls", default=True)
    return ChatRequest(
        model=model,
        messages=messages,
        tools=tools,
        constraint=constraint_of(fields, tools, several=not one_call),
        one_call=one_call and bool(tools),
        temperature=temperature,
        top_p=number(fields, "top_p", 1.0, low=0.0, high=1.0, low_included=False),
        sampling=_sampling(fields),
        max_new_tokens=_max_new_tokens(fields),
        stop=_stop(fields),
        stop_token_ids=_stop_token_ids(fields),
        include_stop=flag(fields, "include_stop_str_in_output"),
        seed=typed(fields, "seed", int) if "seed" in fields else None,
        n=integer(fields, "n", 1, low=1, high=_MOST_CHOICES),
        logprobs=flag(fields, "logprobs"),
        top_logprobs=_top_logprobs(fields),
        return_token_ids=flag(fields, "return_token_ids"),
        template_fields=_template_fields(fields),
        without_effect=tuple(sorted(WITHOUT_EFFECT & fields.keys())),
    )


def _refuse_unsupported(fields: Mapping[str, object]) -> None:
    for name, value in fields.items():
        if name in _READ or name in WITHOUT_EFFECT:
            continue
        if name not in _ONLY_NEUTRAL:
            text = f"unknown field {name!r}{did_you_mean(name, _READ)}"
            raise RequestError(text, param=name, code="unknown_parameter")
        if value not in _ONLY_NEUTRAL[name]:
            instead = _INSTEAD.get(name, f"leave {name!r} out")
            raise RequestError(
                f"the embedded engine does not support {name}={json.dumps(value)}; {instead}",
                param=name,
                code="unsupported_value",
            )


def _sampling(fields: Mapping[str, object]) -> SamplingFields:
    top_k = integer(fields, "top_k", 0, low=-1)
    return SamplingFields(
        top_k=max(0, top_k),
        min_p=number(fields, "min_p", 0.0, low=0.0, high=1.0),
        frequency_penalty=number(fields, "frequency_penalty", 0.0, low=-2.0, high=2.0),
        presence_penalty=number(fields, "presence_penalty", 0.0, low=-2.0, high=2.0),
        repetition_penalty=number(fields, "repetition_penalty", 1.0, low=_LEAST_PENALTY, high=10.0),
        logit_bias=_logit_bias(fields),
        min_tokens=integer(fields, "min_tokens", 0, low=0),
    )


def _logit_bias(fields: Mapping[str, object]) -> dict[int, float]:
    given = typed(fields, "logit_bias", dict) if "logit_bias" in fields else {}
    if len(given) > _MOST_BIASES:
        text = f"'logit_bias' must name at most {_MOST_BIASES} tokens, not {len(given)}"
        raise RequestError(text, param="logit_bias")
    try:
        bias = {int(token): number({"logit_bias": value}, "logit_bias", 0.0, low=-100.0, high=100.0)
                for token, value in given.items()}  # fmt: skip
    except ValueError as error:
        text = f"'logit_bias' must be an object of token ids and numbers from -100 to 100 ({error})"
        raise RequestError(text, param="logit_bias") from error
    return bias


def _max_new_tokens(fields: Mapping[str, object]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        if name in fields:
            return integer(fields, name, 1, low=1)
    return None


def _stop(fields: Mapping[str, object]) -> tuple[str, ...]:
    given = fields.get("stop", [])
    texts = cast("Sequence[object]", ([given] if given else []) if isinstance(given, str) else given)
    valid = isinstance(texts, list) and all(isinstance(text, str) and 0 < len(text) <= _LONGEST_STOP for text in texts)
    if not valid or len(texts) > _MOST_STOPS:
        raise RequestError(
            f"'stop' must be a text or a list of at most {_MOST_STOPS} texts of 1 to {_LONGEST_STOP} characters",
            param="stop",
        )
    return cast("tuple[str, ...]", tuple(texts))


def _stop_token_ids(fields: Mapping[str, object]) -> frozenset[int]:
    given = fields.get("stop_token_ids", [])
    valid = isinstance(given, list) and all(type(token) is int and token >= 0 for token in cast("list[object]", given))
    if not valid:
        raise RequestError("'stop_token_ids' must be a list of token ids", param="stop_token_ids")
    return frozenset(cast("list[int]", given))


def _top_logprobs(fields: Mapping[str, object]) -> int:
    wanted = integer(fields, "top_logprobs", 0, low=0, high=_MOST_TOP_LOGPROBS)
    if wanted and not flag(fields, "logprobs"):
        raise RequestError("'top_logprobs' needs 'logprobs': true", param="top_logprobs")
    return wanted


def _template_fields(fields: Mapping[str, object]) -> dict[str, Any]:
    given = typed(fields, "chat_template_kwargs", dict) if "chat_template_kwargs" in fields else {}
    effort = {"reasoning_effort": typed(fields, "reasoning_effort", str)} if "reasoning_effort" in fields else {}
    return {**effort, **given}
