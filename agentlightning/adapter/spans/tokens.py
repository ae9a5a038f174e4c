"""Reads a model call from its span: token ids, log-probabilities, finish reason, ids, weight version and outcome.

Three conventions are read; for each field, the first one with a value is used:

1. the typed attributes of the gateway (`semconv.LightningCallAttributes`);
2. the gateway's text form, `llm.hosted_vllm.*`, in JSON or as a Python literal;
3. attributes of instrumented clients: `prompt_token_ids`, `agentlightning.operation.output.*`, `logprobs.content`, ...

Only the first of several choices is read; the others are reported as `extra_choices`. From a record that the gateway
marked `no_tokens`, no tokens are read, because the gateway found those in its text form unusable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, cast, get_args

from agentlightning.adapter.spans.attributes import (
    AttributeReader,
    Fields,
    Problem,
    as_dict,
    finite_floats,
    is_list,
    token_ids,
)
from agentlightning.adapter.spans.content import response_id_in_output
from agentlightning.semconv import (
    BUDGET_EXHAUSTED,
    RAW_SPAN,
    STALE,
    CallState,
    LightningCallAttributes,
    LightningSpanAttributes,
)
from agentlightning.types import Span

FAILED_STATES: Final[frozenset[CallState]] = frozenset(("upstream_error", "refused", "client_left"))
"""States in which the agent received no reply from the call."""
_STATES: Final = frozenset(get_args(CallState))

_VLLM: Final = "llm.hosted_vllm."
_CHOICES: Final = _VLLM + "choices"
_OUTPUT: Final = LightningSpanAttributes.OPERATION_OUTPUT.value
_CALL_ID: Final = LightningCallAttributes.CALL_ID.value
_COMPLETION: Final = LightningCallAttributes.COMPLETION_TOKEN_IDS.value
_LOGPROBS: Final = LightningCallAttributes.COMPLETION_LOGPROBS.value
_FINISH_REASON: Final = LightningCallAttributes.FINISH_REASON.value
_WEIGHT_VERSION: Final = LightningCallAttributes.WEIGHT_VERSION.value
_STATE: Final = LightningCallAttributes.STATE.value
_POLICY: Final = LightningCallAttributes.POLICY.value
_ERROR_CODE: Final = LightningCallAttributes.ERROR_CODE.value
_CONSTRAINED_BY: Final = LightningCallAttributes.CONSTRAINED_BY.value
_ROLE: Final = LightningCallAttributes.ROLE.value
_CHOICE: Final = LightningCallAttributes.CHOICE.value
_CLIENT_SPAN: Final = LightningCallAttributes.CLIENT_SPAN.value
_BODY_DIGEST: Final = LightningCallAttributes.BODY_DIGEST.value
_FINISH_REASON_KEYS: Final = ("gen_ai.completion.0.finish_reason", _OUTPUT + ".choices.0.finish_reason")
_CLIENT_LOGPROBS: Final = "logprobs.content"
_CLIENT_PROMPT_KEYS: Final = ("prompt_token_ids", _OUTPUT + ".prompt_token_ids")
_PROMPT_KEYS: Final = (
    LightningCallAttributes.PROMPT_TOKEN_IDS.value,
    _VLLM + "prompt_token_ids",
    *_CLIENT_PROMPT_KEYS,
)
_REPLY_ID_KEYS: Final = ("gen_ai.response.id", _OUTPUT + ".id", _VLLM + "id")
_CLIENT_COMPLETION_KEYS: Final = (
    "response_token_ids",
    _OUTPUT + ".response_token_ids.0",
    _OUTPUT + ".choices.0.token_ids",
    _OUTPUT + ".choices.0.provider_specific_fields.token_ids",
)
_GATEWAY_KEYS: Final = frozenset(
    (
        *(_COMPLETION, _VLLM + "response_token_ids", _LOGPROBS, _FINISH_REASON, _CHOICES, _WEIGHT_VERSION, _STATE),
        *(_POLICY, _ROLE, _CONSTRAINED_BY, _CALL_ID),
    )
)
"""Keys read by `read_call` in addition to the prompt and those of clients; most tracer spans have none of them."""


class CallReading(NamedTuple):
    """One model call as one span records it. Empty lists and None mean that a value is missing."""

    call_id: str | None
    """Id that the gateway assigned to the call."""
    response_id: str | None
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    logprobs: list[float] | None
    """Natural logarithm, one per completion token (not checked here)."""
    finish_reason: str | None
    weight_version: int | None
    state: CallState
    logprobs_content: list[Any] | None = None
    """Value that an instrumented client wrote under `logprobs.content`, decoded."""
    policy: str | None = None
    """Policy of the call, if the gateway has policies."""
    role: str | None = None
    """Role of the agent, if the URL of the call has one."""
    constrained_by: tuple[str, ...] = ()
    """Settings that changed the sampling distribution from that of `logprobs`."""

    @property
    def has_tokens(self) -> bool:
        """True if both lists of token ids are present."""
        return bool(self.prompt_token_ids and self.completion_token_ids)


def _text(span: Span, key: str) -> str | None:
    value = span.attributes.get(key)
    return value if isinstance(value, str) and value else None


def is_gateway_call(span: Span) -> bool:
    return span.name == RAW_SPAN


def is_stale(span: Span) -> bool:
    """True if the store marked the span as late: its attempt had lapsed."""
    return span.attributes.get(STALE) is True


def client_span(record: Span) -> tuple[str, str] | None:
    """Return the ids of the client's trace and span that the request of a recorded call named, or None."""
    trace_id, _, span_id = (_text(record, _CLIENT_SPAN) or "").partition("-")
    return (trace_id, span_id) if trace_id and span_id else None


