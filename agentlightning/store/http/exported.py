"""Every metric that a server with `--tracker prometheus` shows: name, kind, labels and meaning.

`docs/reference/settings.md` is made of them, and a test compares them with the page of a server that was used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_type_hints

from agentlightning.field_help import field_docstrings
from agentlightning.store import metrics as store
from agentlightning.store.base import LightningStoreStatistics
from agentlightning.store.http import metrics as http
from agentlightning.store.http.run_metrics import GAUGES
from agentlightning.utils.metrics.prometheus import prometheus_name


@dataclass(frozen=True)
class ExportedMetric:
    """One metric as a scraper sees it. Histograms are in seconds."""

    name: str
    """As Prometheus writes it; a histogram adds `_bucket`, `_count` and `_sum` to it."""
    kind: Literal["counter", "gauge", "histogram"]
    """What it is."""
    labels: tuple[str, ...]
    """Its labels."""
    meaning: str
    """One line."""


_COUNTED: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (store.ENDS, store.END_LABELS, "rollouts that ended"),
    (
        store.ATTEMPT_ENDS,
        store.ATTEMPT_LABELS,
        "attempts that ended: faults by kind; `lease_expired` is a lost worker, `runner_died` one that was seen to die",
    ),
    (store.CALLS, store.CALL_LABELS, "model calls through the gateway, by how they ended"),
    (store.TOKENS, store.TOKEN_LABELS, "tokens of these calls: `prompt`, `completion`"),
    (
        store.OPERATIONS,
        store.OPERATION_LABELS,
        "operations of the store; `store_pubmeth` is the one that was called from outside, `status` is `OK` or an "
        "error class",
    ),
    (http.REQUESTS, http.REQUEST_LABELS, "requests to the server; `path` is the route, or `other`"),
)
_TIMED: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (store.END_SECONDS, store.END_LABELS, "seconds from the queue to the end of a rollout"),
    (
        store.CLAIM_SECONDS,
        store.CLAIM_LABELS,
        "seconds from the moment at which a rollout may be claimed to its first claim",
    ),
    (store.CALL_SECONDS, store.CALL_LABELS, "seconds of a model call through the gateway"),
    (store.OPERATION_SECONDS, store.OPERATION_LABELS, "seconds of an operation of the store, waiting included"),
    (http.REQUEST_SECONDS, http.REQUEST_LABELS, "seconds of a request to the server"),
)


def exported_metrics() -> Iterator[ExportedMetric]:
    """Yield every metric. Counters and histograms are there once something was counted, gauges always."""
    for name, labels, meaning in _COUNTED:
        yield ExportedMetric(prometheus_name(name), "counter", labels, meaning)
    for name, labels, meaning in _TIMED:
        yield ExportedMetric(prometheus_name(name), "histogram", labels, meaning)
    yield ExportedMetric(http.OPEN_ROLLOUTS, "gauge", ("status",), "rollouts that wait in the queue or are in hand")
    yield ExportedMetric(http.WORKERS, "gauge", ("status",), "workers that were heard of")
    for name, (_, meaning) in GAUGES.items():
        yield ExportedMetric(name, "gauge", ("run",), meaning)
    yield ExportedMetric(http.STORE_UP, "gauge", (), "1 if the store answers, else 0")
    meanings = field_docstrings(LightningStoreStatistics)
    for key, kind in get_type_hints(LightningStoreStatistics).items():
        if kind in (int, float):
            meaning = meanings[key].rstrip(".")
            yield ExportedMetric(http.size_name(key), "gauge", (), meaning[0].lower() + meaning[1:])
