"""Counts and durations: the backend interface, and backends for a terminal, for Prometheus, and for several others."""

from __future__ import annotations

from agentlightning.utils.metrics.backend import ImmediateBackend, MetricsBackend, MultiMetricsBackend
from agentlightning.utils.metrics.console import ConsoleMetricsBackend
from agentlightning.utils.metrics.prometheus import (
    PrometheusMetricsBackend,
    get_prometheus_registry,
    setup_multiprocess_prometheus,
    shutdown_metrics,
)

__all__ = [
    "ConsoleMetricsBackend",
    "ImmediateBackend",
    "MetricsBackend",
    "MultiMetricsBackend",
    "PrometheusMetricsBackend",
    "get_prometheus_registry",
    "setup_multiprocess_prometheus",
    "shutdown_metrics",
]
