"""Metrics as log lines: rates and percentiles of the last minute, for somebody who watches a terminal."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from typing_extensions import override

from agentlightning.utils.metrics.backend import Kind, Labels, Metric, Registered, RegisteringBackend
from agentlightning.utils.metrics.window import Window

logger = logging.getLogger(__name__)
_DEFAULT_BUCKETS = (0.1, 0.2, 0.5, 1.0, 2.0)
"""A histogram that names no buckets is registered with these; the percentiles do not come from buckets."""
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


class ConsoleMetricsBackend(RegisteringBackend):
    """Logs all metrics in one line at INFO, at most every `log_interval_seconds`, the first event at once.

    A counter shows its rate per second, a histogram its 50th, 95th and 99th percentile, over the last `window_seconds`
    (None: since the start), a gauge what was said last (the sum where labels are merged). Of the labels the first
    `group_level` are kept and the rest is merged; None merges all, and the value given here goes before that of a
    metric. What comes after the last line is logged by a timer; `close` logs it at once. Memory is bounded: of many
    values in a short time a random sample is kept.
    """

    def __init__(
        self,
        window_seconds: float | None = 60.0,
        log_interval_seconds: float = 10.0,
        group_level: int | None = None,
    ) -> None:
        for name, value in (("window_seconds", window_seconds), ("log_interval_seconds", log_interval_seconds)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive; got {value}")
        self._window_seconds = window_seconds
        self._interval = log_interval_seconds
        self._group_level = group_level
        self._registered = Registered()
        self._windows: dict[tuple[str, tuple[str, ...]], Window] = {}
        self._gauges: dict[tuple[str, tuple[str, ...]], float] = {}
        self._lock = threading.Lock()
        self._logged_at = float("-inf")
        self._timer: threading.Timer | None = None

    @override
    def _register(self, metric: Metric) -> None:
        if metric.kind == "Histogram" and metric.buckets is None:
            metric = replace(metric, buckets=_DEFAULT_BUCKETS)
        with self._lock:
            self._registered.add(metric)

    @override
    def count(self, name: str, amount: float = 1.0, labels: Labels | None = None) -> None:
        self._add("Counter", name, amount, labels)

    @override
    def observe(self, name: str, value: float, labels: Labels | None = None) -> None:
        self._add("Histogram", name, value, labels)

    def close(self) -> None:
        """Log what was not logged yet and stop the timer."""
        with self._lock:
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            self._log()

    @override
    def show(self, name: str, value: float, labels: Labels | None = None) -> None:
        now = time.monotonic()
        with self._lock:
            self._gauges[name, self._registered.values("Gauge", name, labels)] = value
            due = self._is_due(now)
        if due:
            self._log()

    def _add(self, kind: Kind, name: str, value: float, labels: Labels | None) -> None:
        now = time.monotonic()
        with self._lock:
            values = self._registered.values(kind, name, labels)
            key = (name, values[: self._level(self._registered[name])])
            if key not in self._windows:
                self._windows[key] = Window(self._window_seconds)
            self._windows[key].add(value, now)
            due = self._is_due(now)
        if due:
            self._log()

    def _is_due(self, now: float) -> bool:
        """True if a line is to be logged at once; else the timer sees to it. Under the lock."""
        left = self._logged_at + self._interval - now
        if left > 0:
            if self._timer is None:
                self._timer = threading.Timer(left, self._log)
                self._timer.daemon = True
                self._timer.start()
            return False
        self._logged_at = now
        return True

    def _level(self, metric: Metric) -> int:
        level = self._group_level if self._group_level is not None else metric.group_level
        return max(0, level or 0)

    def _log(self) -> None:
        now = time.monotonic()
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._logged_at = now
            line = self._line(now)
        if line:
            logger.info("%s", line)

    def _line(self, now: float) -> str:
        entries: list[str] = []
        for (name, values), window in list(self._windows.items()):
            window.forget(now)
            if not window:
                del self._windows[name, values]
                continue
            title = _title(self._registered[name], values)
            if self._registered[name].kind == "Counter":
                entries.append(f"{title}={window.rate(now, self._interval):.2f}/s")
            else:
                entries.append(f"{title}={','.join(duration(value) for value in window.percentiles((50, 95, 99)))}")
        stands: dict[str, float] = {}
        for (name, values), value in self._gauges.items():
            metric = self._registered[name]
            title = _title(metric, values[: self._level(metric)])
            stands[title] = stands.get(title, 0.0) + value
        entries += [f"{title}={value:g}" for title, value in stands.items()]
        return "  ".join(sorted(entries))


def _title(metric: Metric, values: Sequence[str]) -> str:
    """Return the name of a metric with the labels that are kept."""
    shown = ",".join(f"{label}={value}" for label, value in zip(metric.label_names, values, strict=False))
    return f"{metric.name}{{{shown}}}" if shown else metric.name


def duration(seconds: float) -> str:
    """Return seconds as text with two decimals in the largest unit that leaves a whole one."""
    for size, unit in _UNITS:
        if abs(seconds) >= size:
            return f"{seconds / size:.2f}{unit}"
    return f"{seconds / 1e-9:.2f}ns"
