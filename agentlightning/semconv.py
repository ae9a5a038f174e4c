"""Span names and attribute keys, which tracers write and adapters read. Nothing else lives here."""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal

from agentlightning.base.field_help import Value

AGL_ANNOTATION = "agentlightning.annotation"
"""Name of a span with data about the rollout: a reward, tags, anything of the user's."""
AGL_MESSAGE = "agentlightning.message"
"""Name of the span of a message, as `emit_message` writes it."""
AGL_OBJECT = "agentlightning.object"
"""Name of the span of an object, as `emit_object` writes it."""
AGL_EXCEPTION = "agentlightning.exception"
"""Name of the span of an exception, as `emit_exception` writes it; its attributes are OpenTelemetry's."""
AGL_OPERATION = "agentlightning.operation"
"""Name of the span of a block or function that `operation` traces."""
AGL_REWARD = "agentlightning.reward"
"""Operation name of a function whose result is a reward; also name of the older system's reward span."""
AGL_VIRTUAL = "agentlightning.virtual"
"""Name of a span without a name, and of the root above several roots; never stored by a tracer."""
AGL_SPANS_CUT = "agentlightning.spans_cut"
"""The last span of an attempt that exceeded the limit (20,000 spans, and rewards); counts the dropped spans."""

REQUEST_SPAN: Final = "litellm_request"
"""Name of the gateway's span of a model call that holds the messages."""
RAW_SPAN: Final = "raw_gen_ai_request"
"""Name of the span below it, which holds the tokens."""

CHANGED_TEXTS = "agentlightning.changed_texts"
"""Attribute of a span: the keys whose texts were changed because no store can hold them (half a surrogate pair became
U+FFFD) or because they were longer than 8 Mi characters."""

HIDDEN_KEYS = "agentlightning.hidden_keys"
"""Attribute of a span: the keys in whose texts something was hidden that looks like an API key."""

ATTEMPT_HEADER = "X-Agl-Attempt"
"""Header in which the gateway names the call to the embedded engine, and to no other: `ROLLOUT/ATTEMPT/CALL`, each
quoted as in a URL."""

CONTROL_PREFIX = "agl-control:"
"""Prefix of worker ids that belong to no worker: they hold notes of runs. Lists exclude them unless requested."""


class LightningResourceAttributes(Enum):
    """Keys on the resource of a span; they route a span to its rollout and attempt."""

    ROLLOUT_ID = "agentlightning.rollout_id"
    """Id of the rollout that the span belongs to."""
    ATTEMPT_ID = "agentlightning.attempt_id"
    """Id of the attempt that the span belongs to."""
    SPAN_SEQUENCE_ID = "agentlightning.span_sequence_id"
    """Number of the span within its attempt, in the order in which spans began."""
    TRACER_NAME = "agentlightning.tracer.name"
    """Name of the tracer that recorded the span."""


class LightningSpanAttributes(Enum):
    """Keys (or key prefixes) on a span that the emitters write."""

    REWARD = "agentlightning.reward"
    """Prefix of the dimensions of a reward: `.<i>.name` and `.<i>.value`; dimension 0 is the one to learn from."""
    LINK = "agentlightning.link"
    """Prefix of links to other spans: `.<i>.key_match` and `.<i>.value_match`."""
    TAG = "agentlightning.tag"
    """Prefix of tags: `.<i>` is a text."""
    MESSAGE_BODY = "agentlightning.message.body"
    """The text of a message."""
    OBJECT_TYPE = "agentlightning.object.type"
    """Type of an object, as Python names it."""
    OBJECT_LITERAL = "agentlightning.object.literal"
    """A text, a number, a bool or bytes (base64), as text."""
    OBJECT_JSON = "agentlightning.object.json"
    """Any other object, as JSON."""
    OPERATION_NAME = "agentlightning.operation.name"
    """Name of the block or function."""
    OPERATION_INPUT = "agentlightning.operation.input"
    """Prefix of the arguments: `.<argument>`, as JSON."""
    OPERATION_OUTPUT = "agentlightning.operation.output"
    """The return value, as JSON."""


