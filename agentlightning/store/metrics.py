"""Metrics of one store: number of calls, duration and outcome of each operation, and metrics of your programs
(`observe`). They are in the registry of the metrics page of a store server.

All claims, ends of rollouts and attempts, model calls and tokens pass through the store, so one page shows a complete
run and runners need no metrics. Model calls are counted when the gateway's spans are stored. A store without a tracker
has no overhead: the operations of an instance are wrapped only if it has a tracker.
"""

from __future__ import annotations

import functools
import math
import re
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, cast

from agentlightning.errors import BadRequestError
from agentlightning.semconv import RAW_SPAN, LightningCallAttributes
from agentlightning.store.operations import names_of
from agentlightning.types import Attempt, AttemptedRollout, Rollout, Span
from agentlightning.utils.metrics import MetricsBackend, PrometheusMetricsBackend
from agentlightning.utils.metrics.prometheus import prometheus_name
from agentlightning.utils.rewards import as_number

SECONDS_BUCKETS = (
    *(1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4),
    *(0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.07),
    *(0.1, 0.2, 0.3, 0.5, 0.7, 1, 2, 3, 5, 7),
    *(10, 12, 15, 20, 25, 30, 40, 50, 60, 90, 120, 180, 240, 300),
)


@dataclass(frozen=True)
class Metric:
    """One metric, with its name in a tracker and in Prometheus. Histograms are in seconds."""

    key: str
    """Name in a tracker."""
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    meaning: str
    """Description in one line."""

    @property
    def name(self) -> str:
        """Name in Prometheus; a histogram adds `_bucket`, `_count` and `_sum` to it."""
        return prometheus_name(self.key)

    def register(self, tracker: MetricsBackend) -> None:
        """Register the counter or the histogram."""
        if self.kind == "counter":
            tracker.register_counter(self.key, self.labels)
        else:
            tracker.register_histogram(self.key, self.labels, SECONDS_BUCKETS)


_OPERATION, _END, _CALL = ("method", "store_pubmeth", "status"), ("status", "mode"), ("state",)
ENDS = Metric("agl.rollouts.total", "counter", _END, "rollouts that ended")
ATTEMPT_ENDS = Metric(
    "agl.attempts.total",
    "counter",
    ("status", "outcome", "reason"),
    "attempts that ended; `lease_expired`: the worker sent no heartbeat, `runner_died`: its process ended",
)
CALLS = Metric("agl.calls.total", "counter", _CALL, "model calls through the gateway by final state")
TOKENS = Metric("agl.tokens.total", "counter", ("kind",), "tokens of the model calls: `prompt`, `completion`")
OPERATIONS = Metric(
    "agl.store.total",
    "counter",
    _OPERATION,
    "operations of the store; `method` is the operation that ran, `store_pubmeth` the one that the caller used, "
    "`status` is `OK` or an error class",
)
END_SECONDS = Metric("agl.rollouts.duration", "histogram", _END, "seconds from the enqueue to the end of a rollout")
CLAIM_SECONDS = Metric(
    "agl.rollouts.claim_delay",
    "histogram",
    ("mode",),
    "seconds from the time at which a rollout becomes claimable to its first claim",
)
CALL_SECONDS = Metric("agl.calls.duration", "histogram", _CALL, "seconds of a model call through the gateway")
OPERATION_SECONDS = Metric(
    "agl.store.latency", "histogram", _OPERATION, "seconds of an operation of the store, including waiting"
)

_KEYS = LightningCallAttributes
_TOKEN_KEYS = {
    "prompt": (_KEYS.PROMPT_TOKENS.value, _KEYS.PROMPT_TOKEN_IDS.value),
    "completion": (_KEYS.COMPLETION_TOKENS.value, _KEYS.COMPLETION_TOKEN_IDS.value),
}
_MOST_WORDS = 32
"""Largest number of states and reasons with a separate series, because programs can set any text there."""
OTHER, UNKNOWN = "other", "unknown"


_called: ContextVar[str | None] = ContextVar("agentlightning_store_operation", default=None)
"""The operation that the current caller of the store called."""


def observe_operations(store: object, tracker: MetricsBackend) -> StoreMeter:
    """Count and time all operations of this store; return the meter.

    The time of an operation includes waiting (a long poll, a queue of writers).
    """
    OPERATIONS.register(tracker)
    OPERATION_SECONDS.register(tracker)
    meter = StoreMeter(tracker)
    for name in names_of():
        setattr(store, name, _counted(name, getattr(store, name), tracker, meter))
    return meter


def _counted(
    name: str, operation: Callable[..., Awaitable[object]], tracker: MetricsBackend, meter: StoreMeter
) -> Callable[..., Awaitable[object]]:
    @functools.wraps(operation)
    async def counted(*args: object, **kwargs: object) -> object:
        outer = _called.get()
        entered = _called.set(name) if outer is None else None
        status, start = "OK", time.perf_counter()
        try:
            answer = await operation(*args, **kwargs)
            if outer is None:
                meter.answered(name, answer)
            return answer
        except BaseException as error:  # cancellations are counted, too
            status = type(error).__name__
            raise
        finally:
            labels = {"method": name, "store_pubmeth": outer or name, "status": status}
            tracker.count(OPERATIONS.key, 1.0, labels)
            tracker.observe(OPERATION_SECONDS.key, time.perf_counter() - start, labels)
            if entered is not None:
                _called.reset(entered)

    return counted


