"""Tells calls of the policy that is trained from those of others, by what the gateway wrote on their spans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from agentlightning.adapter.calls.calls import ModelCall
from agentlightning.adapter.calls.matching import spans_by_call
from agentlightning.semconv import LightningCallAttributes
from agentlightning.types import Span

_POLICY: Final = LightningCallAttributes.POLICY.value
_KIND: Final = LightningCallAttributes.POLICY_KIND.value
_NOT_TRAINED: Final = frozenset(("frozen", "external"))


def is_of_other_policy(record: Span | None, policy: str | None) -> bool:
    """True if a call is not one of `policy`; without one, if it is of a policy that learns from none.

    `record` is the gateway's span of the call; a call that no gateway saw is of no policy.
    """
    attributes = {} if record is None else record.attributes
    return attributes.get(_KIND) in _NOT_TRAINED if policy is None else attributes.get(_POLICY) != policy


def is_call_of_other_policy(call: ModelCall, policy: str | None) -> bool:
    """The same of a call that was read already."""
    return is_of_other_policy(None if call.spans is None else call.spans.record, policy)


def without_other_policies(spans: Sequence[Span], policy: str | None) -> Sequence[Span]:
    """Return the spans without those of calls of other policies, recorded by the gateway or by a tracer."""
    if policy is None and not any(span.attributes.get(_KIND) in _NOT_TRAINED for span in spans):
        return spans
    left_out = {
        id(span)
        for call in spans_by_call(spans)
        if is_of_other_policy(call.record, policy)
        for span in (call.record, call.request, call.seen)
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
