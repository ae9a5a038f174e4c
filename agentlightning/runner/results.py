"""Conversion of an agent's result to spans. A result is a number, rewards by name, None, spans or triplets; with a
`reward_fn`, any value. Adapters convert the spans of triplets to triplets again."""

from __future__ import annotations

import inspect
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from opentelemetry.sdk.trace import ReadableSpan

from agentlightning.base.terminal import cut
from agentlightning.emitter.reward import reward_attributes, rewards_attributes, target_attributes
from agentlightning.runner.outcome import InvalidResult, InvalidReward
from agentlightning.semconv import AGL_ANNOTATION, LightningCallAttributes
from agentlightning.tracer.scope import UNNUMBERED
from agentlightning.types import AttemptedRollout, Attributes, Span, SpanCoreFields, Triplet
from agentlightning.utils.id import generate_id
from agentlightning.utils.otel import flatten_attributes, sanitize_attributes
from agentlightning.utils.rewards import USABLE_REWARD, are_dimensions, as_number, as_reward, primary_dimension

logger = logging.getLogger(__name__)

RewardFn = Callable[..., Any]
"""Returns the reward for an agent's result; sync or async."""
_NAMES = ("output", "task", "expected", "rollout", "spans")
_LISTED = (ReadableSpan, Span, SpanCoreFields, Triplet)


def check_reward_fn(reward_fn: object) -> RewardFn | None:
    """Return the `reward_fn`; raise a TypeError that names its type if it is not callable."""
    if isinstance(reward_fn, type):
        raise TypeError(f"reward_fn must be a function or a callable object; got the class {reward_fn!r}")
    if reward_fn is not None and not callable(reward_fn):
        raise TypeError(f"reward_fn must be callable, such as (output, task) -> float; got {reward_fn!r}")
    return reward_fn


def is_result(value: object) -> bool:
    """Return whether a value needs no `reward_fn`: None, a number, or a list of spans or triplets."""
    if value is None or as_number(value) is not None:
        return True
    return isinstance(value, list) and all(isinstance(item, _LISTED) for item in cast(list[Any], value))


def reward_span(value: float, rollout: AttemptedRollout) -> Span:
    """Return a span with the attempt's reward; it has no parent, and the store numbers it."""
    return _span(AGL_ANNOTATION, reward_attributes(value), rollout)


def _span(name: str, attributes: Attributes, rollout: AttemptedRollout) -> Span:
    now = time.time()
    return Span.from_attributes(
        attributes=attributes,
        rollout_id=rollout.rollout_id,
        attempt_id=rollout.attempt.attempt_id,
        sequence_id=UNNUMBERED,
        name=name,
        start_time=now,
        end_time=now,
    )


