"""One model call at the gateway: each step of the gateway adds to it, and the recorder writes it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from agentlightning.llm_proxy.access.sampling import ModelSampling
from agentlightning.llm_proxy.dialects.completions import Completions
from agentlightning.llm_proxy.dialects.json_values import Json
from agentlightning.llm_proxy.dialects.token_fields import CallTokens
from agentlightning.llm_proxy.endpoints.engines import Engine
from agentlightning.llm_proxy.endpoints.models import ModelEndpoint
from agentlightning.llm_proxy.policies import CallPolicy
from agentlightning.llm_proxy.replies import CallFailed
from agentlightning.llm_proxy.responses_state import StoredResponse, Turn
from agentlightning.semconv import CallState
from agentlightning.utils.id import generate_id


@dataclass(slots=True)
class GatewayCall:
    """One model call. It begins when the attempt is checked and the store has numbered it, and ends in one state."""

    rollout_id: str
    attempt_id: str
    sequence_id: int
    call_id: str = field(default_factory=lambda: f"call-{generate_id(24)}")
    arrived_at: float = field(default_factory=time.time)
    """Wall clock time of arrival, in seconds."""
    began: float = field(default_factory=time.monotonic)
    dialect: str = "chat/completions"
    """Route of the agent's dialect."""
    role: str | None = None
    """The agent's role, if its URL names one."""
    model_in_url: str | None = None
    """The model that the URL names, which replaces the one in the request."""
    model: str = ""
    """Name in `model_list` of the called model: the requested model (aliases resolved) or a fallback."""
    policy: CallPolicy | None = None
    """The policy of the call; None if the gateway has no policies, or the request could not be read."""
    sampling: ModelSampling = ()
    """The sampling parameters of the attempt's models, for requests that do not have them."""
    filled_in: tuple[str, ...] = ()
    """Names of the fields of `request` that were set from them."""
    streamed: bool = False
    """True if the agent requested a stream."""
    agent_headers: dict[str, str] = field(default_factory=dict[str, str])
    """Headers that are also sent to a server of the agent's dialect; never recorded."""
    client_span: str | None = None
    """Trace id and span id of the client from the header `traceparent`, joined by a hyphen."""
    body_digest: str | None = None
    """Digest of the request's body; None if it did not arrive completely."""
    prompt: list[object] | None = None
    """The prompt, as messages with a role and a content; None if that is `request["messages"]`."""
    request: Json | None = None
    """The request to the model server, without the gateway's additions; None if the agent's could not be read."""
    left_out_tools: tuple[str, ...] = ()
    """Types of the agent's tools that only a vendor's server can run and that were excluded."""
    reply: Json | None = None
    """The model server's reply, in the shape of a chat completion."""
    tokens: CallTokens | None = None
    """Tokens of the first choice."""
    further_tokens: tuple[CallTokens | None, ...] = ()
    """Tokens of the other choices, if the model returned several."""
    choice: tuple[int, int] | None = None
    """Index of the recorded choice, and the number of choices; None is the complete call."""
    weight_version: int | None = None
    """Version of the weights that served the call; None if it was not forwarded."""
    first_frame_at: float | None = None
    """Wall clock time of the first frame of a stream, in seconds."""
    endpoint: ModelEndpoint | None = None
    """The endpoint that returned the reply."""
    engine: Engine | None = None
    """The engine of that endpoint."""
    bytes: int = 0
    """Bytes of request and reply received so far."""
    upstream_tries: int = 0
    turn: Turn | None = None
    """The earlier responses and items that the request refers to, in the Responses dialect."""
    to_remember: StoredResponse | None = None
    """The response to store, if it can be continued by its id."""
    state: CallState = "upstream_error"
    http_status: int = 500
    """Status of the agent's reply; 499 if the agent disconnected first."""
    error: str | None = None
    error_code: str | None = None

    def broke_off(self, reply: Json | None) -> None:
        """Keep the received part of an interrupted stream, without tokens, because the rest is unknown."""
        if reply is not None:
            hidden = ("prompt_token_ids", "token_ids", "logprobs")
            choices = [{k: v for k, v in choice.items() if k not in hidden} for choice in reply["choices"]]
            self.reply = {**{k: v for k, v in reply.items() if k not in hidden}, "choices": choices}

    def answered(
        self,
        reply: Json,
        tokens: CallTokens | None,
        further_tokens: Sequence[CallTokens | None] = (),
        *,
        generated: bool = True,
    ) -> None:
        """Store the reply of the model server; `generated` is False if such replies never have tokens."""
        self.reply, self.tokens, self.further_tokens = reply, tokens, tuple(further_tokens)
        self.state = _state_of(tokens) if generated else "no_generation"
        self.http_status = 200

    @property
    def prompts(self) -> list[object]:
        """Prompts of a request that may have several (text completions); empty for other dialects."""
        return self.prompt if self.dialect == Completions.route and self.prompt is not None else []

    def by_choice(self) -> list[GatewayCall]:
        """Return one call per choice of the reply, as they are recorded; the call itself if there is only one.

        The ids of the others are derived from those of the first. Only the first has the total usage. If the request
        has several prompts, each call has its own prompt.
        """
        reply = self.reply or {}
        choices: list[Json] = reply.get("choices") or []
        if self.error is not None or len(choices) < 2:
            return [self]
        prompts = self.prompts
        per_prompt, rest = divmod(len(choices), len(prompts)) if len(prompts) > 1 else (0, 0)
        calls: list[GatewayCall] = []
        for place, choice in enumerate(choices):
            own_reply: Json = {**reply, "choices": [choice]}
            tokens, state, name = self.tokens, self.state, self.call_id
            if place:
                own_reply.pop("usage", None)
                own_reply["id"] = (
                    f"{own_reply['id']}#{place}" if isinstance(own_reply.get("id"), str) else own_reply.get("id")
                )
                tokens = self.further_tokens[place - 1] if place <= len(self.further_tokens) else None
                state = state if state == "no_generation" else _state_of(tokens)
                name = f"{name}-{place}"
            own_fields: Json = {
                "call_id": name,
                "reply": own_reply,
                "tokens": tokens,
                "state": state,
                "choice": (place, len(choices)),
            }
            if per_prompt and not rest:  # those of the first prompt come first
                number = choice.get("index")
                index = number if type(number) is int and 0 <= number < len(choices) else place
                own_fields["prompt"] = [prompts[index // per_prompt]]
            calls.append(replace(self, **own_fields))
        return calls

    def failed(self, failure: CallFailed) -> None:
        """Record that there is no reply, or that a part of it is missing."""
        self.state, self.http_status, self.error = failure.state, failure.status, failure.message
        self.error_code = failure.code

    def left(self) -> None:
        """Record that the agent closed its connection."""
        self.state, self.http_status, self.error = "client_left", 499, "the agent closed its connection"

    @property
    def is_for_training(self) -> bool:
        """False if the call belongs to a policy that is not trained."""
        return self.policy is None or self.policy.kind == "trained"

    @property
    def seconds(self) -> float:
        """Seconds since the arrival."""
        return time.monotonic() - self.began


def _state_of(tokens: CallTokens | None) -> CallState:
    fit = tokens is not None and bool(tokens.prompt_token_ids) and not tokens.contradicts
    return "ok" if fit else "no_tokens"
