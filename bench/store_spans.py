"""The span of the store benchmarks: one model call, about 1,100 bytes of JSON."""

from __future__ import annotations

import time
from typing import Any

from agentlightning.types import Attempt, AttemptedRollout, Span

ATTRIBUTES: dict[str, Any] = {
    "gen_ai.operation.name": "chat",
    "gen_ai.request.model": "policy-model",
    "gen_ai.response.model": "policy-model",
    "gen_ai.request.temperature": 0.7,
    "gen_ai.request.max_tokens": 512,
    "gen_ai.usage.prompt_tokens": 211,
    "gen_ai.usage.completion_tokens": 64,
    "gen_ai.prompt.0.role": "user",
    "gen_ai.prompt.0.content": "Name the river that flows through the capital of the country described below.",
    "gen_ai.completion.0.role": "assistant",
    "gen_ai.completion.0.content": "Two rivers meet there; the longer one is the Danube.      ",
    "tags": ["train", "math", "v2"],
}


def model_call(attempt: Attempt, number: int) -> Span:
    """Return a span of an attempt with this number."""
    now = time.time()
    return Span.from_attributes(
        attributes={**ATTRIBUTES, "step": number},
        rollout_id=attempt.rollout_id,
        attempt_id=attempt.attempt_id,
        sequence_id=number,
        name="openai.chat.completion",
        start_time=now,
        end_time=now + 0.25,
    )


def model_calls(claim: AttemptedRollout, first: int, count: int) -> list[Span]:
    """Return `count` spans of a claimed rollout, numbered from `first`."""
    return [model_call(claim.attempt, number) for number in range(first, first + count)]