def check_dimensions(names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of rewards that agents may return, starting with the one to learn from."""
    value: Any = () if names is None else names
    if isinstance(value, (str, bytes)) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"reward_dimensions must be a list of names, the one to learn from first; got {value!r}")
    dimensions = tuple(cast("Sequence[str]", value))
    if "" in dimensions or len(set(dimensions)) < len(dimensions):
        raise ValueError(f"reward_dimensions must be different, non-empty names; got {dimensions!r}")
    return dimensions


def spans_of(result: object, rollout: AttemptedRollout, dimensions: Sequence[str] = ()) -> list[Span]:
    """Return the spans for an agent's result: none for None, a reward span for a number or rewards by name.

    Among rewards by name, the primary one has the name `reward` or `primary`. With `dimensions` it is the first of
    them, and all names must be in `dimensions`.

    Raises:
        InvalidReward: NaN, infinity, or more than 1e15 in size.
        InvalidResult: neither None, a number, a dictionary of numbers, nor a list of triplets or of spans of one type
            and of this attempt; or a dictionary without a primary reward.
    """
    if result is None:
        return []
    number = as_number(result)
    if number is not None:
        if as_reward(number) is None:
            raise InvalidReward(f"The agent returned the reward {number}; expected {USABLE_REWARD}")
        return [reward_span(number, rollout)]
    if isinstance(result, list):
        return _listed(cast(list[Any], result), rollout)
    if are_dimensions(result):
        primary = primary_dimension(result, dimensions)
        unknown = [name for name in result if name not in dimensions] if dimensions else []
        if primary is None and not unknown and dimensions:
            raise InvalidResult(
                f"The agent returned the rewards {', '.join(map(repr, result))} without {dimensions[0]!r}, the first "
                "of reward_dimensions and the reward to learn from"
            )
        if primary is None or unknown:
            expected = f"one of {', '.join(map(repr, dimensions))}" if dimensions else "'reward' or 'primary'"
            named = ", ".join(map(repr, unknown or result))
            raise InvalidResult(
                f"The agent returned a dict of {named}; expected {expected}. Use the key 'reward' for the one to learn "
                "from, set Trainer(reward_dimensions=[...]), or emit them with "
                "emit_reward({...}, primary_key=...). To score other results, use a reward_fn."
            )
        try:
            return [_span(AGL_ANNOTATION, rewards_attributes(result, primary), rollout)]
        except ValueError as error:
            raise InvalidReward(f"The agent returned invalid rewards: {error}") from error
    kind = type(result).__name__
    raise InvalidResult(
        f"Invalid raw result type: the agent returned a {kind} ({_short(result)}). Return the reward "
        "(a finite number, or a dict of them), None after emit_reward(...), or a list of spans or triplets. To score "
        "other results, pass a reward_fn to the Trainer."
    )


def _listed(items: list[Any], rollout: AttemptedRollout) -> list[Span]:
    if not items:
        logger.warning("[Rollout %s] the agent returned an empty list; it adds no spans", rollout.rollout_id)
    for kind in (ReadableSpan, Span, SpanCoreFields):
        if all(isinstance(item, kind) for item in items):
            return [_own(item, rollout) for item in items]
    if all(isinstance(item, Triplet) for item in items):
        return triplet_spans(items, rollout)
    names = ", ".join(type(item).__name__ for item in items[:10])
    raise InvalidResult(
        f"Invalid raw result type: a list of {names}. A list must contain triplets, or spans of one type: "
        "ReadableSpan, agl.Span or SpanCoreFields."
    )


def _own(item: Any, rollout: AttemptedRollout) -> Span:
    rollout_id, attempt_id = rollout.rollout_id, rollout.attempt.attempt_id
    if isinstance(item, SpanCoreFields):
        return Span.from_core_fields(item, rollout_id=rollout_id, attempt_id=attempt_id, sequence_id=UNNUMBERED)
    if not isinstance(item, Span):
        return Span.from_opentelemetry(item, rollout_id, attempt_id, UNNUMBERED)
    if (item.rollout_id, item.attempt_id) != (rollout_id, attempt_id):
        raise InvalidResult(
            f"Invalid raw result type: span {item.span_id} belongs to rollout {item.rollout_id!r}, attempt "
            f"{item.attempt_id!r}; this attempt is {rollout_id!r}, {attempt_id!r}"
        )
    return item


def bind_reward_fn(
    reward_fn: RewardFn, output: object, rollout: AttemptedRollout, spans: Sequence[Span]
) -> Callable[[], object]:
    """Return a call of `reward_fn` with its arguments by name: output, task or expected (both the rollout's input),
    rollout, spans. If it requires others, it gets (output, task) by position."""
    values = {
        "output": output,
        "task": rollout.input,
        "expected": rollout.input,
        "rollout": rollout,
        "spans": list(spans),
    }
    try:
        parameters = list(inspect.signature(reward_fn).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        parameters = []
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if required and all(p in named and p.name in _NAMES for p in required):
        arguments = {p.name: values[p.name] for p in named if p.name in _NAMES}
        return lambda: reward_fn(**arguments)
    return lambda: reward_fn(output, rollout.input)


def reward_of(value: object, reward_fn: RewardFn) -> float | Mapping[str, object] | None:
    """Return the result of a `reward_fn`, None for no reward.

    Raises:
        InvalidReward: it is neither a finite number nor a dictionary of numbers.
    """
    if are_dimensions(value):
        return value
    number = as_reward(value)
    if value is not None and number is None:
        name = getattr(reward_fn, "__qualname__", type(reward_fn).__qualname__)
        gave = _short(value if as_number(value) is None else as_number(value))
        raise InvalidReward(f"reward_fn {name} returned {gave}; expected {USABLE_REWARD}, or None for no reward")
    return number


def _short(value: object) -> str:
    return cut(repr(value), 80)


CALL_SPAN = "openai.chat.completion"
"""The name of a client's span of a model call, by which adapters find it."""
_LOGPROBS = LightningCallAttributes.COMPLETION_LOGPROBS.value
_FINISH_REASON = LightningCallAttributes.FINISH_REASON.value
_WEIGHT_VERSION = LightningCallAttributes.WEIGHT_VERSION.value


def triplet_spans(triplets: Sequence[Triplet], rollout: AttemptedRollout) -> list[Span]:
    """Return a call span for each triplet, followed by its reward; the last reward is the final one.

    Raises:
        InvalidReward: a reward is NaN, infinite, or more than 1e15 in size; names the triplet.
    """
    spans: list[Span] = []
    for index, triplet in enumerate(triplets):
        response_id = str(triplet.metadata.get("response_id") or f"triplet-{generate_id(12)}")
        prompt, response = _fields(triplet.prompt), _fields(triplet.response)
        values = {
            "gen_ai.response.id": response_id,
            "prompt_token_ids": prompt.get("token_ids"),
            "response_token_ids": response.get("token_ids"),
            _LOGPROBS: response.get("token_logprobs"),
            _FINISH_REASON: triplet.metadata.get("finish_reason"),
            _WEIGHT_VERSION: triplet.metadata.get("weight_version"),
            "gen_ai.prompt": _messages(prompt, "user"),
            "gen_ai.completion": _messages(response, "assistant"),
        }
        attributes = flatten_attributes({key: value for key, value in values.items() if value not in (None, [])})
        spans.append(_span(CALL_SPAN, sanitize_attributes(attributes), rollout))
        if triplet.reward is None:
            continue
        if as_reward(triplet.reward) is None:
            raise InvalidReward(
                f"The agent returned a triplet (number {index}) with the reward {triplet.reward}; expected "
                f"{USABLE_REWARD}"
            )
        named = flatten_attributes(target_attributes("call", response_id, None))
        spans.append(_span(AGL_ANNOTATION, {**reward_attributes(triplet.reward), **named}, rollout))
    return spans


def _fields(side: object) -> Mapping[str, Any]:
    """Return one side of a triplet as a dictionary; text and messages are its `raw_content`."""
    return cast("Mapping[str, Any]", side) if isinstance(side, Mapping) else {"raw_content": side}


def _messages(side: Mapping[str, object], role: str) -> list[dict[str, object]]:
    """Return one side of a triplet as messages."""
    content = side.get("raw_content", side.get("content"))
    if content is None:
        return []
    listed: list[Any] = cast("list[Any]", content) if isinstance(content, list) else [content]
    return [_message(item, role) for item in listed]


def _message(item: object, role: str) -> dict[str, object]:
    if isinstance(item, Mapping):
        return {"role": role, **cast("Mapping[str, Any]", item)}
    return {"role": role, "content": item if isinstance(item, str) else json.dumps(item, default=str)}