class StoreMeter:
    """The counters of one store. Its methods can be called from any thread and do not wait."""

    def __init__(self, tracker: MetricsBackend) -> None:
        self._tracker = tracker
        self._words: set[str] = set()
        for metric in (ENDS, END_SECONDS, CLAIM_SECONDS, ATTEMPT_ENDS, CALLS, CALL_SECONDS, TOKENS):
            metric.register(tracker)
        self._read: dict[str, Callable[[Any], None]] = {
            "dequeue_rollout": self._claimed,
            "dequeue_many_rollouts": self._claimed,
            "add_span": self._stored,
            "add_otel_span": self._stored,
            "add_many_spans": self._stored,
        }

    def rollout_ended(self, rollout: Rollout) -> None:
        """Count a rollout that has ended."""
        labels = {"status": rollout.status, "mode": rollout.mode or UNKNOWN}
        self._tracker.count(ENDS.key, 1.0, labels)
        if rollout.end_time is not None:
            self._tracker.observe(END_SECONDS.key, max(0.0, rollout.end_time - rollout.start_time), labels)

    def attempt_ended(self, attempt: Attempt) -> None:
        """Count an attempt that has ended."""
        reason = self._bounded(attempt.outcome_reason) if attempt.outcome_reason else ""
        labels = {"status": attempt.status, "outcome": attempt.outcome or UNKNOWN, "reason": reason}
        self._tracker.count(ATTEMPT_ENDS.key, 1.0, labels)

    def answered(self, operation: str, answer: object) -> None:
        """Count the results of an operation: claims or new spans."""
        read = self._read.get(operation)
        if read is not None and answer:
            read(answer)

    def _claimed(self, answer: AttemptedRollout | list[AttemptedRollout]) -> None:
        for rollout in answer if isinstance(answer, list) else [answer]:
            if rollout.attempt.sequence_id == 1:
                since = max(rollout.start_time, rollout.not_before or 0.0)
                delay = max(0.0, rollout.attempt.start_time - since)
                self._tracker.observe(CLAIM_SECONDS.key, delay, {"mode": rollout.mode or UNKNOWN})

    def _stored(self, answer: Span | list[Span]) -> None:
        for span in answer if isinstance(answer, list) else [answer]:
            if span.name == RAW_SPAN and _KEYS.STATE.value in span.attributes:
                self._called(span)

    def _called(self, span: Span) -> None:
        labels = {"state": self._bounded(str(span.attributes[_KEYS.STATE.value]))}
        self._tracker.count(CALLS.key, 1.0, labels)
        seconds = span.attributes.get(_KEYS.LATENCY_SECONDS.value)
        if isinstance(seconds, (int, float)):
            self._tracker.observe(CALL_SECONDS.key, float(seconds), labels)
        for kind, (count_key, ids_key) in _TOKEN_KEYS.items():
            ids = span.attributes.get(ids_key)
            count = len(cast("list[int]", ids)) if isinstance(ids, list) else span.attributes.get(count_key)
            if isinstance(count, (int, float)) and count > 0:
                self._tracker.count(TOKENS.key, float(count), {"kind": kind})

    def _bounded(self, word: str) -> str:
        if word not in self._words and len(self._words) >= _MOST_WORDS:
            return OTHER
        self._words.add(word)
        return word


# --- metrics of programs -------------------------------------------------------------------------------------------

MOST_NAMES, MOST_SERIES = 100, 1000
"""Largest number of metrics, and of combinations of tag values of one metric."""
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_.]{0,199}")
_lock = threading.Lock()
_series: dict[str, set[tuple[tuple[str, str], ...]]] = {}
"""Combinations of tags of each metric."""


def observe(name: str, value: float, tags: Mapping[str, str] | None) -> None:
    """Add a value to a histogram, which is created if it does not exist.

    Raises:
        BadRequestError: the name or a tag is invalid, the tag names differ from earlier ones, or there are too many.
    """
    if as_number(value) is None or not math.isfinite(value):
        raise BadRequestError(f"The value of the metric {name!r} is {value!r}; expected a finite number")
    labels = tuple(sorted((str(tag), str(text)) for tag, text in (tags or {}).items()))
    wrong = [word for word in (name, *(tag for tag, _ in labels)) if not _NAME.fullmatch(word)]
    if wrong:
        raise BadRequestError(f"{wrong[0][:200]!r} is not a valid name; expected letters, digits, _ and .")
    with _lock:
        series = _series.get(name, set())
        others = next(([tag for tag, _ in each] for each in series), None)
        if others is not None and others != [tag for tag, _ in labels]:
            raise BadRequestError(f"The metric {name!r} must have the tags {others}; got {[tag for tag, _ in labels]}")
        if (name not in _series and len(_series) >= MOST_NAMES) or (
            labels not in series and len(series) >= MOST_SERIES
        ):
            raise BadRequestError(
                f"Too many metrics or tag values with {name!r}: a store has at most {MOST_NAMES} custom metrics, each "
                f"with {MOST_SERIES} combinations of tag values. Use fewer values for the tags."
            )
        backend = PrometheusMetricsBackend()
        try:
            backend.register_histogram(name, [tag for tag, _ in labels])
        except ValueError as error:
            raise BadRequestError(f"The metric {name!r} cannot be recorded: {error}") from error
        _series.setdefault(name, set()).add(labels)
    backend.observe(name, value, dict(labels))
