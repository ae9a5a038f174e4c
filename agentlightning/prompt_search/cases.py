"""What a critic sees of a rollout, and which rollouts it sees: some of the worst and some of the best."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any, cast

from typing_extensions import TypedDict

from agentlightning.adapter.messages import TraceToMessages
from agentlightning.evaluation.result import SCORED
from agentlightning.store.base import LightningStore
from agentlightning.store.rules.values import to_json
from agentlightning.terminal import cut
from agentlightning.training.rollouts import Evidence, evidence
from agentlightning.types import Rollout
from agentlightning.utils.masking import masked

logger = logging.getLogger(__name__)

_READ_AT_ONCE = 32
"""Rollouts whose spans are fetched at the same time."""
_TEXT = 2_000
"""Characters of one message or one value of a span."""
_MESSAGES, _SPANS = 24, 40
"""Messages of a conversation, and spans of a rollout; of more, the first and the last are kept."""
_DEEPEST = 6


class RolloutResult(TypedDict):
    """How a rollout ended, as JSON data. Long texts are cut."""

    rollout_id: str
    task: Any
    """The input of the rollout."""
    status: str
    final_reward: float | None
    """None where it earned nothing: a fault is not a low reward."""
    failure: str | None
    """Why it earned nothing, or what went wrong by the agent's own fault; None if nothing did."""
    messages: list[Any]
    """The conversations of the latest attempt, each `{"messages": [...], "tools": [...]}`."""
    spans: list[dict[str, Any]]
    """Of the latest attempt: name, attributes, status and times."""


async def read_results(
    store: LightningStore, rollouts: Sequence[Rollout], adapter: TraceToMessages
) -> list[RolloutResult]:
    """Return the results of ended rollouts, in their order."""
    read = list[RolloutResult]()
    for start in range(0, len(rollouts), _READ_AT_ONCE):
        found = await asyncio.gather(*(evidence(store, r, note=True) for r in rollouts[start : start + _READ_AT_ONCE]))
        read.extend(_result_of(each, adapter) for each in found)
    return read


def _result_of(found: Evidence, adapter: TraceToMessages) -> RolloutResult:
    latest, reward = found.latest, found.reward
    outcome = (latest.outcome if latest else None) or found.rollout.status
    failure = None
    if latest is not None and latest.error is not None:
        failure = cut(f"{latest.error.type}: {latest.error.message}", _TEXT)
    elif outcome not in SCORED or reward is None:
        failure = (latest.outcome_reason if latest else None) or ("no reward" if outcome == "unscored" else outcome)
    return RolloutResult(
        rollout_id=found.rollout.rollout_id,
        task=_short(to_json(found.rollout.input)),
        status=found.rollout.status,
        final_reward=reward,
        failure=failure,
        messages=_conversations(found, adapter),
        spans=[_short(span.model_dump(mode="json", include=_SPAN_FIELDS)) for span in _ends(found.counted, _SPANS)],
    )


_SPAN_FIELDS = {"name", "attributes", "status", "start_time", "end_time"}


def _conversations(found: Evidence, adapter: TraceToMessages) -> list[Any]:
    try:
        calls = adapter.adapt(found.counted)
    except ValueError as error:  # nothing that the adapter can read
        logger.debug("rollout %s shows no messages: %s", found.rollout.rollout_id, error)
        return []
    shown = list[Any]()
    for number, call in enumerate(calls):
        said = call["messages"]
        if any(other["messages"][: len(said)] == said for other in calls[number + 1 :]):
            continue  # a later call begins with all of it
        shown.append({**call, "messages": _short(_ends(said, _MESSAGES))})
    return _ends(shown, _MESSAGES)


def _ends(items: Sequence[Any], most: int) -> list[Any]:
    """Return the first and the last of too many."""
    return list(items) if len(items) <= most else [*items[: most // 2], *items[-(most - most // 2) :]]


def _short(value: Any, depth: int = _DEEPEST) -> Any:
    """Return JSON data with its long texts cut, and what lies too deep as a text."""
    if isinstance(value, str):
        return cut(value, _TEXT)
    if isinstance(value, (dict, list)) and depth <= 0:
        return cut(json.dumps(value), _TEXT)
    if isinstance(value, dict):
        return {key: _short(item, depth - 1) for key, item in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return [_short(item, depth - 1) for item in _ends(items, 200)]
    return value


def choose_cases(results: Sequence[RolloutResult], count: int, rng: random.Random) -> list[RolloutResult]:
    """Return at most `count` results for a critic, the worst first: half of them the worst, the others the best.

    Equal ones are drawn. Rollouts without a reward are shown where too few have one, and one of them in any case if
    there is room for three: it may be the prompt that made the agent fail.
    """
    drawn = list(results)
    rng.shuffle(drawn)
    failed = [result for result in drawn if result["final_reward"] is None]
    scored = sorted((r for r in drawn if r["final_reward"] is not None), key=lambda r: r["final_reward"] or 0.0)
    places = min(len(failed), max(count - len(scored), int(count >= 3)))
    left = min(count - places, len(scored))
    worst = scored[: (left + 1) // 2]
    best = scored[len(scored) - left // 2 :] if left // 2 else []
    return [*failed[:places], *worst, *best]


def hidden_secrets(results: Sequence[RolloutResult]) -> list[RolloutResult]:
    """Return results as they may leave for a model of somebody else: keys and passwords are hidden."""
    return masked(list(results))
