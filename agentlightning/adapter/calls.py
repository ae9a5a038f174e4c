"""The model calls of a rollout as its spans witness them, whether or not anybody wants to learn from them.

Adapters select; this is the count they are held against (`algorithm/ledger.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from agentlightning.adapter.attributes import Problem, as_dict
from agentlightning.adapter.tokens import CallReading, CallState, gateway_call_id, is_stale, read_call
from agentlightning.adapter.witnesses import Witness, witnesses
from agentlightning.types import Span, Triplet

ANY_AGENT: Final = "*"
"""Label of a call that belongs to no named agent."""


class CallRef(NamedTuple):
    """The name of one model call: its id is unique within its attempt only, where no gateway gave it."""

    rollout_id: str
    attempt_id: str
    call_id: str


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One model call with the engine's tokens. Empty lists and None stand for what was not recorded."""

    ref: CallRef
    sequence_id: int
    """Place in the order of arrival within the rollout."""
    response_id: str | None
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    logprobs: list[float] | None
    """Natural logarithm, the engine's; to be used only if there is one per completion token."""
    finish_reason: str | None
    weight_version: int | None
    state: CallState
    stale: bool = False
    """The store marked it as late: its attempt had lapsed."""
    agent: str | None = None
    """Whose call it was, where a tracer told it, or the role in the URL of the call."""
    policy: str | None = None
    """The policy that it belongs to, where the gateway has policies."""
    witness: Witness | None = field(default=None, repr=False, compare=False)
    """The spans that tell of it; None for a call that was made from a triplet."""

    @property
    def call_id(self) -> str:
        return self.ref.call_id


def model_calls(spans: Sequence[Span], problems: list[Problem] | None = None) -> list[ModelCall]:
    """Return every model call that the spans witness, once each, in the order of arrival; attempts may be mixed.

    The gateway's record of a call counts before the tracer's; which spans tell of one call is told in `witnesses.py`.
    """
    found = problems if problems is not None else []
    calls = [_model_call(witness, found) for witness in witnesses(spans)]
    return sorted(calls, key=lambda call: call.sequence_id)


def call_id_of(triplet: Triplet) -> str | None:
    """Return the id of the call that a triplet was made from; None if its adapter did not say."""
    for key in ("call_id", "response_id"):
        value = triplet.metadata.get(key)
        if isinstance(value, str) and value:
            return value
    return None


def agent_of(triplet: Triplet) -> str | None:
    """Return the name of the agent whose call a triplet was made from; None where no tracer told it."""
    name = triplet.metadata.get("agent_name")
    return name if isinstance(name, str) and name != ANY_AGENT else None


def selected_calls(calls: Sequence[ModelCall], triplets: Iterable[Triplet]) -> tuple[list[ModelCall], list[ModelCall]]:
    """Return the calls of one attempt with the agents that triplets name, and those that triplets were made from.

    The second list is in the order of the triplets.
    """
    by_name = {call.response_id: call.ref for call in reversed(calls) if call.response_id is not None}
    by_name.update({call.call_id: call.ref for call in calls})
    agents = {ref: agent_of(triplet) for triplet in triplets if (ref := by_name.get(call_id_of(triplet) or ""))}
    named = [call if agents.get(call.ref) is None else replace(call, agent=agents[call.ref]) for call in calls]
    by_ref = {call.ref: call for call in named}
    return named, [by_ref[ref] for ref in agents]


def calls_from_triplets(triplets: Iterable[Triplet], *, rollout_id: str, attempt_id: str) -> list[ModelCall]:
    """Return the triplets of one attempt as calls in the same order; a triplet without an id is named by its place.

    Triplets whose prompt or response is no dict with `token_ids` become calls without tokens.
    """
    return [
        ModelCall(
            ref=CallRef(rollout_id, attempt_id, call_id_of(triplet) or f"triplet-{place}"),
            sequence_id=place,
            response_id=triplet.metadata.get("response_id"),
            prompt_token_ids=as_dict(triplet.prompt).get("token_ids") or [],
            completion_token_ids=as_dict(triplet.response).get("token_ids") or [],
            logprobs=as_dict(triplet.response).get("token_logprobs"),
            finish_reason=triplet.metadata.get("finish_reason"),
            weight_version=triplet.metadata.get("weight_version"),
            state=triplet.metadata.get("state", "ok"),
            agent=agent_of(triplet),
            policy=triplet.metadata.get("policy"),
        )
        for place, triplet in enumerate(triplets)
    ]


def _model_call(witness: Witness, problems: list[Problem]) -> ModelCall:
    span = witness.record or witness.seen
    assert span is not None
    reading = read_call(span, problems)
    call_id = gateway_call_id(span) or reading.response_id or span.span_id
    call = ModelCall(
        ref=CallRef(span.rollout_id, span.attempt_id, call_id),
        sequence_id=span.sequence_id,
        response_id=reading.response_id,
        prompt_token_ids=reading.prompt_token_ids,
        completion_token_ids=reading.completion_token_ids,
        logprobs=reading.logprobs,
        finish_reason=reading.finish_reason,
        weight_version=reading.weight_version,
        state=reading.state,
        stale=is_stale(span),
        agent=reading.role,
        policy=reading.policy,
        witness=witness,
    )
    if witness.record is None or witness.seen is None or (call.prompt_token_ids and call.logprobs):
        return call
    return _completed(call, read_call(witness.seen, problems))


def _completed(call: ModelCall, twin: CallReading) -> ModelCall:
    """Return the gateway's record of a call, with what only the tracer saw of its tokens."""
    return replace(
        call,
        prompt_token_ids=call.prompt_token_ids or twin.prompt_token_ids,
        completion_token_ids=call.completion_token_ids or twin.completion_token_ids,
        logprobs=call.logprobs or twin.logprobs,
    )
