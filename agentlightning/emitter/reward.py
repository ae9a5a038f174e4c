"""Rewards: emit them, and read them back from spans.

A reward is an annotation with one or several dimensions; the first is the primary one. The readers of spans are in
`utils/rewards.py`, which the store also uses, and are exported here. Attributes of the primary dimension name the
target and the source of the reward:

    agentlightning.reward.0.target      call, step, agent or rollout
    agentlightning.reward.0.target_id   id of the target: of a reply, of an operation's span, or the name of an agent
    agentlightning.reward.0.source      origin of the reward: a judge, a test, a user

Readers that do not support these attributes can still read the reward.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, TypeVar, cast, get_args

from opentelemetry import trace as trace_api

from agentlightning.base.field_help import explain_fields
from agentlightning.emitter.annotation import emit_annotation
from agentlightning.errors import RewardError
from agentlightning.semconv import LightningSpanAttributes
from agentlightning.types import Attributes, SpanCoreFields, SpanLike
from agentlightning.utils.attributes import check_attributes_sanity, flatten_attributes
from agentlightning.utils.otel import make_link_attributes
from agentlightning.utils.rewards import REWARD as REWARD
from agentlightning.utils.rewards import as_number, checked_reward
from agentlightning.utils.rewards import find_final_reward as find_final_reward
from agentlightning.utils.rewards import get_reward_value as get_reward_value
from agentlightning.utils.rewards import get_rewards_from_span as get_rewards_from_span

logger = logging.getLogger(__name__)

PRIMARY = "primary"
Target = Literal["call", "step", "agent", "rollout"]
"""One model call, one operation, all work of one agent, or the whole rollout."""

_PRIMARY = LightningSpanAttributes.REWARD.value + ".0"
TARGET, TARGET_ID, SOURCE = f"{_PRIMARY}.target", f"{_PRIMARY}.target_id", f"{_PRIMARY}.source"
_TARGETS = get_args(Target)
_NEEDS_ID = ("call", "agent")

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound=SpanLike)


@explain_fields
@dataclass(frozen=True)
class RewardTarget:
    """The target and the source of a reward; None for a missing part."""

    target: Target | None
    """Kind of the target: `call`, `step`, `agent` or `rollout`."""
    target_id: str | None
    """Id of the target: the id of the model's reply, the span id of the step, or the name of the agent."""
    source: str | None
    """Origin of the reward, such as a judge or a test."""


def emit_reward(
    reward: float | Mapping[str, float],
    *,
    primary_key: str | None = None,
    attributes: Mapping[str, object] | None = None,
    name: str | None = None,
    target: Target | None = None,
    target_id: str | None = None,
    source: str | None = None,
    propagate: bool = True,
) -> SpanCoreFields:
    """Emit a reward. The last reward of an attempt is its final one.

    A dictionary is a reward with several dimensions; `primary_key` is the name of the one to learn from. `name` is the
    name of a scalar (default `primary`).

    `target` is the judged part: a `call` (`target_id` is the id of the reply), a `step` (an operation; by default the
    open one), an `agent` (by name) or the `rollout`. The span gets a link to a call or step, which adapters follow;
    links in `attributes` (`make_link_attributes({...})`) have priority. `source` is the name of the judge.

    Raises:
        RewardError: (a TypeError and a ValueError) the reward is neither a number nor a dictionary; it is NaN,
            infinite, or more than 1e15 in size; a dimension is not a number; `primary_key` is missing or unknown; an
            attribute has an unsupported type or a key of the reward; the target is unknown, or its id is missing.
        RuntimeError: no tracer is active and `propagate` is true.
    """
    payload: dict[str, object] = {REWARD: _dimensions(reward, primary_key, name)}
    _check_attributes({} if attributes is None else attributes)
    target_fields = target_attributes(target, target_id, source)
    return emit_annotation({**payload, **target_fields, **(attributes or {})}, propagate=propagate)


def _check_attributes(attributes: object) -> None:
    if not isinstance(attributes, Mapping):
        raise RewardError(f"attributes must be a dict; got {attributes!r}")
    try:
        flat = flatten_attributes(cast(Mapping[Any, Any], attributes))
        check_attributes_sanity(flat)
    except ValueError as error:
        raise RewardError(str(error)) from error
    for key in flat:
        if key == REWARD or key.startswith(f"{REWARD}."):
            raise RewardError(f"attributes must not contain the reward key {key}; pass all dimensions as a dict")


def reward_attributes(value: float) -> dict[str, Any]:
    """Return the attributes of a reward of one dimension."""
    return {f"{REWARD}.0.name": PRIMARY, f"{REWARD}.0.value": value}


