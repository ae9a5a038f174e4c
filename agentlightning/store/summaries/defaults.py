"""Summaries and statistics for any store with the other operations of the contract. Slow: it reads all rollouts."""

from __future__ import annotations

from collections.abc import Sequence

from agentlightning.semconv import STALE
from agentlightning.store.summaries.aggregate import AggregatePlan, aggregate_entries
from agentlightning.store.summaries.facts import facts_of, input_text, preview_of, searched
from agentlightning.store.summaries.plan import Entry, Input, SummaryPlan, page_of_entries
from agentlightning.store.traces import Readable
from agentlightning.types import Attempt, AttemptedRollout, Rollout, RolloutAggregate, RolloutFilter, Span, SummaryPage
from agentlightning.utils.rewards import reward_of_span


async def query_summaries(
    store: Readable,
    chosen: RolloutFilter | None,
    sort_by: str,
    sort_order: str,
    *,
    limit: int,
    offset: int,
    cursor: str | None,
) -> SummaryPage:
    """Return a page of summaries.

    Raises:
        BadRequestError: an argument is wrong.
    """
    plan = SummaryPlan.of(chosen, sort_by, sort_order, limit, offset, cursor, places=str)
    return page_of_entries([await _entry(store, rollout) for rollout in await store.query_rollouts()], plan)


async def aggregate(
    store: Readable, by: str, chosen: RolloutFilter | None, buckets: int, dimension: str | None
) -> RolloutAggregate:
    """Return statistics of rollouts by group.

    Raises:
        BadRequestError: an argument is wrong.
    """
    plan = AggregatePlan.of(by, chosen, buckets, dimension)
    return aggregate_entries([await _entry(store, rollout) for rollout in await store.query_rollouts()], plan)


async def _entry(store: Readable, rollout: AttemptedRollout | Rollout) -> Entry:
    attempt: Attempt | None = getattr(rollout, "attempt", None)
    if attempt is None:  # an older store lists rollouts without them
        attempts = list(await store.query_attempts(rollout.rollout_id))
        attempt = max(attempts, key=lambda each: each.sequence_id, default=None)
    spans = await store.query_spans(rollout.rollout_id)
    if attempt is not None and attempt.reward is None:
        reward, rewards = final_reward([span for span in spans if span.attempt_id == attempt.attempt_id])
        attempt = attempt.model_copy(update={"reward": reward, "rewards": rewards})
    text = input_text(rollout.input)
    facts = facts_of(rollout, attempt, 0 if attempt is None else attempt.sequence_id)
    return Entry(facts, rollout.rollout_id, len(spans), Input(preview_of(text), searched(text)))


def final_reward(spans: Sequence[Span]) -> tuple[float | None, dict[str, float] | None]:
    """Return the final reward of an attempt and its dimensions, from its spans in the order of numbers."""
    for span in reversed(spans):
        if span.attributes.get(STALE) is not True and (reward := reward_of_span(span)) is not None:
            return reward
    return None, None
