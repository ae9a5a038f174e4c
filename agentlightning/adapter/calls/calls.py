"""The model calls that the spans of a rollout record, whether or not they are used for training.

Adapters select among these calls and order them; the training ledger (`training/ledger.py`) records all of them. A
triplet is a view of one call. The gateway's attributes on the spans separate calls of the trained policy from others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from agentlightning.adapter.calls.matching import CallSpans, spans_by_call
from agentlightning.adapter.spans.attributes import Problem, as_dict
from agentlightning.adapter.spans.tokens import call_name, is_stale, read_call
from agentlightning.base.field_help import explain_fields
from agentlightning.errors import LedgerError
from agentlightning.semconv import CallState, LightningCallAttributes
from agentlightning.types import Span, Triplet

ANY_AGENT: Final = "*"
"""Label of a call that belongs to no named agent."""
_POLICY: Final = LightningCallAttributes.POLICY.value
_KIND: Final = LightningCallAttributes.POLICY_KIND.value
_NOT_TRAINED: Final = frozenset(("frozen", "external"))


class CallRef(NamedTuple):
    """The name of one model call."""

    rollout_id: str
    """The rollout that made it."""
    attempt_id: str
    """The attempt that made it."""
    call_id: str
    """Id of the call; unique only within its attempt, unless the gateway assigned it."""


@explain_fields
@dataclass(frozen=True, slots=True)
class ModelCall:
    """One model call with the engine's tokens. Empty lists and None mean that a value is missing."""

    ref: CallRef
    """Identifier of the call: rollout, attempt and call id."""
    sequence_id: int
    """Position in the order of arrival within the rollout."""
    response_id: str | None
    """Id of the model's reply; None if it had none."""
    prompt_token_ids: list[int]
    """Token ids of the prompt."""
    completion_token_ids: list[int]
    """Token ids of the completion."""
    logprobs: list[float] | None
    """Natural log-probabilities, from the engine; usable only if there is one per completion token."""
    finish_reason: str | None
    """Reason why generation stopped, such as `stop` or `length`."""
    weight_version: int | None
    """Version of the weights that served it; None if it was not recorded."""
    state: CallState
    """`ok` if the call can be trained on; otherwise the missing part or the error."""
    stale: bool = False
    """True if the store marked it as late: its attempt had lapsed."""
    agent: str | None = None
    """Name of the agent that made the call, if a tracer recorded it, or the role in the URL of the call."""
    policy: str | None = None
    """Policy of the call, if the gateway has policies."""
    constrained_by: tuple[str, ...] = ()
    """Settings of its request that changed the sampling distribution from that of `logprobs`, such as
    `response_format`, `tool_choice` and `top_p`."""
    spans: CallSpans | None = field(default=None, repr=False, compare=False)
    """The spans that record it; None for a call that was created from a triplet."""

    @property
    def call_id(self) -> str:
        return self.ref.call_id

    @property
    def has_tokens(self) -> bool:
        """True if both lists of token ids are present."""
        return bool(self.prompt_token_ids and self.completion_token_ids)

    def of_agent(self, name: str | None) -> ModelCall:
        """Return the call as that of another agent; with None the call itself."""
        return self if name is None else replace(self, agent=name)


class CallSelection(NamedTuple):
    """The calls that an adapter selects."""

    calls: list[ModelCall]
    """Selected calls in the adapter's order, with the agents that it names."""
    problems: list[Problem]
    """Excluded parts of the trace, except unreadable parts of a call."""


def model_calls(spans: Sequence[Span], problems: list[Problem] | None = None) -> list[ModelCall]:
    """Return every model call that the spans record, once each, in the order of arrival; attempts may be mixed.

    The gateway's record of a call takes precedence over the tracer's; `matching.py` assigns spans to calls.
    Unreadable parts are added to `problems`.
    """
    problem_list = problems if problems is not None else []
    calls: list[ModelCall] = []
    for each in spans_by_call(spans):
        span = each.record or each.seen
        assert span is not None
        reading = each.reading = read_call(span, problem_list)
        for other in () if each.is_further_choice else each.certain:  # tokens that only the tracers recorded
            if other is span or (reading.prompt_token_ids and reading.logprobs):
                continue
            twin = read_call(other, problem_list)
            reading = reading._replace(
                prompt_token_ids=reading.prompt_token_ids or twin.prompt_token_ids,
                completion_token_ids=reading.completion_token_ids or twin.completion_token_ids,
                logprobs=reading.logprobs or twin.logprobs,
                state="ok" if reading.state == "no_tokens" and twin.state == "ok" else reading.state,
            )
        calls.append(
            ModelCall(
                ref=CallRef(span.rollout_id, span.attempt_id, call_name(span)),
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
                constrained_by=reading.constrained_by,
                spans=each,
            )
        )
    return sorted(calls, key=lambda call: call.sequence_id)