def body_digest(record: Span) -> str | None:
    """Return a digest that is equal for recorded calls with the same request bytes, or None."""
    return _text(record, _BODY_DIGEST)


def response_id(span: Span) -> str | None:
    """Return the id that the model server assigned to its reply; None if the span has none."""
    for key in _REPLY_ID_KEYS:
        value = span.attributes.get(key)
        if isinstance(value, str) and value:
            return value
    return response_id_in_output(span.attributes)


def has_client_tokens(span: Span) -> bool:
    """True if an instrumented client recorded token ids of a reply on the span."""
    return any(key in span.attributes for key in _CLIENT_COMPLETION_KEYS)


def is_completion_output(attributes: Mapping[str, object]) -> bool:
    """True if the output of an operation is the reply of a model server, not another object with an id."""
    return _OUTPUT + ".id" in attributes and any(key.startswith(_OUTPUT + ".choices") for key in attributes)


def gateway_call_id(span: Span) -> str | None:
    """Return the id that the gateway assigned to the call; None if the span is not the gateway's."""
    return _text(span, _CALL_ID)


def call_name(span: Span) -> str:
    """Return the id of the call that a span records: that of the gateway, the reply or the span."""
    return gateway_call_id(span) or response_id(span) or span.span_id


def first_choice(record: Span) -> str | None:
    """Return the gateway's call id of the first choice, for the record of another choice; None for other records."""
    choice, name = record.attributes.get(_CHOICE), gateway_call_id(record)
    return name.removesuffix(f"-{choice}") if type(choice) is int and choice > 0 and name is not None else None


def call_role(record: Span | None) -> str | None:
    """Return the role in the URL of a call, or None."""
    return None if record is None else _text(record, _ROLE)


def refused_for_budget(span: Span | None) -> bool:
    """True for the gateway's record of a call that was refused because its rollout's budget was used up."""
    return span is not None and span.attributes.get(_ERROR_CODE) == BUDGET_EXHAUSTED


def generated_nothing(span: Span) -> bool:
    """True for a call of a kind that generates no tokens (embeddings)."""
    return span.attributes.get(_STATE) == "no_generation"


def call_state(span: Span) -> CallState | None:
    """Return the outcome of this span's call as the gateway recorded it, or None."""
    state = span.attributes.get(_STATE)
    return cast(CallState, state) if isinstance(state, str) and state in _STATES else None


def has_failed(span: Span) -> bool:
    """True if the agent received no reply from the call of this span."""
    if (state := call_state(span)) is not None:
        return state in FAILED_STATES
    failed = span.status.status_code == "ERROR" and response_id(span) is None
    return failed and not any(key in span.attributes for key in (*_PROMPT_KEYS, *_CLIENT_COMPLETION_KEYS))


