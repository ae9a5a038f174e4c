"""Span names and attribute keys that tracers write and adapters read."""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal

from agentlightning.base.field_help import Value

AGL_ANNOTATION = "agentlightning.annotation"
"""Span with data about the rollout: a reward, tags or your own data."""
AGL_MESSAGE = "agentlightning.message"
"""Span of a message, written by `emit_message`."""
AGL_OBJECT = "agentlightning.object"
"""Span of an object, written by `emit_object`."""
AGL_EXCEPTION = "agentlightning.exception"
"""Span of an exception, written by `emit_exception`, with OpenTelemetry's attributes."""
AGL_OPERATION = "agentlightning.operation"
"""Span of a block or function that `operation` traces."""
AGL_REWARD = "agentlightning.reward"
"""In v0.3, name of the reward span. Now a value of the attribute `agentlightning.operation.name`, for a function that
returns a reward."""
AGL_VIRTUAL = "agentlightning.virtual"
"""Placeholder for the name of an unnamed span, and name of the span that an adapter adds above several root spans.
Tracers never store it."""
AGL_SPANS_CUT = "agentlightning.spans_cut"
"""Last span of an attempt that recorded more than 20,000 spans: number of dropped spans. Rewards are not dropped."""

REQUEST_SPAN: Final = "litellm_request"
"""Span of a model call through the gateway, with the messages."""
RAW_SPAN: Final = "raw_gen_ai_request"
"""Child of `litellm_request`, with the tokens."""

CHANGED_TEXTS = "agentlightning.changed_texts"
"""Keys of the attributes with changed texts. A text is changed if a store cannot hold it (half a surrogate pair becomes
U+FFFD) or if it is longer than 8 Mi characters."""

HIDDEN_KEYS = "agentlightning.hidden_keys"
"""Keys of the attributes in which a text was hidden because it looks like an API key."""

ATTEMPT_HEADER = "X-Agl-Attempt"
"""Header of a request from the gateway to the embedded engine: `ROLLOUT/ATTEMPT/CALL`, each quoted as in a URL. It is
not sent to other servers."""

CONTROL_PREFIX = "agl-control:"
"""Prefix of worker ids that hold notes of runs instead of a worker. Lists exclude them unless requested."""


class LightningResourceAttributes(Enum):
    """Keys on the resource of a span that assign the span to a rollout and an attempt."""

    ROLLOUT_ID = "agentlightning.rollout_id"
    """Id of the rollout that the span belongs to."""
    ATTEMPT_ID = "agentlightning.attempt_id"
    """Id of the attempt that the span belongs to."""
    SPAN_SEQUENCE_ID = "agentlightning.span_sequence_id"
    """Number of the span within its rollout."""
    TRACER_NAME = "agentlightning.tracer.name"
    """Name of the tracer that recorded the span."""


class LightningSpanAttributes(Enum):
    """Keys (or key prefixes) on a span that the emitters write."""

    REWARD = "agentlightning.reward"
    """Prefix of the dimensions of a reward: `.<i>.name` and `.<i>.value`. Dimension 0 is used for training."""
    LINK = "agentlightning.link"
    """Prefix of links to other spans: `.<i>.key_match` and `.<i>.value_match`."""
    TAG = "agentlightning.tag"
    """Prefix of tags: `.<i>` is a string."""
    MESSAGE_BODY = "agentlightning.message.body"
    """Text of a message."""
    OBJECT_TYPE = "agentlightning.object.type"
    """Python type of an object."""
    OBJECT_LITERAL = "agentlightning.object.literal"
    """String, number, bool or bytes (base64), as text."""
    OBJECT_JSON = "agentlightning.object.json"
    """Any other object, as JSON."""
    OPERATION_NAME = "agentlightning.operation.name"
    """Name of the block or function."""
    OPERATION_INPUT = "agentlightning.operation.input"
    """Prefix of the arguments: `.<argument>`, as JSON."""
    OPERATION_OUTPUT = "agentlightning.operation.output"
    """Return value, as JSON."""


