"""Metrics for Prometheus: the backend, and the registry to scrape, of one or several processes."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import override

from agentlightning.utils.metrics.backend import Kind, Labels, Metric, RegisteringBackend

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = logging.getLogger(__name__)
MULTIPROCESS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_collectors: dict[str, tuple[Metric, Any]] = {}
"""The collectors of this process in the global registry, by Prometheus name. Backends share equal ones."""
_collectors_lock = threading.Lock()
_own_directory: str | None = None


class PrometheusMetricsBackend(RegisteringBackend):
    """Counts in the global registry of `prometheus_client`; the dots of a name become underscores.

    Raises:
        ImportError: `prometheus_client` is not installed.
    """

    def __init__(self) -> None:
        import prometheus_client

        super().__init__()
        self._client = prometheus_client
        self._adders: dict[tuple[str, ...], Callable[[float], None]] = {}

    @override
    def has_prometheus(self) -> bool:
        return True

    @override
    def _register(self, metric: Metric) -> None:
        metric = replace(metric, group_level=None)  # nothing is grouped here
        exposed = prometheus_name(metric.name)
        with _collectors_lock:
            existing = _collectors.get(exposed)
            if existing is None:
                named = (exposed, metric.name, metric.label_names)
                if metric.kind == "Counter":
                    collector = self._client.Counter(*named)
                elif metric.kind == "Gauge":
                    collector = self._client.Gauge(*named, multiprocess_mode="livemostrecent")
                elif metric.buckets is None:
                    collector = self._client.Histogram(*named)
                else:
                    collector = self._client.Histogram(*named, buckets=metric.buckets)
                _collectors[exposed] = (metric, collector)
            elif existing[0].name != metric.name:
                raise ValueError(
                    f"{metric.name!r} and {existing[0].name!r} are both {exposed!r} in Prometheus; rename one of them"
                )
            elif existing[0] != metric:
                raise ValueError(f"{metric.name!r} is already registered as {existing[0]}; got {metric}")
            super()._register(metric)

    @override
    def count(self, name: str, amount: float = 1.0, labels: Labels | None = None) -> None:
        self._adder("Counter", name, labels)(amount)

    @override
    def observe(self, name: str, value: float, labels: Labels | None = None) -> None:
        self._adder("Histogram", name, labels)(value)

    def _adder(self, kind: Kind, name: str, labels: Labels | None) -> Callable[[float], None]:
        values = self._label_values(kind, name, labels)
        adder = self._adders.get((name, *values))
        if adder is None:
            child = self._child(name, values)
            adder = self._adders[(name, *values)] = child.inc if kind == "Counter" else child.observe
        return adder

    @override
    def show(self, name: str, value: float, labels: Labels | None = None) -> None:
        self._child(name, self._label_values("Gauge", name, labels)).set(value)

    def _child(self, name: str, values: tuple[str, ...]) -> Any:
        _, collector = _collectors[prometheus_name(name)]
        return collector.labels(*values) if values else collector


def prometheus_name(name: str) -> str:
    """Return the name of a metric in Prometheus."""
    return name.replace(".", "_")


def setup_multiprocess_prometheus() -> None:
    """Prepare metrics that several processes share: a directory, named by `PROMETHEUS_MULTIPROC_DIR`.

    A directory created here is removed when this process ends. Call this function before `prometheus_client` is
    imported.

    Raises:
        RuntimeError: `prometheus_client` is already imported, so that it would not read the variable.
    """
    global _own_directory
    named = os.environ.get(MULTIPROCESS_VARIABLE)
    if named:
        logger.warning(
            "%s=%s: delete its files between runs; otherwise earlier counts remain", MULTIPROCESS_VARIABLE, named
        )
        return
    if "prometheus_client" in sys.modules:
        raise RuntimeError(
            f"prometheus_client is already imported, so it does not read {MULTIPROCESS_VARIABLE}. "
            "Call setup_multiprocess_prometheus() at the start of the program"
        )
    _own_directory = os.environ[MULTIPROCESS_VARIABLE] = tempfile.mkdtemp(prefix="agl-prometheus-")
    atexit.register(_remove, _own_directory, os.getpid())


def _remove(directory: str, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        shutil.rmtree(directory, ignore_errors=True)


def get_prometheus_registry() -> CollectorRegistry:
    """Return the registry to scrape: the sum over all processes if they share metrics, else this process's registry."""
    import prometheus_client
    from prometheus_client import multiprocess

    if not os.environ.get(MULTIPROCESS_VARIABLE):
        return prometheus_client.REGISTRY
    registry = prometheus_client.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return registry


def shutdown_metrics(server: object = None, worker: object = None, *args: object, **kwargs: object) -> None:
    """Mark a worker process (by default this one) as ended, if `setup_multiprocess_prometheus` made the directory.

    The arguments are those of gunicorn's `child_exit`: `server`, which is not used, and `worker`.
    """
    if _own_directory is None or os.environ.get(MULTIPROCESS_VARIABLE) != _own_directory:
        return
    from prometheus_client import multiprocess

    cast(Any, multiprocess).mark_process_dead(getattr(worker, "pid", None) or os.getpid())
