"""Rewards: emit them, and read them back from spans.

A reward is an annotation with one or several dimensions; the first is the primary one. What reads a span is in
`utils/rewards.py`, below the store, and offered here too.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

from agentlightning.emitter.annotation import emit_annotation
from agentlightning.emitter.reward_values import as_number, checked_reward
from agentlightning.emitter.target import Target, target_attributes
from agentlightning.errors import RewardError
from agentlightning.types import SpanCoreFields, SpanLike
from agentlightning.utils.attributes import check_attributes_sanity, flatten_attributes
from agentlightning.utils.rewards import REWARD, find_final_reward, get_reward_value, get_rewards_from_span

__all__ = [
    "PRIMARY",
    "REWARD",
    "emit_reward",
    "find_final_reward",
    "find_reward_spans",
    "get_reward_value",
    "get_rewards_from_span",
    "is_reward_span",
    "reward",
    "reward_attributes",
    "rewards_attributes",
]

logger = logging.getLogger(__name__)

PRIMARY = "primary"

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound=SpanLike)


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
    """Say what the rollout, or its latest step, has earned. The last reward of an attempt is its final one.

    A dictionary is a reward of several dimensions, of which `primary_key` names the one to learn from. `name` labels a
    scalar (default `primary`).

    `target` says what is judged: a `call` (`target_id` is the id of the reply), a `step` (an operation; by default the
    one that is open), an `agent` (by name) or the `rollout`. Calls and steps are linked, which adapters follow; links
    of your own in `attributes` (`make_link_attributes({...})`) go before these. `source` says who judged.

    Raises:
        RewardError: (a TypeError and a ValueError) the reward is neither a number nor a dictionary; NaN, infinite, or
            more than 1e15 in size; a dimension that is no number; `primary_key` missing or unknown; an attribute that
            no span can hold or under the keys of the reward; an unknown target, or one without its id.
        RuntimeError: no tracer is active and `propagate` is true.
    """
    payload: dict[str, object] = {REWARD: _dimensions(reward, primary_key, name)}
    _check_attributes({} if attributes is None else attributes)
    named = target_attributes(target, target_id, source)
    return emit_annotation({**payload, **named, **(attributes or {})}, propagate=propagate)


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
            raise RewardError(f"attributes must not hold the reward key {key}; give all dimensions as a dict")


def reward_attributes(value: float) -> dict[str, Any]:
    """Return the attributes of a reward of one dimension."""
    return {f"{REWARD}.0.name": PRIMARY, f"{REWARD}.0.value": value}


def rewards_attributes(values: Mapping[str, Any], primary_key: str) -> dict[str, Any]:
    """Return the attributes of a reward of several dimensions.

    Raises:
        RewardError: a dimension is no number, NaN, infinite, or more than 1e15 in size; there is no `primary_key`.
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
        raise RewardError("name= labels a scalar reward; the dimensions of a dict have their keys as names")
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


# --- reading -----------------------------------------------------------------------------------------------------


def is_reward_span(span: SpanLike) -> bool:
    """True if the span carries a reward."""
    return get_reward_value(span) is not None


def find_reward_spans(spans: Sequence[S]) -> list[S]:
    """Return the spans that carry a reward, in the order given."""
    return [span for span in spans if is_reward_span(span)]


def reward(fn: F) -> F:
    """Deprecated: emit what the decorated function returns as a reward. Call `emit_reward` instead."""
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
        logger.warning("Reward is not a number: %r; nothing is emitted", result)
    else:
        emit_reward(result)
    return result