def read_call(span: Span, problems: list[Problem]) -> CallReading:
    """Return the model call that a span records; unusable attributes are added to `problems`."""
    reader = AttributeReader(span, problems)
    unusable = span.attributes.get(_STATE) == "no_tokens"
    prompt = reader.token_ids(*(_CLIENT_PROMPT_KEYS if unusable else _PROMPT_KEYS)) or []
    by_gateway = not _GATEWAY_KEYS.isdisjoint(span.attributes)
    typed = logprobs = finish_reason = weight_version = None
    choice: Fields = {}
    if by_gateway:
        if not unusable:
            typed = reader.token_ids(_COMPLETION, _VLLM + "response_token_ids")
            logprobs = reader.floats(_LOGPROBS)
        finish_reason = reader.text(_FINISH_REASON)
        choices = reader.attributes.get(_CHOICES)
        may_have_several = isinstance(choices, str) and choices.count("index") > 1  # a cheap test: reading it is slow
        is_complete = typed and logprobs and finish_reason and not may_have_several
        choice = {} if is_complete else _first_choice(reader)
    content = _client_logprobs(reader) if _CLIENT_LOGPROBS in span.attributes else None
    finish_reason = finish_reason or _finish_reason(choice, reader)
    if unusable:
        choice = {}
    completion = typed or token_ids(choice.get("token_ids")) or reader.token_ids(*_CLIENT_COMPLETION_KEYS) or []
    logprobs = logprobs or _logprobs(choice.get("logprobs")) or (content and _logprobs({"content": content}))
    state = None
    if by_gateway:
        weight_version = reader.integer(_WEIGHT_VERSION)
        state = reader.text(_STATE)
        if state is not None and state not in _STATES:
            reader.report(_STATE, "one of " + ", ".join(sorted(_STATES)))
    if state not in _STATES:
        state = "ok" if prompt and completion else "upstream_error" if has_failed(span) else "no_tokens"
    common = prompt, completion, logprobs, finish_reason, weight_version, cast(CallState, state), content
    if not by_gateway:
        return CallReading(None, response_id(span), *common)
    ids = gateway_call_id(span), response_id(span)
    return CallReading(*ids, *common, reader.text(_POLICY), reader.text(_ROLE), _constrained_by(span))


def _client_logprobs(reader: AttributeReader) -> list[Any] | None:
    content = reader.decoded(_CLIENT_LOGPROBS)
    if content is None:
        return None
    if is_list(content) and _logprobs({"content": content}) is not None:
        return list(content)
    reader.report(_CLIENT_LOGPROBS, "a list of objects with a finite logprob")
    return None


def _constrained_by(span: Span) -> tuple[str, ...]:
    value = span.attributes.get(_CONSTRAINED_BY)
    return tuple(name for name in value if isinstance(name, str)) if is_list(value) else ()


def _first_choice(reader: AttributeReader) -> Fields:
    choices = reader.decoded(_CHOICES)
    if choices is None:
        return {}
    if not is_list(choices) or not all(isinstance(choice, dict) for choice in choices):
        reader.report(_CHOICES, "a list of choices")
        return {}
    if len(choices) > 1:
        detail = f"{len(choices) - 1} further choices of the call are not read"
        reader.problems.append(Problem("extra_choices", reader.span_id, detail))
    return choices[0] if choices else {}


def _finish_reason(choice: Fields, reader: AttributeReader) -> str | None:
    reason = choice.get("finish_reason")
    if isinstance(reason, str) and reason:
        return reason
    reasons = reader.attributes.get("gen_ai.response.finish_reasons")
    if is_list(reasons) and reasons and isinstance(reasons[0], str):
        return reasons[0]
    return reader.text(*_FINISH_REASON_KEYS)


def _logprobs(value: object) -> list[float] | None:
    """Return the numbers of a chat (`content`) or completions (`token_logprobs`) reply; None if there are none."""
    if not isinstance(value, dict):
        return None
    fields = cast(Fields, value)
    content: Any = fields.get("content")
    if not is_list(content):
        return finite_floats(fields.get("token_logprobs"))
    return finite_floats([as_dict(entry).get("logprob") for entry in content])
