"""Metrics as log lines: rates and percentiles of the last minute, for a terminal."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from typing_extensions import override

from agentlightning.utils.metrics.backend import Kind, Labels, Metric, RegisteringBackend

logger = logging.getLogger(__name__)
_DEFAULT_BUCKETS = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Buckets of a histogram that is registered without buckets; the percentiles do not use them."""
_SLOTS = 12
"""Parts of a window, each with one sum; the oldest is dropped as a whole."""
_MOST_VALUES = 4096
"""Number of newest values of a window from which its percentiles are computed."""
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


class ConsoleMetricsBackend(RegisteringBackend):
    """Logs all metrics in one line at INFO, at most every `log_interval_seconds`, and the first event immediately.

    A counter shows its rate per second, a histogram its 50th, 95th and 99th percentile, over the last `window_seconds`
    (None: since the start), a gauge its latest value (the sum if labels are merged). The first `group_level` labels are
    kept and the others are merged; None merges all. A value set here overrides that of a metric. A timer logs events
    after the last line; `close` logs them immediately. Memory is limited: only the newest 4096 values are kept.
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
        super().__init__()
        self._window_seconds = window_seconds
        self._interval = log_interval_seconds
        self._group_level = group_level
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
            super()._register(metric)

    @override
    def count(self, name: str, amount: float = 1.0, labels: Labels | None = None) -> None:
        self._add("Counter", name, amount, labels)

    @override
    def observe(self, name: str, value: float, labels: Labels | None = None) -> None:
        self._add("Histogram", name, value, labels)

    def close(self) -> None:
        """Log the pending events and stop the timer."""
        with self._lock:
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            self._log()

    @override
    def show(self, name: str, value: float, labels: Labels | None = None) -> None:
        now = time.monotonic()
        with self._lock:
            self._gauges[name, self._label_values("Gauge", name, labels)] = value
            due = self._is_due(now)
        if due:
            self._log()

    def _add(self, kind: Kind, name: str, value: float, labels: Labels | None) -> None:
        now = time.monotonic()
        with self._lock:
            values = self._label_values(kind, name, labels)
            key = (name, values[: self._level(self._metrics[name])])
            if key not in self._windows:
                self._windows[key] = Window(self._window_seconds)
            self._windows[key].add(value, now)
            due = self._is_due(now)
        if due:
            self._log()

    def _is_due(self, now: float) -> bool:
        """Return True if a line must be logged immediately; otherwise start the timer. The caller holds the lock."""
        remaining = self._logged_at + self._interval - now
        if remaining > 0:
            if self._timer is None:
                self._timer = threading.Timer(remaining, self._log)
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
            title = _title(self._metrics[name], values)
            if self._metrics[name].kind == "Counter":
                entries.append(f"{title}={window.rate(now, self._interval):.2f}/s")
            else:
                entries.append(f"{title}={','.join(duration(value) for value in window.percentiles((50, 95, 99)))}")
        stands: dict[str, float] = {}
        for (name, values), value in self._gauges.items():
            metric = self._metrics[name]
            title = _title(metric, values[: self._level(metric)])
            stands[title] = stands.get(title, 0.0) + value
        entries += [f"{title}={value:g}" for title, value in stands.items()]
        return "  ".join(sorted(entries))


def _title(metric: Metric, values: Sequence[str]) -> str:
    """Return the name of a metric with its kept labels."""
    shown = ",".join(f"{label}={value}" for label, value in zip(metric.label_names, values, strict=False))
    return f"{metric.name}{{{shown}}}" if shown else metric.name


def duration(seconds: float) -> str:
    """Return seconds as text with two decimals, in the largest unit with a value of at least 1."""
    for size, unit in _UNITS:
        if abs(seconds) >= size:
            return f"{seconds / size:.2f}{unit}"
    return f"{seconds / 1e-9:.2f}ns"


class Window:
    """Values of the last `seconds` and up to a twelfth more (None: all). The caller passes the times."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = float("inf") if seconds is None else seconds
        self._sums: deque[tuple[float, float]] = deque()
        """The beginning of each slot, and the sum of its values."""
        self._values: deque[tuple[float, float]] = deque(maxlen=_MOST_VALUES)

    def add(self, value: float, now: float) -> None:
        """Add a value."""
        self.forget(now)
        if self._sums and now - self._sums[-1][0] < self._seconds / _SLOTS:
            start, total = self._sums.pop()
            self._sums.append((start, total + value))
        else:
            self._sums.append((now, value))
        self._values.append((now, value))

    def forget(self, now: float) -> None:
        """Drop values that are too old."""
        for entries in (self._sums, self._values):
            while entries and now - entries[0][0] > self._seconds * (1 + 1 / _SLOTS):
                entries.popleft()

    def __bool__(self) -> bool:
        return bool(self._sums)

    def rate(self, now: float, least: float) -> float:
        """Return the sum per second since the first value, over at least `least` seconds."""
        return sum(total for _, total in self._sums) / max(now - self._sums[0][0], least)

    def percentiles(self, wanted: Sequence[float]) -> list[float]:
        """Return percentiles (0 to 100), with linear interpolation."""
        values = sorted(value for _, value in self._values)
        positions = [percent / 100 * (len(values) - 1) for percent in wanted]
        pairs = [(values[int(at)], values[min(int(at) + 1, len(values) - 1)], at % 1) for at in positions]
        return [low + part * (high - low) for low, high, part in pairs]
