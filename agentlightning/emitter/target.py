"""What a reward is for and who gave it: attributes beside the primary dimension of a reward, and their reader.

    agentlightning.reward.0.target      call, step, agent or rollout
    agentlightning.reward.0.target_id   which: the id of a reply, the id of an operation's span, the name of an agent
    agentlightning.reward.0.source      who gave it: a judge, a test, a user

They stand inside the dimension, so that a reader that does not know them still reads the reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from opentelemetry import trace as trace_api

from agentlightning.errors import RewardError
from agentlightning.field_help import explain_fields
from agentlightning.semconv import LightningSpanAttributes
from agentlightning.types import Attributes, SpanLike
from agentlightning.utils.otel import make_link_attributes

Target = Literal["call", "step", "agent", "rollout"]
"""One model call, the work of one operation, everything that one agent did, the whole rollout."""

_PRIMARY = LightningSpanAttributes.REWARD.value + ".0"
TARGET, TARGET_ID, SOURCE = f"{_PRIMARY}.target", f"{_PRIMARY}.target_id", f"{_PRIMARY}.source"
_TARGETS = get_args(Target)
_NEEDS_ID = ("call", "agent")


@explain_fields
@dataclass(frozen=True)
class RewardTarget:
    """What a reward names as its target and its giver; None where it does not say."""

    target: Target | None
    """What is rewarded: `call`, `step`, `agent` or `rollout`."""
    target_id: str | None
    """Which one: the id of the model's reply, the span id of the step, or the name of the agent."""
    source: str | None
    """Who gave the reward."""


def target_attributes(target: Target | None, target_id: str | None, source: str | None) -> Attributes:
    """Return the attributes that name a target and a giver, with the link that leads adapters to a call or step.

    A step without an id is that of the operation that is open here, if there is one.

    Raises:
        RewardError: an unknown target; one that needs an id and has none; an id where there is nothing to name; an id
            or a source that is no string.
    """
    if target is None and target_id is None and source is None:
        return {}
    for name, value in (("target_id", target_id), ("source", source)):
        if not isinstance(value, str | None):
            raise RewardError(f"{name} must be a string; got {value!r}")
    if target is not None and target not in _TARGETS:
        raise RewardError(f"target must be one of {', '.join(_TARGETS)}; got {target!r}")
    if target_id is not None and target in (None, "rollout"):
        raise RewardError(f"target_id={target_id!r} needs a target that has an id: call, step or agent; got {target!r}")
    if target in _NEEDS_ID and not target_id:
        what = "the id of the model's reply (response.id)" if target == "call" else "the name of the agent"
        raise RewardError(f"target={target!r} needs target_id, {what}")
    if target == "step" and not target_id:
        context = trace_api.get_current_span().get_span_context()
        target_id = trace_api.format_span_id(context.span_id) if context.is_valid else None
    given = {TARGET: target, TARGET_ID: target_id, SOURCE: source}
    named: Attributes = {key: value for key, value in given.items() if value is not None}
    if target == "call" and target_id is not None:
        named |= make_link_attributes({"gen_ai.response.id": target_id})
    elif target == "step" and target_id is not None:
        named |= make_link_attributes({"span_id": target_id})
    return named


def get_reward_target(span: SpanLike) -> RewardTarget:
    """Return what the reward on a span names; all None if it names nothing, or nothing that is known."""
    attributes = cast(Mapping[str, Any], span.attributes or {})
    target = attributes.get(TARGET)
    return RewardTarget(
        target if target in _TARGETS else None, _text(attributes.get(TARGET_ID)), _text(attributes.get(SOURCE))
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
