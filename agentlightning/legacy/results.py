"""What an agent of v0.1 may return, as the result that its protocol sends. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

from opentelemetry.sdk.trace import ReadableSpan
from pydantic import BaseModel

from agentlightning.adapter import TraceAdapter
from agentlightning.types import RolloutLegacy, Span, Task, Triplet


def as_rollout(output: Any, task: Task, spans: Sequence[Span], exporter: TraceAdapter[Any]) -> RolloutLegacy:
    """Return a result: what the agent said; what it did not say comes from the trace, the reward from the last triplet.

    Raises:
        TypeError: `output` is none of a number, None, a `RolloutLegacy`, and lists of triplets, dicts or spans.
    """
    said = _said(output, task)
    triplets = said.triplets
    if triplets is None and spans:
        found: Any = exporter.adapt(spans)
        triplets = [triplet for triplet in found if isinstance(triplet, Triplet)] if isinstance(found, list) else None  # pyright: ignore[reportUnknownVariableType] -- an exporter of the user's
    rewards = [triplet.reward for triplet in triplets or () if triplet.reward is not None]
    return said.model_copy(
        update={
            "task": said.task or task,
            "triplets": triplets,
            "trace": said.trace if said.trace is not None else [_plain(span) for span in spans],
            "final_reward": said.final_reward if said.final_reward is not None or not rewards else rewards[-1],
        }
    )


def _said(output: Any, task: Task) -> RolloutLegacy:
    if isinstance(output, RolloutLegacy):
        return output
    said: dict[str, Any] = {}
    if isinstance(output, (int, float)):
        said["final_reward"] = float(output)
    elif isinstance(output, list) and output:
        items = cast("list[Any]", output)
        if all(isinstance(item, Triplet) for item in items):
            said["triplets"] = items
        elif all(isinstance(item, (dict, ReadableSpan, BaseModel)) for item in items):
            said["trace"] = [_plain(item) for item in items]
        else:
            raise TypeError(f"An agent of v0.1 may return a list of triplets, of dicts or of spans; got {items[:3]!r}")
    elif output is not None and not isinstance(output, list):
        raise TypeError(f"An agent of v0.1 may return None, a number, a RolloutLegacy or a list; got {output!r}")
    return RolloutLegacy(rollout_id=task.rollout_id, **said)


def _plain(span: Any) -> dict[str, Any]:
    if isinstance(span, ReadableSpan):
        return json.loads(span.to_json())
    return span.model_dump(mode="json") if isinstance(span, BaseModel) else dict(span)
