"""Converts what an agent of v0.1 returns to the result that its protocol sends. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from opentelemetry.sdk.trace import ReadableSpan
from pydantic import BaseModel

from agentlightning.adapter import TraceAdapter
from agentlightning.types import RolloutLegacy, Span, Task, Triplet


def as_rollout(output: object, task: Task, spans: Sequence[Span], exporter: TraceAdapter[Any]) -> RolloutLegacy:
    """Return a result: what the agent returned, and for the rest the trace; the reward is that of the last triplet.

    Raises:
        TypeError: `output` is none of a number, None, a `RolloutLegacy`, and lists of triplets, dicts or spans.
    """
    known: dict[str, Any] = {}
    if isinstance(output, (int, float)):
        known["final_reward"] = float(output)
    elif isinstance(output, list) and output:
        items = cast("list[Any]", output)
        if all(isinstance(item, Triplet) for item in items):
            known["triplets"] = items
        elif all(isinstance(item, (dict, ReadableSpan, BaseModel)) for item in items):
            known["trace"] = [_plain(item) for item in items]
        else:
            raise TypeError(f"An agent of v0.1 may return a list of triplets, of dicts or of spans; got {items[:3]!r}")
    elif output is not None and not isinstance(output, (list, RolloutLegacy)):
        raise TypeError(f"An agent of v0.1 may return None, a number, a RolloutLegacy or a list; got {output!r}")
    result = output if isinstance(output, RolloutLegacy) else RolloutLegacy(rollout_id=task.rollout_id, **known)
    triplets = result.triplets
    if triplets is None and spans:
        found: object = exporter.adapt(spans)
        triplets = [triplet for triplet in found if isinstance(triplet, Triplet)] if isinstance(found, list) else None  # pyright: ignore[reportUnknownVariableType] -- an exporter of the user's
    rewards = [triplet.reward for triplet in triplets or () if triplet.reward is not None]
    return result.model_copy(
        update={
            "task": result.task or task,
            "triplets": triplets,
            "trace": result.trace if result.trace is not None else [_plain(span) for span in spans],
            "final_reward": result.final_reward if result.final_reward is not None or not rewards else rewards[-1],
        }
    )


def _plain(span: ReadableSpan | BaseModel | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(span, ReadableSpan):
        return json.loads(span.to_json())
    return span.model_dump(mode="json") if isinstance(span, BaseModel) else dict(span)