class LightningCutAttributes(Enum):
    """Keys on a span `AGL_SPANS_CUT`: numbers of spans."""

    KEPT = "agentlightning.spans_cut.kept"
    """Number of spans of the attempt that are kept."""
    LEFT_OUT = "agentlightning.spans_cut.left_out"
    """Number of spans of the attempt that are dropped."""


class LightningCallAttributes(Enum):
    """Typed keys of one model call as the gateway recorded it (on its `raw_gen_ai_request` span).

    Token ids are lists of integers, log-probabilities lists of floats (natural logarithm, one per completion token).
    """

    CALL_ID = "agentlightning.call.id"
    """Id of the call, used by ledger, rows and replays."""
    PROMPT_TOKEN_IDS = "agentlightning.call.prompt_token_ids"
    """Token ids of the prompt, as the engine saw it."""
    COMPLETION_TOKEN_IDS = "agentlightning.call.completion_token_ids"
    """Token ids that the engine sampled."""
    COMPLETION_LOGPROBS = "agentlightning.call.completion_logprobs"
    """Log-probability of each sampled token."""
    PROMPT_TOKENS = "agentlightning.call.prompt_tokens"
    """Number of prompt tokens, where the ids themselves are not kept."""
    COMPLETION_TOKENS = "agentlightning.call.completion_tokens"
    """Number of completion tokens, where the ids themselves are not kept."""
    FINISH_REASON = "agentlightning.call.finish_reason"
    """Reason for the end of the reply: `stop`, `length`, `tool_calls`, ..."""
    WEIGHT_VERSION = "agentlightning.call.weight_version"
    """Version of the weights that sampled the tokens."""
    HTTP_STATUS = "agentlightning.call.http_status"
    """HTTP status of the answer to the agent."""
    UPSTREAM_TRIES = "agentlightning.call.upstream_tries"
    """Number of requests to the model for this call."""
    LATENCY_SECONDS = "agentlightning.call.latency_seconds"
    """Seconds from the request to the end of the answer."""
    DIALECT = "agentlightning.call.dialect"
    """Route that the agent called: chat/completions, messages, ..."""
    STREAMED = "agentlightning.call.streamed"
    """True if the agent requested a stream."""
    FIRST_FRAME_SECONDS = "agentlightning.call.first_frame_seconds"
    """Seconds from the request to the first part of a stream."""
    CHOICES = "agentlightning.call.choices"
    """Number of replies to the request, if more than one; each is recorded as a call."""
    CHOICE = "agentlightning.call.choice"
    """Index of the call among several replies, from 0."""
    MODEL = "agentlightning.call.model"
    """Name in `model_list` of the model that was called, where it is not `gen_ai.request.model`: because that is an
    alias, or because its servers failed and a fallback was called."""
    POLICY = "agentlightning.call.policy"
    """Name of the policy that the call belongs to, where the gateway has policies."""
    POLICY_KIND = "agentlightning.call.policy_kind"
    """`trained`, `frozen` or `external`."""
    CONSTRAINED_BY = "agentlightning.call.constrained_by"
    """Settings of the request that change the distribution of the tokens from the model's own, to which
    the log-probabilities belong: `response_format`, `tool_choice`, `top_p`, ..."""
    LEFT_OUT_TOOLS = "agentlightning.call.left_out_tools"
    """Types of the request's tools that only a vendor's server can run, and that the model did not get: `web_search`,
    `code_interpreter`, ..."""
    ROLE = "agentlightning.call.role"
    """Role of the agent, where its URL names one."""
    CLIENT_SPAN = "agentlightning.call.client_span"
    """The span within which the agent's client made the request, as its header `traceparent` names it: the ids of trace
    and span in hexadecimal, with a hyphen between."""
    BODY_DIGEST = "agentlightning.call.body_digest"
    """Equal for requests of the attempt with the same bytes: a hash with a secret key of the gateway's
    process."""
    STATE = "agentlightning.call.state"
    """Final state of the call: `ok`, `no_tokens`, `no_generation`, `upstream_error`, `refused`, `client_left`."""
    ERROR_CODE = "agentlightning.call.error_code"
    """Code of the gateway's own error, where there is no answer: `BUDGET_EXHAUSTED`, `model_not_found`, ..."""
    NOT_KEPT = "agentlightning.call.not_kept"
    """On `litellm_request`: number of attributes that were dropped because the record of the call was too large."""


