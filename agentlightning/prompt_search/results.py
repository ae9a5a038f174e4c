"""Results of rollouts for critics, and the score of a candidate over its results."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from typing_extensions import TypedDict

from agentlightning.adapter.messages import TraceToMessages
from agentlightning.base.terminal import cut
from agentlightning.errors import NoScoredRolloutError
from agentlightning.evaluation.result import SCORED
from agentlightning.evaluation.statistics import mcnemar_exact, t_interval, wilson_bounds
from agentlightning.store.base import LightningStore
from agentlightning.store.rules.values import to_json
from agentlightning.training.rollouts import Evidence, evidence
from agentlightning.types import Rollout

logger = logging.getLogger(__name__)

MissingPolicy = Literal["retry", "skip", "zero"]
"""Handling of a task without a reward, because of an error or a late rollout. `retry` runs it once more and then
excludes it from the mean, `skip` excludes it immediately, `zero` counts it as 0."""
_READ_AT_ONCE = 32
"""Number of rollouts whose spans are fetched at the same time."""
_TEXT = 2_000
"""Maximum number of characters of a message or of a span value."""
_MESSAGES, _SPANS, _ITEMS, _DEEPEST = 24, 40, 200, 6
"""Maximum numbers of messages of a conversation, spans of a rollout, list items, and levels. Both ends are kept."""
_SPAN_FIELDS = {"name", "attributes", "status", "start_time", "end_time"}


class NoCandidateError(NoScoredRolloutError, ValueError):
    """No version can be judged, because no rollout has a reward."""


class RolloutResult(TypedDict):
    """The result of a rollout, as JSON data. Long texts are cut."""

    rollout_id: str
    task: Any
    """Input of the rollout."""
    status: str
    final_reward: float | None
    """Reward; None without one, because an error is not a low reward."""
    failure: str | None
    """Reason for the missing reward, or the error of the agent; None without either."""
    messages: list[Any]
    """Conversations of the latest attempt, each `{"messages": [...], "tools": [...]}`."""
    spans: list[dict[str, Any]]
    """Spans of the latest attempt: name, attributes, status and times."""


async def read_results(
    store: LightningStore, rollouts: Sequence[Rollout], adapter: TraceToMessages
) -> list[RolloutResult]:
    """Return the results of ended rollouts, in their order."""
    results = list[RolloutResult]()
    for start in range(0, len(rollouts), _READ_AT_ONCE):
        batch = rollouts[start : start + _READ_AT_ONCE]
        pieces = await asyncio.gather(*(evidence(store, rollout, note=True) for rollout in batch))
        results += [_result_of(each, adapter) for each in pieces]
    return results


def _result_of(ended: Evidence, adapter: TraceToMessages) -> RolloutResult:
    latest, reward, failure = ended.latest, ended.reward, None
    outcome = (latest.outcome if latest else None) or ended.rollout.status
    if latest is not None and latest.error is not None:
        failure = cut(f"{latest.error.type}: {latest.error.message}", _TEXT)
    elif outcome not in SCORED or reward is None:
        failure = (latest.outcome_reason if latest else None) or ("no reward" if outcome == "unscored" else outcome)
    return RolloutResult(
        rollout_id=ended.rollout.rollout_id,
        task=_short(to_json(ended.rollout.input)),
        status=ended.rollout.status,
        final_reward=reward,
        failure=failure,
        messages=_conversations(ended, adapter),
        spans=[_short(span.model_dump(mode="json", include=_SPAN_FIELDS)) for span in _ends(ended.counted, _SPANS)],
    )


def _conversations(ended: Evidence, adapter: TraceToMessages) -> list[Any]:
    try:
        calls = adapter.adapt(ended.counted)
    except ValueError as error:  # nothing that the adapter can read
        logger.debug("rollout %s: no messages: %s", ended.rollout.rollout_id, error)
        return []
    conversations = list[Any]()
    for number, call in enumerate(calls):  # a call that continues a conversation repeats it
        messages = call["messages"]
        if not any(later["messages"][: len(messages)] == messages for later in calls[number + 1 :]):
            conversations.append({**call, "messages": _short(_ends(messages, _MESSAGES))})
    return _ends(conversations, _MESSAGES)


def _ends(items: Sequence[Any], most: int) -> list[Any]:
    return list(items) if len(items) <= most else [*items[: most // 2], *items[-(most - most // 2) :]]


def _short(value: Any, depth: int = _DEEPEST) -> Any:
    """Return JSON data with long texts cut and too deeply nested values as text."""
    if isinstance(value, str):
        return cut(value, _TEXT)
    if isinstance(value, (dict, list)) and depth <= 0:
        return cut(json.dumps(value), _TEXT)
    if isinstance(value, dict):
        return {key: _short(item, depth - 1) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_short(item, depth - 1) for item in _ends(cast("list[Any]", value), _ITEMS)]
    return value


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a candidate on tasks."""

    mean: float | None
    """Mean over the tasks that count; None without such tasks."""
    low: float
    """Lower limit of the 95 % interval of the mean, see `interval`."""
    high: float
    tasks: int
    scored: int
    """Number of tasks with a reward. The others failed."""

    @property
    def coverage(self) -> float:
        """Share of the tasks with a reward."""
        return self.scored / self.tasks if self.tasks else 0.0


def rewards_of(results: Sequence[RolloutResult]) -> list[float | None]:
    return [result["final_reward"] for result in results]


def score_of(rewards: Sequence[float | None], missing: MissingPolicy = "retry") -> Score:
    """Return the score of rewards, one per task. The reward None is a task without a reward."""
    earned = [reward for reward in rewards if reward is not None]
    counted = earned + [0.0] * (len(rewards) - len(earned) if missing == "zero" else 0)
    return Score(*interval(counted), len(rewards), len(earned))


def interval(rewards: Sequence[float]) -> tuple[float | None, float, float]:
    """Return mean and 95 % interval; None and infinite limits without rewards.

    For rewards between 0 and 1 it is Wilson's interval with the mean as the share of successes. It is never too narrow,
    because no rewards with that mean vary more than 0 and 1. For other rewards it is Student's t interval.
    """
    if not rewards:
        return None, -math.inf, math.inf
    if not all(0.0 <= reward <= 1.0 for reward in rewards):
        return t_interval(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return mean, *wilson_bounds(mean, len(rewards))


def sign_test(before: Sequence[float | None], after: Sequence[float | None]) -> float:
    """Return the two-sided p-value of the exact sign test on the tasks with a reward on both sides."""
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if old is not None and new is not None]
    return mcnemar_exact(sum(new > old for old, new in pairs), sum(new < old for old, new in pairs))