class LightningCutAttributes(Enum):
    """Keys on a span `AGL_SPANS_CUT`: numbers of spans."""

    KEPT = "agentlightning.spans_cut.kept"
    """Number of spans of the attempt that were stored."""
    LEFT_OUT = "agentlightning.spans_cut.left_out"
    """Number of spans of the attempt that were dropped."""


class LightningCallAttributes(Enum):
    """Typed keys of a model call, on the `raw_gen_ai_request` span of the gateway.

    Token ids are lists of integers, log-probabilities lists of floats (natural logarithm, one per completion token).
    """

    CALL_ID = "agentlightning.call.id"
    """Id of the call in the ledger, in rows and in replays."""
    PROMPT_TOKEN_IDS = "agentlightning.call.prompt_token_ids"
    """Token ids of the prompt that the engine received."""
    COMPLETION_TOKEN_IDS = "agentlightning.call.completion_token_ids"
    """Token ids that the engine sampled."""
    COMPLETION_LOGPROBS = "agentlightning.call.completion_logprobs"
    """Log-probability of each sampled token."""
    PROMPT_TOKENS = "agentlightning.call.prompt_tokens"
    """Number of prompt tokens, if the ids are not stored."""
    COMPLETION_TOKENS = "agentlightning.call.completion_tokens"
    """Number of completion tokens, if the ids are not stored."""
    FINISH_REASON = "agentlightning.call.finish_reason"
    """Reason why the reply ended: `stop`, `length`, `tool_calls`, ..."""
    WEIGHT_VERSION = "agentlightning.call.weight_version"
    """Version of the weights that sampled the tokens."""
    HTTP_STATUS = "agentlightning.call.http_status"
    """HTTP status of the response to the agent."""
    UPSTREAM_TRIES = "agentlightning.call.upstream_tries"
    """Number of requests to the model for this call."""
    LATENCY_SECONDS = "agentlightning.call.latency_seconds"
    """Seconds from the request to the end of the response."""
    DIALECT = "agentlightning.call.dialect"
    """Route that the agent called: chat/completions, messages, ..."""
    STREAMED = "agentlightning.call.streamed"
    """True if the agent requested a stream."""
    FIRST_FRAME_SECONDS = "agentlightning.call.first_frame_seconds"
    """Seconds from the request to the first part of a stream."""
    CHOICES = "agentlightning.call.choices"
    """Number of completions that the request asked for, if more than one. Each is recorded as a separate call."""
    CHOICE = "agentlightning.call.choice"
    """Index of this completion among several completions of one request, from 0."""
    MODEL = "agentlightning.call.model"
    """Name in `model_list` of the model that was called. Set only if it differs from `gen_ai.request.model`: the
    request used an alias, or the gateway called a fallback."""
    POLICY = "agentlightning.call.policy"
    """Name of the policy that the call belongs to, if the gateway has policies."""
    POLICY_KIND = "agentlightning.call.policy_kind"
    """Kind of the policy: `trained`, `frozen` or `external`."""
    CONSTRAINED_BY = "agentlightning.call.constrained_by"
    """Settings of the request that change the distribution of the sampled tokens, such as `response_format`,
    `tool_choice` or `top_p`. The recorded log-probabilities are those of the model without these settings."""
    FILLED_IN = "agentlightning.call.filled_in"
    """Fields of the request that the agent did not set, and that the gateway set to the sampling parameters of the
    rollout's resource, such as `temperature`. Their values are in `gen_ai.request.<setting>`."""
    LEFT_OUT_TOOLS = "agentlightning.call.left_out_tools"
    """Types of the request's tools that were not passed to the model, because only a vendor's server can run them:
    `web_search`, `code_interpreter`, ..."""
    ROLE = "agentlightning.call.role"
    """Role of the agent, if its URL names one."""
    CLIENT_SPAN = "agentlightning.call.client_span"
    """Span in which the agent's client sent the request, from the `traceparent` header: trace id and span id in
    hexadecimal, joined by a hyphen."""
    BODY_DIGEST = "agentlightning.call.body_digest"
    """Hash of the request body, with a secret key of the gateway's process. Requests of an attempt with the same bytes
    have the same hash."""
    STATE = "agentlightning.call.state"
    """Final state of the call: `ok`, `no_tokens`, `no_generation`, `upstream_error`, `refused`, `client_left`."""
    ERROR_CODE = "agentlightning.call.error_code"
    """Error code of the gateway for a call that failed: `budget_exhausted`, `model_not_found`, ..."""
    NOT_KEPT = "agentlightning.call.not_kept"
    """On `litellm_request`: number, size and SHA-256 of the attributes that were dropped because the record of the call
    was too large."""