CONVENTIONAL_KEYS: Final[dict[str, str]] = {
    "gen_ai.system": "what served the call: an engine, or a provider",
    "gen_ai.operation.name": "`chat`, `text_completion` or `embeddings`; from a client library, not from the gateway",
    "gen_ai.request.<setting>": "a setting of the request: `model`, `temperature`, `max_tokens`, `n`, `seed`, ...",
    "gen_ai.prompt.<i>.<field>": "a message of the prompt: `role`, `content`, `name`, `tool_call_id`, ...",
    "gen_ai.prompt.<i>.tool_calls.<j>.<field>": "a tool call in it: `id`, `name`, `arguments`",
    "gen_ai.completion.<i>.<field>": "a reply: `role`, `content`, `finish_reason`, `reasoning_content`, `refusal`",
    "gen_ai.completion.<i>.tool_calls.<j>.<field>": "a tool call in it: `id`, `name`, `arguments`",
    "gen_ai.response.id": "id of the reply, by which a reward may name its call",
    "gen_ai.response.model": "the model that the reply names",
    "gen_ai.response.finish_reasons": "the reasons of all replies; from a client library",
    "gen_ai.usage.prompt_tokens": "tokens of the prompt, as the reply counts them",
    "gen_ai.usage.completion_tokens": "tokens of the reply, as it counts them",
    "llm.usage.total_tokens": "their sum",
    "llm.request.type": "`chat`, `completion` or `embedding`",
    "llm.request.functions.<i>.<field>": "a tool that the model may call: `name`, `description`, `parameters`",
    "llm.is_streaming": "`True` or `False`",
    "llm.hosted_vllm.<field>": "of the reply, as Python literals: `id`, `model`, `prompt_token_ids`, `choices`",
    "prompt_token_ids": "token ids of the prompt that a client library was given",
    "response_token_ids": "token ids of the reply that it was given",
    "logprobs.content": "log-probabilities that it was given, as JSON",
    "error.type": "how a call failed: its state, or from a client library the class of the error",
    "error.message": "the error's text",
    "exception.type": "class of an exception",
    "exception.message": "its text",
    "exception.stacktrace": "its traceback",
    "exception.escaped": "whether it left the block that it was raised in",
}
"""Keys defined by others that tracers, client libraries and the gateway write; `<i>` counts from
0."""

CallState = Literal["ok", "no_tokens", "no_generation", "upstream_error", "refused", "client_left"]
"""Final state of a call, as its span has it (`LightningCallAttributes.STATE`)."""
BUDGET_EXHAUSTED = "budget_exhausted"
"""Code of the refusal of a call whose rollout has used up its tokens or its money."""
STALE = "agentlightning.stale"
"""Set by the store on a span that arrived for an attempt that is no longer the latest."""


class RewardAttributes(Enum):
    """Keys of one reward dimension, below `agentlightning.reward.<i>`."""

    REWARD_NAME = "name"
    """Name of the dimension, such as `primary`."""
    REWARD_VALUE = "value"
    """Value of the dimension, a finite number of at most 1e15 in size."""


class RewardPydanticModel(Value):
    """One dimension of a reward; element 0 of a list of them is the primary one."""

    name: str
    """The dimension, such as `primary`."""
    value: float
    """A finite number."""


class LinkAttributes(Enum):
    """Keys of one link, below `agentlightning.link.<i>`."""

    KEY_MATCH = "key_match"
    """Name of the attribute to compare."""
    VALUE_MATCH = "value_match"
    """Required value of the attribute."""


class LinkPydanticModel(Value):
    """A link to all spans whose attribute `key_match` equals `value_match` (reserved: `trace_id` and `span_id`)."""

    key_match: str
    """Name of the attribute to compare."""
    value_match: str
    """Required value of the attribute."""
