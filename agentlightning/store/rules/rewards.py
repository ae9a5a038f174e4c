"""The final reward of an attempt: the reward of the span with the greatest number, updated when spans arrive.

Among spans with the same number, the span that was stored last counts, as in lists of spans. Stale spans do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from agentlightning.semconv import STALE
from agentlightning.store.rules.tx import Record
from agentlightning.store.rules.values import evolve
from agentlightning.types import Attempt, Span
from agentlightning.utils.otlp.unread import UnreadSpan
from agentlightning.utils.rewards import MARKS, may_hold_reward, reward_of_span


class Rewarded(NamedTuple):
    """The reward of one span."""

    number: int
    """Number of the span."""
    reward: float | None
    rewards: dict[str, float] | None


def may_reward(span: Span | UnreadSpan) -> bool:
    """Return False if a fast check shows that a span sets no reward."""
    if isinstance(span, UnreadSpan):
        return any(mark in span.body for mark in MARKS)
    return may_hold_reward(span)


def rewarded_by(span: Span | UnreadSpan) -> Rewarded | None:
    """Return the reward that a span sets; None if it sets none or is stale."""
    read = span.read() if isinstance(span, UnreadSpan) else span
    if read.attributes.get(STALE) is True or (reward := reward_of_span(read)) is None:
        return None
    return Rewarded(span.sequence_id, *reward)


def with_reward(record: Record, attempt: Attempt, rewards: Iterable[Rewarded]) -> Attempt:
    """Return an attempt with the last of these rewards, unless its current reward is from a later span."""
    last = record.reward_number(attempt)
    chosen: Rewarded | None = None
    for each in rewards:
        if each.number >= last:
            chosen, last = each, each.number
    if chosen is None:
        return attempt
    record.reward_numbers = {**record.reward_numbers, attempt.attempt_id: chosen.number}
    return evolve(attempt, reward=chosen.reward, rewards=chosen.rewards)


def set_by_hand(record: Record, attempt: Attempt) -> None:
    """Record that a call set the reward of an attempt, so that only spans with later numbers change it."""
    record.reward_numbers = {**record.reward_numbers, attempt.attempt_id: record.spans_issued + 1}


def read_again(record: Record, spans: Iterable[Span]) -> bool:
    """Set the rewards in a record of an earlier version from all its spans, in the order in which they were stored;
    return True if there was a reward."""
    rewards: dict[str, list[Rewarded]] = {}
    for span in spans:
        if (rewarded := rewarded_by(span)) is not None:
            rewards.setdefault(span.attempt_id, []).append(rewarded)
    for attempt in list(record.attempts):
        if attempt.attempt_id in rewards:
            record.put_attempt(with_reward(record, attempt, rewards[attempt.attempt_id]))
    return bool(rewards)


def problems_of_rewards(record: Record, spans: Iterable[Span]) -> Iterator[str]:
    """Yield the differences between the rewards in a record and in its spans."""
    expected = record.copy()
    expected.reward_numbers = {}
    expected.attempts = [evolve(attempt, reward=None, rewards=None) for attempt in record.attempts]
    read_again(expected, spans)
    for attempt, derived in zip(record.attempts, expected.attempts, strict=True):
        number, of_span = record.reward_numbers.get(attempt.attempt_id), expected.reward_numbers.get(attempt.attempt_id)
        differ = (attempt.reward, attempt.rewards) != (derived.reward, derived.rewards)
        if (differ and number in (None, of_span)) or (of_span is not None and (number is None or of_span > number)):
            yield f"attempt {attempt.attempt_id} has the reward {attempt.reward}, but its spans have {derived.reward}"
