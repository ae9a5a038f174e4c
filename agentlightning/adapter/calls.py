"""The model calls of a rollout as its spans witness them, whether or not anybody wants to learn from them.

Adapters select; this is the count they are held against (`algorithm/ledger.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from agentlightning.adapter.attributes import Problem, as_dict
from agentlightning.adapter.tokens import (
    CallReading,
    CallState,
    gateway_call_id,
    is_gateway_call,
    is_stale,
    read_call,
    response_id,
)
from agentlightning.types import Span, Triplet


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

    @property
    def call_id(self) -> str:
        return self.ref.call_id


def model_calls(spans: Sequence[Span], problems: list[Problem] | None = None) -> list[ModelCall]:
    """Return every model call that the spans witness, once each, in the order of arrival; attempts may be mixed.

    The gateway's record of a call counts before the tracer's. A tracer's span counts as a call if it names a response
    id that the gateway did not see in that attempt, or holds token ids and no response id.
    """
    found = problems if problems is not None else []
    calls: dict[CallRef, ModelCall] = {}
    replies: dict[tuple[str, str], CallRef] = {}
    for span in sorted(spans, key=lambda span: not is_gateway_call(span)):
        reply = response_id(span)
        ref = CallRef(span.rollout_id, span.attempt_id, gateway_call_id(span) or reply or span.span_id)
        if ref in calls:
            continue
        call = _model_call(ref, span, read_call(span, found))
        twin = None if reply is None or is_gateway_call(span) else replies.get((span.attempt_id, reply))
        if twin is not None:
            calls[twin] = _completed(calls[twin], call)
        elif is_gateway_call(span) or reply is not None or call.completion_token_ids:
            calls[ref] = call
            if reply is not None:
                replies.setdefault((span.attempt_id, reply), ref)
    return sorted(calls.values(), key=lambda call: call.sequence_id)


def call_id_of(triplet: Triplet) -> str | None:
    """Return the id of the call that a triplet was made from; None if its adapter did not say."""
    for key in ("call_id", "response_id"):
        value = triplet.metadata.get(key)
        if isinstance(value, str) and value:
            return value
    return None


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
        )
        for place, triplet in enumerate(triplets)
    ]


def _completed(call: ModelCall, twin: ModelCall) -> ModelCall:
    """Return the gateway's record of a call, with what only the tracer saw of its tokens."""
    if call.prompt_token_ids and call.completion_token_ids and call.logprobs:
        return call
    return replace(
        call,
        prompt_token_ids=call.prompt_token_ids or twin.prompt_token_ids,
        completion_token_ids=call.completion_token_ids or twin.completion_token_ids,
        logprobs=call.logprobs or twin.logprobs,
    )


def _model_call(ref: CallRef, span: Span, reading: CallReading) -> ModelCall:
    return ModelCall(
        ref=ref,
        sequence_id=span.sequence_id,
        response_id=reading.response_id,
        prompt_token_ids=reading.prompt_token_ids,
        completion_token_ids=reading.completion_token_ids,
        logprobs=reading.logprobs,
        finish_reason=reading.finish_reason,
        weight_version=reading.weight_version,
        state=reading.state,
        stale=is_stale(span),
    )