CONVENTIONAL_KEYS: Final[dict[str, str]] = {
    "gen_ai.system": "engine or provider that served the call",
    "gen_ai.operation.name": "`chat`, `text_completion` or `embeddings`; written only by client libraries",
    "gen_ai.request.<setting>": "setting of the request: `model`, `temperature`, `max_tokens`, `n`, `seed`, ...",
    "gen_ai.prompt.<i>.<field>": "message of the prompt: `role`, `content`, `name`, `tool_call_id`, ...",
    "gen_ai.prompt.<i>.tool_calls.<j>.<field>": "tool call in the message: `id`, `name`, `arguments`",
    "gen_ai.completion.<i>.<field>": "reply: `role`, `content`, `finish_reason`, `reasoning_content`, `refusal`",
    "gen_ai.completion.<i>.tool_calls.<j>.<field>": "tool call in the message: `id`, `name`, `arguments`",
    "gen_ai.response.id": "id of the reply; a reward can refer to its call by this id",
    "gen_ai.response.model": "model name in the reply",
    "gen_ai.response.finish_reasons": "finish reasons of all completions; written by client libraries",
    "gen_ai.usage.prompt_tokens": "number of prompt tokens, from the reply",
    "gen_ai.usage.completion_tokens": "number of completion tokens, from the reply",
    "llm.usage.total_tokens": "sum of prompt and completion tokens",
    "llm.request.type": "`chat`, `completion` or `embedding`",
    "llm.request.functions.<i>.<field>": "tool that the model may call: `name`, `description`, `parameters`",
    "llm.is_streaming": "`True` or `False`",
    "llm.hosted_vllm.<field>": "field of the reply, as a Python literal: `id`, `model`, `prompt_token_ids`, `choices`",
    "prompt_token_ids": "token ids of the prompt, recorded by a client library",
    "response_token_ids": "token ids of the reply, recorded by a client library",
    "logprobs.content": "log-probabilities as JSON, recorded by a client library",
    "error.type": "from the gateway: state of a failed call; from a client library: class of the error",
    "error.message": "text of the error",
    "exception.type": "class of an exception",
    "exception.message": "text of the exception",
    "exception.stacktrace": "traceback of the exception",
    "exception.escaped": "whether the exception left the block in which it was raised",
}
"""Keys of other conventions that tracers, client libraries and the gateway write; `<i>` counts from 0."""

CallState = Literal["ok", "no_tokens", "no_generation", "upstream_error", "refused", "client_left"]
"""Final state of a call, stored on its span as `LightningCallAttributes.STATE`."""
BUDGET_EXHAUSTED = "budget_exhausted"
"""Error code of a refused call after the rollout has used up its token or cost budget."""
STALE = "agentlightning.stale"
"""Set by the store on a span that arrived after its attempt had ended or a later attempt had begun."""


class RewardAttributes(Enum):
    """Keys of one reward dimension, below `agentlightning.reward.<i>`."""

    REWARD_NAME = "name"
    """Name of the dimension, such as `primary`."""
    REWARD_VALUE = "value"
    """Value of the dimension, a finite number with an absolute value of at most 1e15."""


class RewardPydanticModel(Value):
    """One dimension of a reward. Element 0 of a list is the primary dimension."""

    name: str
    """Name of the dimension, such as `primary`."""
    value: float
    """Finite number."""


class LinkAttributes(Enum):
    """Keys of one link, below `agentlightning.link.<i>`."""

    KEY_MATCH = "key_match"
    """Name of the attribute to compare."""
    VALUE_MATCH = "value_match"
    """Required value of the attribute."""


class LinkPydanticModel(Value):
    """A link to all spans with the value `value_match` in attribute `key_match` (reserved: `trace_id`, `span_id`)."""

    key_match: str
    """Name of the attribute to compare."""
    value_match: str
    """Required value of the attribute."""
