"""Span names and attribute keys: the words that tracers write and adapters read. Nothing else lives here."""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal

from agentlightning.field_help import Value

AGL_ANNOTATION = "agentlightning.annotation"
AGL_MESSAGE = "agentlightning.message"
AGL_OBJECT = "agentlightning.object"
AGL_EXCEPTION = "agentlightning.exception"
AGL_OPERATION = "agentlightning.operation"
AGL_REWARD = "agentlightning.reward"
AGL_VIRTUAL = "agentlightning.virtual"
AGL_SPANS_CUT = "agentlightning.spans_cut"
"""The last span of an attempt that had more spans than are kept (20,000, and rewards): says how many are left out."""

REQUEST_SPAN: Final = "litellm_request"
"""Name of the gateway's span of a model call that holds the messages."""
RAW_SPAN: Final = "raw_gen_ai_request"
"""Name of the span below it, which holds the tokens."""

CHANGED_TEXTS = "agentlightning.changed_texts"
"""Attribute of a span: the keys whose texts were changed because no store can hold them (half a surrogate pair became
U+FFFD) or because they were longer than 8 Mi characters."""

HIDDEN_KEYS = "agentlightning.hidden_keys"
"""Attribute of a span: the places in whose texts something was hidden that has the shape of a key."""

ATTEMPT_HEADER = "X-Agl-Attempt"
"""Header in which the gateway tells the embedded engine, and no other, which call it is: `ROLLOUT/ATTEMPT/CALL`, each
quoted as in a URL."""

CONTROL_PREFIX = "agl-control:"
"""Ids of rows among the workers that no worker is behind: notes of runs. Lists leave them out unless asked for it."""


class LightningResourceAttributes(Enum):
    """Keys on the resource of a span; they route a span to its rollout and attempt."""

    ROLLOUT_ID = "agentlightning.rollout_id"
    ATTEMPT_ID = "agentlightning.attempt_id"
    SPAN_SEQUENCE_ID = "agentlightning.span_sequence_id"
    TRACER_NAME = "agentlightning.tracer.name"


class LightningSpanAttributes(Enum):
    """Keys (or key prefixes) on a span that the emitters write."""

    REWARD = "agentlightning.reward"
    LINK = "agentlightning.link"
    TAG = "agentlightning.tag"
    MESSAGE_BODY = "agentlightning.message.body"
    OBJECT_TYPE = "agentlightning.object.type"
    OBJECT_LITERAL = "agentlightning.object.literal"
    OBJECT_JSON = "agentlightning.object.json"
    OPERATION_NAME = "agentlightning.operation.name"
    OPERATION_INPUT = "agentlightning.operation.input"
    OPERATION_OUTPUT = "agentlightning.operation.output"


class LightningCutAttributes(Enum):
    """Keys on a span `AGL_SPANS_CUT`: counts of spans."""

    KEPT = "agentlightning.spans_cut.kept"
    LEFT_OUT = "agentlightning.spans_cut.left_out"


class LightningCallAttributes(Enum):
    """Typed keys of one model call as the gateway saw it (on its `raw_gen_ai_request` span).

    Token ids are lists of integers, log-probabilities lists of floats (natural logarithm, one per completion token).
    """

    CALL_ID = "agentlightning.call.id"
    PROMPT_TOKEN_IDS = "agentlightning.call.prompt_token_ids"
    COMPLETION_TOKEN_IDS = "agentlightning.call.completion_token_ids"
    COMPLETION_LOGPROBS = "agentlightning.call.completion_logprobs"
    PROMPT_TOKENS = "agentlightning.call.prompt_tokens"
    """How many, where the ids themselves are not kept."""
    COMPLETION_TOKENS = "agentlightning.call.completion_tokens"
    FINISH_REASON = "agentlightning.call.finish_reason"
    WEIGHT_VERSION = "agentlightning.call.weight_version"
    HTTP_STATUS = "agentlightning.call.http_status"
    UPSTREAM_TRIES = "agentlightning.call.upstream_tries"
    LATENCY_SECONDS = "agentlightning.call.latency_seconds"
    DIALECT = "agentlightning.call.dialect"
    """Route that the agent called: `chat/completions`, `messages`, ..."""
    STREAMED = "agentlightning.call.streamed"
    FIRST_FRAME_SECONDS = "agentlightning.call.first_frame_seconds"
    CHOICES = "agentlightning.call.choices"
    """How many replies the model gave to the request, if more than one; each is recorded as a call."""
    CHOICE = "agentlightning.call.choice"
    """Which of several it is, from 0."""
    POLICY = "agentlightning.call.policy"
    """Name of the policy that the call belongs to, where the gateway has policies."""
    POLICY_KIND = "agentlightning.call.policy_kind"
    """`trained`, `frozen` or `external`."""
    CONSTRAINED_BY = "agentlightning.call.constrained_by"
    """Settings of the request under which tokens were drawn from another distribution than the model's own, of which
    the log-probabilities are: `response_format`, `tool_choice`, `top_p`, ..."""
    ROLE = "agentlightning.call.role"
    """Of the agent, where its URL names one."""
    STATE = "agentlightning.call.state"
    """How the call ended: `ok`, `no_tokens`, `no_generation`, `upstream_error`, `refused`, `client_left`."""
    ERROR_CODE = "agentlightning.call.error_code"
    """Of the gateway's own error, where there is no answer: `BUDGET_EXHAUSTED`, `model_not_found`, ..."""


CallState = Literal["ok", "no_tokens", "no_generation", "upstream_error", "refused", "client_left"]
"""How a call ended, as its span says it (`LightningCallAttributes.STATE`)."""
BUDGET_EXHAUSTED = "budget_exhausted"
"""Code of the refusal of a call whose rollout has used up its tokens or its money."""
STALE = "agentlightning.stale"
"""Set by the store on a span that arrived for an attempt that is no longer the latest."""


class RewardAttributes(Enum):
    """Keys of one reward dimension, below `agentlightning.reward.<i>`."""

    REWARD_NAME = "name"
    REWARD_VALUE = "value"


class RewardPydanticModel(Value):
    """One dimension of a reward; element 0 of a list of them is the primary one."""

    name: str
    """The dimension, such as `primary`."""
    value: float
    """A finite number."""


class LinkAttributes(Enum):
    """Keys of one link, below `agentlightning.link.<i>`."""

    KEY_MATCH = "key_match"
    VALUE_MATCH = "value_match"


class LinkPydanticModel(Value):
    """All spans whose attribute `key_match` equals `value_match` (`trace_id` and `span_id` are reserved keys)."""

    key_match: str
    """The attribute to compare."""
    value_match: str
    """The value that it must have."""
