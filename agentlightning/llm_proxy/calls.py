"""One model call at the gateway: the value that every step fills in and the recorder writes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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
    """Begins when the attempt has been checked, with its number from the store; ends in exactly one state."""

    rollout_id: str
    attempt_id: str
    sequence_id: int
    call_id: str = field(default_factory=lambda: f"call-{generate_id(24)}")
    arrived_at: float = field(default_factory=time.time)
    """Wall clock, seconds."""
    began: float = field(default_factory=time.monotonic)
    dialect: str = "chat/completions"
    """Route of the dialect that the agent speaks."""
    role: str | None = None
    """Of the agent, where its URL names one."""
    model_in_url: str | None = None
    """In the place of the one in the request, where the URL names one."""
    model: str = ""
    """Name in `model_list` of the model that is asked: the one that the request's name stands for, or a fallback."""
    policy: CallPolicy | None = None
    """Whose call it is; None where the gateway has no policies, or the request could not be read."""
    streamed: bool = False
    """The agent asked for a stream."""
    agent_headers: dict[str, str] = field(default_factory=dict[str, str])
    """Headers that a server of the agent's own dialect gets too; never recorded."""
    client_span: str | None = None
    """Trace and span id of the client that the request names in its `traceparent`, with a hyphen between."""
    body_digest: str | None = None
    """Of the request's body; None if it did not arrive completely."""
    prompt: list[object] | None = None
    """What is said to the model, as messages with a role and a content; None if that is `request["messages"]`."""
    request: Json | None = None
    """What the model server was asked, without what the gateway added; None if the agent's could not be read."""
    left_out_tools: tuple[str, ...] = ()
    """Types of the agent's tools that only a vendor's server can run, and that the model was not shown."""
    reply: Json | None = None
    """What the model server said, in the shape of a chat completion."""
    tokens: CallTokens | None = None
    """Of the first choice."""
    further_tokens: tuple[CallTokens | None, ...] = ()
    """Of the other choices, where the model gave several."""
    choice: tuple[int, int] | None = None
    """Which choice of how many the record is of; None is the call as a whole."""
    weight_version: int | None = None
    """The weights that served it; None if it did not come that far."""
    first_frame_at: float | None = None
    """Wall clock; when the first frame of a stream came."""
    endpoint: ModelEndpoint | None = None
    """Where the reply came from."""
    engine: Engine | None = None
    """What serves there."""
    bytes: int = 0
    """Of request and reply, as far as they came."""
    upstream_tries: int = 0
    turn: Turn | None = None
    """What the request leans on, in the Responses dialect."""
    to_remember: StoredResponse | None = None
    """The response, where it can be continued by its id."""
    state: CallState = "upstream_error"
    http_status: int = 500
    """What the agent got; 499 if it had left."""
    error: str | None = None
    error_code: str | None = None

    def broke_off(self, reply: Json | None) -> None:
        """Keep what came of a reply whose stream broke off, without its tokens, since the rest is unknown."""
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
        """Note the reply of the model server; `generated` is False where a reply has no tokens by its nature."""
        self.reply, self.tokens, self.further_tokens = reply, tokens, tuple(further_tokens)
        self.state = _state_of(tokens) if generated else "no_generation"
        self.http_status = 200

    @property
    def prompts(self) -> list[object]:
        """The prompts of a request that may hold several, as one of text completions does; else none."""
        return self.prompt if self.dialect == Completions.route and self.prompt is not None else []

    def by_choice(self) -> list[GatewayCall]:
        """Return the call once for each choice of its reply, which is what is recorded; itself if there is but one.

        The ids of the further ones are made from those of the first, which alone has what was used by all. Where the
        request has several prompts, each has its own.
        """
        reply = self.reply or {}
        choices: list[Json] = reply.get("choices") or []
        if self.error is not None or len(choices) < 2:
            return [self]
        prompts = self.prompts
        of_each, rest = divmod(len(choices), len(prompts)) if len(prompts) > 1 else (0, 0)
        made: list[GatewayCall] = []
        for place, choice in enumerate(choices):
            own: Json = {**reply, "choices": [choice]}
            tokens, state, name = self.tokens, self.state, self.call_id
            if place:
                own.pop("usage", None)
                own["id"] = f"{own['id']}#{place}" if isinstance(own.get("id"), str) else own.get("id")
                tokens = self.further_tokens[place - 1] if place <= len(self.further_tokens) else None
                state = state if state == "no_generation" else _state_of(tokens)
                name = f"{name}-{place}"
            own_fields: Json = {
                "call_id": name,
                "reply": own,
                "tokens": tokens,
                "state": state,
                "choice": (place, len(choices)),
            }
            if of_each and not rest:  # those of the first prompt come first
                number = choice.get("index")
                index = number if type(number) is int and 0 <= number < len(choices) else place
                own_fields["prompt"] = [prompts[index // of_each]]
            made.append(replace(self, **own_fields))
        return made

    def failed(self, failure: CallFailed) -> None:
        """Note that there is no reply, or that the rest of it is missing."""
        self.state, self.http_status, self.error = failure.state, failure.status, failure.message
        self.error_code = failure.code

    def left(self) -> None:
        """Note that the agent closed its connection."""
        self.state, self.http_status, self.error = "client_left", 499, "the agent closed its connection"

    @property
    def is_for_training(self) -> bool:
        """False where the call belongs to a policy that learns from none."""
        return self.policy is None or self.policy.kind == "trained"

    @property
    def seconds(self) -> float:
        """Time since the arrival."""
        return time.monotonic() - self.began


def _state_of(tokens: CallTokens | None) -> CallState:
    fit = tokens is not None and bool(tokens.prompt_token_ids) and not tokens.contradicts
    return "ok" if fit else "no_tokens"