def rewards_attributes(values: Mapping[str, Any], primary_key: str) -> dict[str, Any]:
    """Return the attributes of a reward of several dimensions.

    Raises:
        RewardError: a dimension is not a number, NaN, infinite, or more than 1e15 in size; `primary_key` is missing.
    """
    return flatten_attributes({REWARD: _dimensions(values, primary_key, None)})


def _dimensions(reward: Any, primary_key: str | None, name: str | None) -> list[dict[str, Any]]:
    if not isinstance(reward, Mapping):
        return [{"name": _checked_name(name or PRIMARY), "value": checked_reward(reward)}]
    values = cast(Mapping[str, Any], reward)
    for key, value in values.items():
        _checked_name(key)
        if as_number(value) is None:
            raise RewardError(f"Reward value must be a number, got: {type(value).__name__} for key {key}")
    if name is not None:
        raise RewardError(
            "name= is for a scalar reward; the keys of a dict are the names of its dimensions. Remove name="
        )
    if primary_key is None:
        raise RewardError("When emitting a multi-dimensional reward as a dict, primary_key must be provided.")
    if primary_key not in values:
        raise RewardError(f"Primary key '{primary_key}' not found in reward dict keys: {list(values)}")
    order = [primary_key, *(key for key in values if key != primary_key)]
    return [{"name": key, "value": checked_reward(values[key])} for key in order]


def _checked_name(name: object) -> str:
    if not isinstance(name, str):
        raise RewardError(f"The name of a reward must be a string; got {name!r}")
    return name


def target_attributes(target: Target | None, target_id: str | None, source: str | None) -> Attributes:
    """Return the attributes of a target and a source, with the link by which adapters find the call or step.

    A step without an id is the open operation, if there is one.

    Raises:
        RewardError: the target is unknown; its id is missing; it has an id and must not have one; an id or a source is
            not a string.
    """
    if target is None and target_id is None and source is None:
        return {}
    for name, value in (("target_id", target_id), ("source", source)):
        if not isinstance(value, str | None):
            raise RewardError(f"{name} must be a string; got {value!r}")
    if target is not None and target not in _TARGETS:
        raise RewardError(f"target must be one of {', '.join(_TARGETS)}; got {target!r}")
    if target_id is not None and target in (None, "rollout"):
        raise RewardError(f"target_id={target_id!r} requires target= call, step or agent; got {target!r}")
    if target in _NEEDS_ID and not target_id:
        what = "the id of the model's reply (response.id)" if target == "call" else "the name of the agent"
        raise RewardError(f"target={target!r} needs target_id, {what}")
    if target == "step" and not target_id:
        context = trace_api.get_current_span().get_span_context()
        target_id = trace_api.format_span_id(context.span_id) if context.is_valid else None
    values = {TARGET: target, TARGET_ID: target_id, SOURCE: source}
    result: Attributes = {key: value for key, value in values.items() if value is not None}
    if target == "call" and target_id is not None:
        result |= make_link_attributes({"gen_ai.response.id": target_id})
    elif target == "step" and target_id is not None:
        result |= make_link_attributes({"span_id": target_id})
    return result


# --- reading -----------------------------------------------------------------------------------------------------


def is_reward_span(span: SpanLike) -> bool:
    """True if the span carries a reward."""
    return get_reward_value(span) is not None


def find_reward_spans(spans: Sequence[S]) -> list[S]:
    """Return the spans that carry a reward, in the order given."""
    return [span for span in spans if is_reward_span(span)]


def get_reward_target(span: SpanLike) -> RewardTarget:
    """Return the target of the reward on a span; all fields are None if there is no supported target."""
    attributes = cast(Mapping[str, Any], span.attributes or {})
    target = attributes.get(TARGET)
    return RewardTarget(
        target if target in _TARGETS else None, _text(attributes.get(TARGET_ID)), _text(attributes.get(SOURCE))
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def reward(fn: F) -> F:
    """Emit the return value of the decorated function as a reward. Deprecated: call `emit_reward` instead."""
    warnings.warn("The decorator `reward` is deprecated; call emit_reward(...)", DeprecationWarning, stacklevel=2)
    from inspect import iscoroutinefunction

    if iscoroutinefunction(fn):

        async def call_async(*args: object, **kwargs: object) -> object:
            return _emitted(await fn(*args, **kwargs))

        return cast(F, wraps(fn)(call_async))

    def call(*args: object, **kwargs: object) -> object:
        return _emitted(fn(*args, **kwargs))

    return cast(F, wraps(fn)(call))


def _emitted(result: Any) -> Any:
    if as_number(result) is None:
        logger.warning("The reward is not a number: %r; nothing is emitted", result)
    else:
        emit_reward(result)
    return result
