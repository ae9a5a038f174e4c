"""Triplets that an agent returns, as the spans of the calls that they stand for; adapters read them back."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agentlightning.emitter.reward import reward_attributes
from agentlightning.emitter.target import target_attributes
from agentlightning.runner.outcome import InvalidReward
from agentlightning.semconv import AGL_ANNOTATION, LightningCallAttributes
from agentlightning.tracer.scope import UNNUMBERED
from agentlightning.types import AttemptedRollout, Span, Triplet
from agentlightning.utils.id import generate_id
from agentlightning.utils.otel import flatten_attributes, sanitize_attributes

CALL_SPAN = "openai.chat.completion"
"""The name under which adapters expect a model call that a client tells of."""
_LOGPROBS = LightningCallAttributes.COMPLETION_LOGPROBS.value
_FINISH_REASON = LightningCallAttributes.FINISH_REASON.value
_WEIGHT_VERSION = LightningCallAttributes.WEIGHT_VERSION.value


def triplet_spans(triplets: Sequence[Triplet], rollout: AttemptedRollout) -> list[Span]:
    """Return a call span for each triplet, and behind it its reward; the last of these is the final one.

    Raises:
        InvalidReward: a reward is NaN or infinite; says of which triplet.
    """
    spans: list[Span] = []
    for place, triplet in enumerate(triplets):
        response_id = str(triplet.metadata.get("response_id") or f"triplet-{generate_id(12)}")
        spans.append(_span(CALL_SPAN, _call_attributes(triplet, response_id), rollout))
        if triplet.reward is None:
            continue
        if not math.isfinite(triplet.reward):
            raise InvalidReward(f"The agent returned a triplet (number {place}) with the reward {triplet.reward}")
        named = flatten_attributes(target_attributes("call", response_id, None))
        spans.append(_span(AGL_ANNOTATION, {**reward_attributes(triplet.reward), **named}, rollout))
    return spans


def _span(name: str, attributes: dict[str, Any], rollout: AttemptedRollout) -> Span:
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


def _call_attributes(triplet: Triplet, response_id: str) -> dict[str, Any]:
    prompt, response = _fields(triplet.prompt), _fields(triplet.response)
    said = {
        "gen_ai.response.id": response_id,
        "prompt_token_ids": prompt.get("token_ids"),
        "response_token_ids": response.get("token_ids"),
        _LOGPROBS: response.get("token_logprobs"),
        _FINISH_REASON: triplet.metadata.get("finish_reason"),
        _WEIGHT_VERSION: triplet.metadata.get("weight_version"),
        "gen_ai.prompt": _messages(prompt, "user"),
        "gen_ai.completion": _messages(response, "assistant"),
    }
    told = {key: value for key, value in said.items() if value not in (None, [])}
    return sanitize_attributes(flatten_attributes(told))


def _fields(side: Any) -> Mapping[str, Any]:
    """Return one side of a triplet as a dictionary; text and messages are its `raw_content`."""
    return cast("Mapping[str, Any]", side) if isinstance(side, Mapping) else {"raw_content": side}


def _messages(side: Mapping[str, Any], role: str) -> list[dict[str, Any]]:
    """Return what was said, as messages."""
    content = side.get("raw_content", side.get("content"))
    if content is None:
        return []
    listed: list[Any] = cast("list[Any]", content) if isinstance(content, list) else [content]
    return [_message(item, role) for item in listed]


def _message(item: Any, role: str) -> dict[str, Any]:
    if isinstance(item, Mapping):
        return {"role": role, **cast("Mapping[str, Any]", item)}
    return {"role": role, "content": item if isinstance(item, str) else json.dumps(item, default=str)}
