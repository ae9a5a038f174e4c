"""One model call as two spans: `litellm_request` with the messages, and below it `raw_gen_ai_request` with the tokens.

With several choices, each is recorded like a separate call, because each can be trained.

The names, and the text form of the second span, are those that readers of older versions expect; our readers use the
typed attributes (`semconv.LightningCallAttributes`). Headers, keys and fields that are not listed here are not
recorded.

Parts of a call that are too large for its record are replaced by their SHA-256 and size. The limit applies to the size
in a request to a store (JSON in ASCII), where a control character or an umlaut takes six bytes and a log-probability
about twenty. Texts are replaced before tokens, because only tokens can be trained; the largest are replaced first.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from pydantic_core import to_json

from agentlightning.llm_proxy.access.limits import LARGEST_COUNT, count_of
from agentlightning.llm_proxy.calls import GatewayCall
from agentlightning.llm_proxy.dialects import DIALECTS
from agentlightning.llm_proxy.dialects.json_values import Json, fields_of, object_in, objects
from agentlightning.llm_proxy.dialects.token_fields import CallTokens
from agentlightning.llm_proxy.replies import CallFailed
from agentlightning.semconv import RAW_SPAN, REQUEST_SPAN, LightningCallAttributes, LightningResourceAttributes
from agentlightning.types import Attributes, AttributeValue, OtelResource, Span, SpanContext, TraceStatus
from agentlightning.utils.id import derive_id
from agentlightning.utils.otlp.decode import made

KEPT_BYTES = 15 * 1024 * 1024
"""Bytes of one call as sent; below the body limit of a store server (32 MiB) and of a MongoDB document (16 MiB)."""

NOT_KEPT: Final = LightningCallAttributes.NOT_KEPT.value
"""The key of one part that represents all parts that were not kept."""
_MANY = ("gen_ai.prompt.", "llm.request.functions.")
"""Prefixes of the keys that may be very many."""
_EACH = 8
"""Bytes around a key and a value."""
_NUMBER = 26
"""Bytes of a number with its comma."""
_STAND_IN = 128
"""Bytes of the replacement of a part."""

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty"),
    "repetition_penalty",
)
_PARAMETERS = ("model", "max_tokens", "max_completion_tokens", "n", "top_logprobs", "reasoning_effort", *_SAMPLING)
_TOKENS = (
    LightningCallAttributes.PROMPT_TOKEN_IDS.value,
    LightningCallAttributes.COMPLETION_TOKEN_IDS.value,
    LightningCallAttributes.COMPLETION_LOGPROBS.value,
)
_ROLLOUT_ID, _ATTEMPT_ID, _SEQUENCE_ID = (
    LightningResourceAttributes.ROLLOUT_ID.value,
    LightningResourceAttributes.ATTEMPT_ID.value,
    LightningResourceAttributes.SPAN_SEQUENCE_ID.value,
)
_USAGE = {
    "prompt_tokens": "gen_ai.usage.prompt_tokens",
    "completion_tokens": "gen_ai.usage.completion_tokens",
    "total_tokens": "llm.usage.total_tokens",
}
_Pairs = Iterator[tuple[str, AttributeValue]]
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (0, -1),
    "top_p": (1,),
}
"""Settings, with their neutral values."""
_GRAMMARS: Final = (
    *("guided_choice", "guided_grammar", "guided_json", "guided_regex", "structural_tag", "structured_outputs"),
    *("ebnf", "grammar", "json_schema", "regex"),
)
"""Names of a grammar in requests of vLLM, SGLang and llama.cpp."""


def spans_of(call: GatewayCall, kept_bytes: int = KEPT_BYTES) -> list[Span]:
    """Return the spans of a call that has ended: two per choice, the parent first; all have the call's number.

    They take little more than `kept_bytes` as JSON. A choice with token ids that are too large is `no_tokens`.
    """
    choices, end_time = call.by_choice(), time.time()
    prompt_attributes: Attributes = {}
    asked_by: GatewayCall | None = None
    spans: list[Span] = []
    for choice in choices:
        if asked_by is None or choice.prompt is not asked_by.prompt:  # else long prompts are written for each
            prompt_attributes, asked_by = dict(_asked(choice)), choice
        spans += _pair(choice, prompt_attributes, kept_bytes // len(choices), end_time)
    return spans


def _pair(call: GatewayCall, prompt_attributes: Attributes, kept_bytes: int, end_time: float) -> list[Span]:
    trace_id = derive_id(call.call_id, 0, 32)
    parent_id, child_id = (derive_id(call.call_id, index, 16) for index in (1, 2))  # the same call, the same spans
    request_attributes, raw_attributes = {**prompt_attributes, **dict(_replied(call))}, dict(_raw_attributes(call))
    if not surely_fit((request_attributes, raw_attributes), kept_bytes):
        attributes = _tokens_together(call, fitting({**request_attributes, **raw_attributes}, kept_bytes))
        request_keys = (*request_attributes, NOT_KEPT)
        request_attributes = {key: attributes.pop(key) for key in request_keys if key in attributes}
        raw_attributes = attributes
    request_span = _span(call, trace_id, parent_id, end_time, request_attributes)
    below: dict[str, object] = {
        "name": RAW_SPAN,
        "span_id": child_id,
        "parent_id": parent_id,
        "context": _context(trace_id, child_id),
        "parent": request_span.context,
        "kind": "CLIENT",
        "attributes": raw_attributes,
        "events": [],
        "links": [],
    }
    return [request_span, made(Span, {**request_span.__dict__, **below})]


def bare_spans_of(call: GatewayCall, why: Exception) -> list[Span]:
    """Return the spans of a call that cannot be written: only its outcome. One with a reply is recorded as failed."""
    if call.state in ("ok", "no_tokens", "no_generation"):
        call.failed(CallFailed(500, f"The call cannot be recorded ({type(why).__name__})", state="upstream_error"))
    return spans_of(replace(call, prompt=None, request=None, reply=None, tokens=None))


def size_of(key: str, value: AttributeValue) -> int:
    """Return the size in bytes of an attribute in a request to a store."""
    if isinstance(value, str) and not value.isascii():
        ascii_only = value.encode("ascii", "ignore").decode()
        units = len(value.encode("utf-16-le", "surrogatepass")) // 2
        return _EACH + len(key) + len(to_json(ascii_only)) + 6 * (units - len(ascii_only))
    return _EACH + len(key) + len(to_json(value, inf_nan_mode="constants"))


def surely_fit(attributes: Iterable[Attributes], budget: int) -> bool:
    """True if attributes take at most `budget` bytes even if every character is escaped; true for most calls.

    Numbers in them are floats and integers of 64 bits.
    """
    most = 0
    for pairs in attributes:
        for key, value in pairs.items():
            if isinstance(value, str):
                most += _EACH + len(key) + 12 * len(value) + 2
            else:
                most += _EACH + len(key) + _NUMBER * (1 if isinstance(value, (int, float)) else len(value)) + 2
    return most <= budget


def fitting(attributes: Attributes, budget: int) -> Attributes:
    """Return the attributes with large parts replaced, so that together they take at most `budget` bytes.

    The attributes of the outcome are short and always kept.
    """
    result, sizes = dict(attributes), {key: size_of(key, value) for key, value in attributes.items()}
    total = sum(sizes.values())
    if total <= budget:
        return result
    for key in sorted(result, key=sizes.__getitem__, reverse=True):
        if total > budget and isinstance(text := result[key], str) and sizes[key] > _STAND_IN + 200:
            result[key] = stand_in(text.encode())
            total -= sizes[key]
            sizes[key] = size_of(key, result[key])
            total += sizes[key]
    left_out: list[str] = []
    for key in [key for key in reversed(result) if key.startswith(_MANY)] if total > budget else ():
        if total + _STAND_IN + len(NOT_KEPT) > budget:  # the last of very many texts: one attribute stands for them
            left_out.append(key)
            total -= sizes[key]
    if left_out:
        raw = b"".join(to_json([key, result.pop(key)]) for key in reversed(left_out))
        result[NOT_KEPT] = stand_in(raw, f"{len(left_out)} attributes, ")
        total += size_of(NOT_KEPT, result[NOT_KEPT])
    for key in sorted((key for key in _TOKENS if key in result), key=sizes.__getitem__, reverse=True):
        if total > budget:
            del result[key]
            total -= sizes[key]
    return result


def stand_in(raw: bytes, what: str = "") -> str:
    """Return the replacement of a value that is too large to keep."""
    return f"[not kept: {what}{len(raw)} bytes, sha256 {hashlib.sha256(raw).hexdigest()}]"


def _tokens_together(call: GatewayCall, attributes: Attributes) -> Attributes:
    """Return the attributes with all tokens or none: incomplete tokens cannot be trained."""
    tokens, keys = call.tokens, LightningCallAttributes
    if tokens is not None and not all(
        key in attributes for key in (_TOKENS[:2] if tokens.prompt_token_ids else _TOKENS[1:2])
    ):
        attributes = {key: value for key, value in attributes.items() if key not in _TOKENS}
        attributes[keys.PROMPT_TOKENS.value] = len(tokens.prompt_token_ids)
        attributes[keys.COMPLETION_TOKENS.value] = len(tokens.completion_token_ids)
        if call.state == "ok":
            attributes[keys.STATE.value] = "no_tokens"
    return attributes


def _span(call: GatewayCall, trace_id: str, span_id: str, end_time: float, attributes: Attributes) -> Span:
    status = {"status_code": "ERROR" if call.error else "OK", "description": call.error}
    resource = {
        _ROLLOUT_ID: call.rollout_id,
        _ATTEMPT_ID: call.attempt_id,
        _SEQUENCE_ID: call.sequence_id,
    }
    fields: dict[str, object] = {  # all values have their types; checking them again costs a third of a call
        "rollout_id": call.rollout_id,
        "attempt_id": call.attempt_id,
        "sequence_id": call.sequence_id,
        "trace_id": trace_id,
        "span_id": span_id,
        "parent_id": None,
        "name": REQUEST_SPAN,
        "status": made(TraceStatus, status),
        "attributes": attributes,
        "events": [],
        "links": [],
        "start_time": call.arrived_at,
        "end_time": end_time,
        "context": _context(trace_id, span_id),
        "parent": None,
        "resource": made(OtelResource, {"attributes": resource, "schema_url": ""}),
        "kind": "SERVER",
        "scope": {"name": "agentlightning.llm_proxy", "version": None},
        "dropped": None,
        "flags": None,
    }
    return made(Span, fields)


def _context(trace_id: str, span_id: str) -> SpanContext:
    return made(SpanContext, {"trace_id": trace_id, "span_id": span_id, "is_remote": False, "trace_state": {}})


def _text(value: object) -> str:
    """Return a text unchanged, another value as JSON; a lone surrogate, which stores cannot hold, becomes `?`."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _number(value: float) -> AttributeValue:
    """Return a number unchanged if every store can hold it, else as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    return value if abs(value) <= LARGEST_COUNT else _text(str(value))


def _asked(call: GatewayCall) -> _Pairs:
    request = call.request or {}
    engine = None if call.engine is None else call.engine.system
    # the name of the server, if the call reached one; else vLLM's
    yield "gen_ai.system", engine or (call.endpoint.provider if call.endpoint is not None else "hosted_vllm")
    yield "llm.request.type", DIALECTS[call.dialect].kind
    yield "llm.is_streaming", str(call.streamed)
    for name in _PARAMETERS:
        if isinstance(value := request.get(name), (str, int, float, bool)):
            yield f"gen_ai.request.{name}", _text(value) if isinstance(value, str) else _number(value)
    for index, message in enumerate(objects(request.get("messages") if call.prompt is None else call.prompt)):
        yield from _message(f"gen_ai.prompt.{index}", message)
    for index, tool in enumerate(objects(request.get("tools"))):
        function = fields_of(tool.get("function", tool))
        function = {"parameters": function.get("input_schema"), **function}  # Anthropic's name of it
        yield from _texts(f"llm.request.functions.{index}", function, ("name", "description", "parameters"))


def _replied(call: GatewayCall) -> _Pairs:
    reply = call.reply or {}
    for index, choice in enumerate(objects(reply.get("choices"))):
        yield from _message(f"gen_ai.completion.{index}", choice.get("message"))
        if isinstance(reason := choice.get("finish_reason"), str):
            yield f"gen_ai.completion.{index}.finish_reason", _text(reason)
    for name in ("id", "model"):
        if isinstance(value := reply.get(name), str):
            yield f"gen_ai.response.{name}", _text(value)
    for name, key in _USAGE.items():
        value = object_in(reply, "usage").get(name)
        if type(value) is int and value == count_of(value):
            yield key, value
    if call.error:
        yield "error.type", call.state
        yield "error.message", _text(call.error)


def _message(key: str, message: object) -> _Pairs:
    fields = fields_of(message)
    names = ("role", "content", "name", "tool_call_id", "reasoning_content", "reasoning", "refusal")
    yield from _texts(key, fields, names)
    for index, tool_call in enumerate(objects(fields.get("tool_calls"))):
        function = {"id": tool_call.get("id"), **object_in(tool_call, "function")}
        yield from _texts(f"{key}.tool_calls.{index}", function, ("id", "name", "arguments"))


def _texts(key: str, fields: Json, names: Iterable[str]) -> _Pairs:
    return ((f"{key}.{name}", _text(value)) for name in names if (value := fields.get(name)) is not None)


def _raw_attributes(call: GatewayCall) -> _Pairs:
    keys, policy = LightningCallAttributes, call.policy
    choice, choices = call.choice or (None, None)
    first_frame_seconds = None if call.first_frame_at is None else max(0.0, call.first_frame_at - call.arrived_at)
    values: dict[str, AttributeValue | None] = {
        keys.CALL_ID.value: call.call_id,
        keys.STATE.value: call.state,
        keys.HTTP_STATUS.value: call.http_status,
        keys.UPSTREAM_TRIES.value: call.upstream_tries,
        keys.LATENCY_SECONDS.value: call.seconds,
        keys.DIALECT.value: call.dialect,
        keys.STREAMED.value: call.streamed,
        keys.ROLE.value: call.role,
        keys.MODEL.value: call.model if call.request is not None and call.model != call.request.get("model") else None,
        keys.CLIENT_SPAN.value: call.client_span,
        keys.BODY_DIGEST.value: call.body_digest,
        keys.POLICY.value: None if policy is None else policy.name,
        keys.POLICY_KIND.value: None if policy is None else policy.kind,
        keys.CHOICES.value: choices,
        keys.CHOICE.value: choice,
        keys.ERROR_CODE.value: call.error_code,
        keys.FIRST_FRAME_SECONDS.value: first_frame_seconds,
        keys.WEIGHT_VERSION.value: call.weight_version,
    }
    yield from ((key, value) for key, value in values.items() if value is not None)
    if call.request is not None and (settings := constrained_by(call.request)):
        yield keys.CONSTRAINED_BY.value, settings
    if call.filled_in:
        yield keys.FILLED_IN.value, list(call.filled_in)
    if call.left_out_tools:
        yield keys.LEFT_OUT_TOOLS.value, list(call.left_out_tools)
    if call.reply is not None:
        yield from _reply_text(call.reply, call.tokens)
    if call.tokens is not None:
        if call.tokens.prompt_token_ids:
            yield keys.PROMPT_TOKEN_IDS.value, call.tokens.prompt_token_ids
        yield keys.COMPLETION_TOKEN_IDS.value, call.tokens.completion_token_ids
        if call.tokens.logprobs is not None:
            yield keys.COMPLETION_LOGPROBS.value, call.tokens.logprobs


def _literal(value: object, checked: Iterable[list[int]]) -> str:
    """Return a value as a Python literal; a list in `checked` is known to hold integers and takes half the time."""
    if any(value is ids for ids in checked):
        return to_json(value).replace(b",", b", ").decode()
    return repr(value)


def _reply_text(reply: Json, tokens: CallTokens | None) -> _Pairs:
    """Return the text form: Python literals of all choices, without the contents of the parent, in vLLM's spelling."""
    for name in ("id", "model"):
        if isinstance(value := reply.get(name), str):
            yield f"llm.hosted_vllm.{name}", _text(value)
    prompt_ids = reply.get("prompt_token_ids") or (tokens.prompt_token_ids if tokens is not None else None)
    checked = () if tokens is None else (tokens.prompt_token_ids, tokens.completion_token_ids)
    if prompt_ids:
        yield "llm.hosted_vllm.prompt_token_ids", _text(_literal(prompt_ids, checked))
    names = ("index", "token_ids", "finish_reason")
    choices = [{name: choice[name] for name in names if name in choice} for choice in reply["choices"]]
    if choices:
        if tokens is not None and not choices[0].get("token_ids"):
            choices[0]["token_ids"] = tokens.completion_token_ids
        texts = (", ".join(f"{n!r}: {_literal(v, checked)}" for n, v in choice.items()) for choice in choices)
        yield "llm.hosted_vllm.choices", _text(f"[{', '.join(f'{{{fields}}}' for fields in texts)}]")
        if isinstance(reason := reply["choices"][0].get("finish_reason"), str):
            yield LightningCallAttributes.FINISH_REASON.value, _text(reason)


def constrained_by(request: Json) -> list[str]:
    """Return the settings of a request (any dialect) that change the distribution from which tokens are sampled.

    With them the recorded log-probabilities differ from those of the sampling: a server returns the model's (vLLM's
    `raw_logprobs`, the embedded engine), to which the learner's are compared. The settings, in alphabetical order, are
    recorded on the call, so that the ledger can count such calls and the user can decide whether to train them.
    """
    names = [name for name, neutral in _NEUTRAL.items() if request.get(name) not in (None, *neutral)]
    names += [name for name in _GRAMMARS if request.get(name) is not None]
    if request.get("temperature") == 0:  # only the likeliest token; another one changes the log-probabilities too
        names.append("temperature")
    choice = request.get("tool_choice")
    if fields_of(choice).get("type", choice) in ("required", "any", "tool", "function"):
        names.append("tool_choice")
    if _is_json(request.get("response_format")):
        names.append("response_format")
    if _is_json(fields_of(request.get("text")).get("format")):
        names.append("text.format")
    output = fields_of(request.get("output_config")).get("format") or request.get("output_format")
    if _is_json(output):
        names.append("output_format")
    return sorted(names)


def _is_json(form: object) -> bool:
    return fields_of(form).get("type") in ("json_object", "json_schema")
