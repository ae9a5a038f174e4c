"""What passes through a store, counted: claims, ends of rollouts and attempts, model calls and their tokens.

The store sees all of it, whoever plays, so that one page tells of a whole run: a runner needs no metrics of its own.
Model calls are counted by the gateway's spans as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

from agentlightning.semconv import LightningCallAttributes
from agentlightning.types import Attempt, AttemptedRollout, Rollout, Span
from agentlightning.utils.metrics import MetricsBackend

ENDS, END_SECONDS = "agl.rollouts.total", "agl.rollouts.duration"
END_LABELS = ("status", "mode")
CLAIM_SECONDS = "agl.rollouts.claim_delay"
"""From the moment at which a rollout might have been claimed to its first claim."""
CLAIM_LABELS = ("mode",)
ATTEMPT_ENDS = "agl.attempts.total"
ATTEMPT_LABELS = ("status", "outcome", "reason")
"""`reason` refines the outcome: `exception`, `timeout`, `lease_expired`, `budget`, ..."""
CALLS, CALL_SECONDS, TOKENS = "agl.calls.total", "agl.calls.duration", "agl.tokens.total"
CALL_LABELS, TOKEN_LABELS = ("state",), ("kind",)

_CALL_SPAN = "raw_gen_ai_request"
_KEYS = LightningCallAttributes
_TOKEN_KEYS = {
    "prompt": (_KEYS.PROMPT_TOKENS.value, _KEYS.PROMPT_TOKEN_IDS.value),
    "completion": (_KEYS.COMPLETION_TOKENS.value, _KEYS.COMPLETION_TOKEN_IDS.value),
}
_MOST_WORDS = 32
"""Different states and reasons that get a series of their own: programs may write their own words there."""
OTHER, UNKNOWN = "other", "unknown"


class StoreMeter:
    """Counts for one store. Its methods may be called from any thread and do not wait."""

    def __init__(self, tracker: MetricsBackend, seconds_buckets: Iterable[float]) -> None:
        self._tracker = tracker
        self._words: set[str] = set()
        buckets = tuple(seconds_buckets)
        for name, labels in ((ENDS, END_LABELS), (ATTEMPT_ENDS, ATTEMPT_LABELS), (CALLS, CALL_LABELS)):
            tracker.register_counter(name, labels)
        tracker.register_counter(TOKENS, TOKEN_LABELS)
        for name, labels in ((END_SECONDS, END_LABELS), (CLAIM_SECONDS, CLAIM_LABELS), (CALL_SECONDS, CALL_LABELS)):
            tracker.register_histogram(name, labels, buckets)
        self._read: dict[str, Callable[[Any], None]] = {
            "dequeue_rollout": self._claimed,
            "dequeue_many_rollouts": self._claimed,
            "add_span": self._stored,
            "add_otel_span": self._stored,
            "add_many_spans": self._stored,
        }

    def rollout_ended(self, rollout: Rollout) -> None:
        """Count a rollout that came to its end."""
        labels = {"status": rollout.status, "mode": rollout.mode or UNKNOWN}
        self._tracker.count(ENDS, 1.0, labels)
        if rollout.end_time is not None:
            self._tracker.observe(END_SECONDS, max(0.0, rollout.end_time - rollout.start_time), labels)

    def attempt_ended(self, attempt: Attempt) -> None:
        """Count an attempt that came to its end."""
        reason = self._bounded(attempt.outcome_reason) if attempt.outcome_reason else ""
        labels = {"status": attempt.status, "outcome": attempt.outcome or UNKNOWN, "reason": reason}
        self._tracker.count(ATTEMPT_ENDS, 1.0, labels)

    def answered(self, operation: str, answer: Any) -> None:
        """Count what a caller of the store was given: claims, or the spans that were new."""
        read = self._read.get(operation)
        if read is not None and answer:
            read(answer)

    def _claimed(self, answer: AttemptedRollout | list[AttemptedRollout]) -> None:
        for rollout in answer if isinstance(answer, list) else [answer]:
            if rollout.attempt.sequence_id == 1:
                since = max(rollout.start_time, rollout.not_before or 0.0)
                delay = max(0.0, rollout.attempt.start_time - since)
                self._tracker.observe(CLAIM_SECONDS, delay, {"mode": rollout.mode or UNKNOWN})

    def _stored(self, answer: Span | list[Span]) -> None:
        for span in answer if isinstance(answer, list) else [answer]:
            if span.name == _CALL_SPAN and _KEYS.STATE.value in span.attributes:
                self._called(span)

    def _called(self, span: Span) -> None:
        labels = {"state": self._bounded(str(span.attributes[_KEYS.STATE.value]))}
        self._tracker.count(CALLS, 1.0, labels)
        seconds = span.attributes.get(_KEYS.LATENCY_SECONDS.value)
        if isinstance(seconds, (int, float)):
            self._tracker.observe(CALL_SECONDS, float(seconds), labels)
        for kind, (count_key, ids_key) in _TOKEN_KEYS.items():
            ids = span.attributes.get(ids_key)
            count = len(cast("list[int]", ids)) if isinstance(ids, list) else span.attributes.get(count_key)
            if isinstance(count, (int, float)) and count > 0:
                self._tracker.count(TOKENS, float(count), {"kind": kind})

    def _bounded(self, word: str) -> str:
        if word not in self._words and len(self._words) >= _MOST_WORDS:
            return OTHER
        self._words.add(word)
        return word
