"""The interface of a metrics backend, the rules of all backends, and a backend that forwards to several.

Names are logical (`agl.store.total`). A metric is registered once, with its labels, before it is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

Kind = Literal["Counter", "Histogram", "Gauge"]
Labels = Mapping[str, str]


class MetricsBackend:
    """A receiver of counts and durations.

    `inc_counter`, `observe_histogram` and `set_gauge` are the public API. Hot paths call `count`, `observe` and
    `show`, which do not wait; in a backend that has only the public API, they create tasks. All may be called from any
    thread.

    `labels` maps each of the `label_names` to its value; `amount` and `value` are numbers, durations in seconds.
    """

    def has_prometheus(self) -> bool:
        """Return True if Prometheus can scrape the metrics from this process."""
        return False

    def register_counter(
        self, name: str, label_names: Sequence[str] | None = None, group_level: int | None = None
    ) -> None:
        """Register a counter. `group_level` is the number of labels that a grouping backend keeps.

        Raises:
            ValueError: the name is registered differently.
        """
        raise NotImplementedError

    def register_histogram(
        self,
        name: str,
        label_names: Sequence[str] | None = None,
        buckets: Sequence[float] | None = None,
        group_level: int | None = None,
    ) -> None:
        """Register a histogram; `buckets` are upper bounds.

        Raises:
            ValueError: the name is registered differently.
        """
        raise NotImplementedError

    def register_gauge(self, name: str, label_names: Sequence[str] | None = None) -> None:
        """Register a gauge, a number that can increase and decrease.

        Raises:
            ValueError: the name is registered differently.
        """
        raise NotImplementedError(f"{type(self).__name__} has no gauges")

    async def set_gauge(self, name: str, value: float, labels: Labels | None = None) -> None:
        """Set the value of a gauge.

        Raises:
            ValueError: it is not registered, or the labels are not those it was registered with.
        """
        raise NotImplementedError(f"{type(self).__name__} has no gauges")

    async def inc_counter(self, name: str, amount: float = 1.0, labels: Labels | None = None) -> None:
        """Add to a counter.

        Raises:
            ValueError: it is not registered, or the labels are not those it was registered with.
        """
        raise NotImplementedError

    async def observe_histogram(self, name: str, value: float, labels: Labels | None = None) -> None:
        """Add a value to a histogram.

        Raises:
            ValueError: it is not registered, or the labels are not those it was registered with.
        """
        raise NotImplementedError

    def count(self, name: str, amount: float = 1.0, labels: Labels | None = None) -> None:
        """Add to a counter without waiting."""
        _run(self.inc_counter(name, amount, labels))

    def observe(self, name: str, value: float, labels: Labels | None = None) -> None:
        """Add a value to a histogram without waiting."""
        _run(self.observe_histogram(name, value, labels))

    def show(self, name: str, value: float, labels: Labels | None = None) -> None:
        """Set the value of a gauge without waiting."""
        _run(self.set_gauge(name, value, labels))


_tasks: set[asyncio.Task[None]] = set()


def _run(work: Coroutine[object, object, None]) -> None:
    """Run a coroutine as a task of the running loop; without a running loop, run it to its end."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(work)
        return
    task = loop.create_task(work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


class ImmediateBackend(MetricsBackend):
    """A backend that never waits: it implements `count`, `observe` and `show`, and the public API calls them."""

    @override
    def show(self, name: str, value: float, labels: Labels | None = None) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no gauges")

    @override
    async def set_gauge(self, name: str, value: float, labels: Labels | None = None) -> None:
        self.show(name, value, labels)

    @override
    async def inc_counter(self, name: str, amount: float = 1.0, labels: Labels | None = None) -> None:
        self.count(name, amount, labels)

    @override
    async def observe_histogram(self, name: str, value: float, labels: Labels | None = None) -> None:
        self.observe(name, value, labels)


@dataclass(frozen=True, slots=True)
class Metric:
    """A registered metric."""

    kind: Kind
    name: str
    label_names: tuple[str, ...] = ()
    buckets: tuple[float, ...] | None = None
    group_level: int | None = None


class RegisteringBackend(ImmediateBackend):
    """A backend that stores the registered metrics: `_register` gets each one."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    @override
    def register_counter(
        self, name: str, label_names: Sequence[str] | None = None, group_level: int | None = None
    ) -> None:
        self._register(Metric("Counter", name, tuple(label_names or ()), None, group_level))

    @override
    def register_histogram(
        self,
        name: str,
        label_names: Sequence[str] | None = None,
        buckets: Sequence[float] | None = None,
        group_level: int | None = None,
    ) -> None:
        bounds = None if buckets is None else tuple(buckets)
        self._register(Metric("Histogram", name, tuple(label_names or ()), bounds, group_level))

    @override
    def register_gauge(self, name: str, label_names: Sequence[str] | None = None) -> None:
        self._register(Metric("Gauge", name, tuple(label_names or ())))

    def _register(self, metric: Metric) -> None:
        """Register a metric; does nothing if an equal one is registered.

        Raises:
            ValueError: the name is registered differently.
        """
        existing = self._metrics.setdefault(metric.name, metric)
        if existing != metric:
            raise ValueError(f"{metric.name!r} is already registered as {existing}; got {metric}")

    def _label_values(self, kind: Kind, name: str, labels: Labels | None) -> tuple[str, ...]:
        """Return the label values in the order of registration.

        Raises:
            ValueError: the metric is not registered, or a label is missing or unknown.
        """
        metric = self._metrics.get(name)
        if metric is None or metric.kind != kind:
            hint = "" if metric is None else f" (it is a {metric.kind})"
            raise ValueError(f"{kind} '{name}' is not registered{hint}; call register_{kind.lower()} first")
        values_by_label = labels or {}
        try:
            values = tuple([values_by_label[label] for label in metric.label_names])
        except KeyError as error:
            raise ValueError(f"Label '{error.args[0]}' is required for {kind} '{name}'.") from None
        if len(values_by_label) != len(values):
            extra = sorted(set(values_by_label) - set(metric.label_names))
            raise ValueError(f"{kind} '{name}' has no label {extra[0]!r}; its labels are {list(metric.label_names)}")
        return values


class MultiMetricsBackend(RegisteringBackend):
    """Forwards all metrics to several backends, in order.

    Raises:
        ValueError: the list of backends is empty.
    """

    def __init__(self, backends: Sequence[MetricsBackend]) -> None:
        super().__init__()
        if not backends:
            raise ValueError("MultiMetricsBackend needs at least one backend; got an empty list")
        self._backends = tuple(backends)

    @override
    def has_prometheus(self) -> bool:
        return any(backend.has_prometheus() for backend in self._backends)

    @override
    def _register(self, metric: Metric) -> None:
        for backend in self._backends:
            if metric.kind == "Counter":
                backend.register_counter(metric.name, metric.label_names, metric.group_level)
            elif metric.kind == "Histogram":
                backend.register_histogram(metric.name, metric.label_names, metric.buckets, metric.group_level)
            else:
                backend.register_gauge(metric.name, metric.label_names)

    @override
    def count(self, name: str, amount: float = 1.0, labels: Labels | None = None) -> None:
        for backend in self._backends:
            backend.count(name, amount, labels)

    @override
    def observe(self, name: str, value: float, labels: Labels | None = None) -> None:
        for backend in self._backends:
            backend.observe(name, value, labels)

    @override
    def show(self, name: str, value: float, labels: Labels | None = None) -> None:
        for backend in self._backends:
            backend.show(name, value, labels)

    @override
    async def inc_counter(self, name: str, amount: float = 1.0, labels: Labels | None = None) -> None:
        for backend in self._backends:
            await backend.inc_counter(name, amount, labels)

    @override
    async def observe_histogram(self, name: str, value: float, labels: Labels | None = None) -> None:
        for backend in self._backends:
            await backend.observe_histogram(name, value, labels)

    @override
    async def set_gauge(self, name: str, value: float, labels: Labels | None = None) -> None:
        for backend in self._backends:
            await backend.set_gauge(name, value, labels)