def of_unknown_agents(calls: Iterable[ModelCall], problems: Iterable[Problem]) -> set[CallRef]:
    """Return the calls that a filter by agent name excluded, because nothing proves which agent made them."""
    span_ids = {problem.span_id for problem in problems if problem.kind == "unknown_agent"}
    records = ((call, call.spans.record or call.spans.seen) for call in calls if span_ids and call.spans is not None)
    return {call.ref for call, span in records if span is not None and span.span_id in span_ids}


def call_id_of(triplet: Triplet) -> str | None:
    """Return the id of the call of a triplet; None if its adapter did not store it."""
    ids = (triplet.metadata.get(key) for key in ("call_id", "response_id"))
    return next((name for name in ids if isinstance(name, str) and name), None)


def agent_of(triplet: Triplet) -> str | None:
    """Return the name of the agent that made the call of a triplet; None if no tracer recorded it."""
    name = triplet.metadata.get("agent_name")
    return name if isinstance(name, str) and name != ANY_AGENT else None


def calls_by_name(calls: Sequence[ModelCall]) -> dict[str, ModelCall]:
    """Return the calls of one attempt by their ids and their replies' ids; the first call with an id counts."""
    by_name = {call.response_id: call for call in reversed(calls) if call.response_id is not None}
    by_name.update({call.call_id: call for call in calls})
    return by_name


def call_of_triplet(triplet: Triplet, by_name: Mapping[str, ModelCall], adapter: object) -> ModelCall | None:
    """Return the recorded call of a triplet, with the agent that the triplet names.

    None for a triplet without tokens whose call was not recorded.

    Raises:
        LedgerError: the triplet has tokens but names no call, or its tokens differ from those of the call.
    """
    name = call_id_of(triplet)
    call = by_name.get(name or "")
    prompt: object = as_dict(triplet.prompt).get("token_ids") or []
    completion: object = as_dict(triplet.response).get("token_ids") or []
    if call is None:
        if not completion:
            return None
        raise LedgerError(
            f"{type(adapter).__name__} returned a triplet for an unknown model call, {name!r}. "
            "Store the id of the call in metadata['call_id'], or the id of the reply in metadata['response_id']."
        )
    if prompt != call.prompt_token_ids or completion != call.completion_token_ids:
        raise LedgerError(
            f"{type(adapter).__name__} changed the tokens of call {call.call_id} of rollout {call.ref.rollout_id}. "
            "Adapters may only select calls; training uses the tokens that the engine recorded."
        )
    return call.of_agent(agent_of(triplet))


def calls_from_triplets(triplets: Iterable[Triplet], *, rollout_id: str, attempt_id: str) -> list[ModelCall]:
    """Return the triplets of one attempt as calls in the same order; the id of a triplet without an id is its position.

    Triplets whose prompt or response is not a dict with `token_ids` become calls without tokens.
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


# --- policies --------------------------------------------------------------------------------------------------------


def is_of_other_policy(record: Span | None, policy: str | None) -> bool:
    """True if a call does not belong to `policy` or, if `policy` is None, belongs to a policy that is not trained.

    `record` is the gateway's span of the call; a call that the gateway did not record has no policy.
    """
    attributes = {} if record is None else record.attributes
    return attributes.get(_KIND) in _NOT_TRAINED if policy is None else attributes.get(_POLICY) != policy


def is_call_of_other_policy(call: ModelCall, policy: str | None) -> bool:
    """True if a call that was already read belongs to another policy."""
    return is_of_other_policy(None if call.spans is None else call.spans.record, policy)


def without_other_policies(spans: Sequence[Span], policy: str | None) -> Sequence[Span]:
    """Return the spans, excluding those of calls of other policies, recorded by the gateway or by a tracer."""
    if policy is None and not any(span.attributes.get(_KIND) in _NOT_TRAINED for span in spans):
        return spans
    left_out = {
        id(span)
        for call in spans_by_call(spans)
        if is_of_other_policy(call.record, policy)
        for span in (call.record, call.request, *call.certain)
    }
    return [span for span in spans if id(span) not in left_out]


def policies_of(calls: Iterable[ModelCall]) -> list[str]:
    """Return the names of the policies that calls belong to, in the order of their names."""
    return sorted({call.policy for call in calls if call.policy is not None})


def checked_policy(policy: str | None) -> str | None:
    """Return the name of a policy, or None.

    Raises:
        ValueError: it is neither.
    """
    if policy is None or (isinstance(policy, str) and policy):  # pyright: ignore[reportUnnecessaryIsInstance] -- from users
        return policy
    raise ValueError(f"policy must be the name of one of the gateway's policies, or None; got {policy!r}")
