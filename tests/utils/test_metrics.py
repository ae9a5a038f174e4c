"""Metrics backends: the rules that all keep, what the terminal shows, what Prometheus reads, and several processes."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from typing_extensions import override

from agentlightning.utils.metrics import (
    ConsoleMetricsBackend,
    MetricsBackend,
    MultiMetricsBackend,
    PrometheusMetricsBackend,
    get_prometheus_registry,
)
from agentlightning.utils.metrics.console import Window, duration
from tests.stubs.processes import run_program

MAKERS: list[Callable[[], MetricsBackend]] = [
    ConsoleMetricsBackend,
    PrometheusMetricsBackend,
    lambda: MultiMetricsBackend([ConsoleMetricsBackend(), PrometheusMetricsBackend()]),
]
every_backend = pytest.mark.parametrize("make", MAKERS, ids=["console", "prometheus", "multi"])


# --- rules -------------------------------------------------------------------------------------------------------


@every_backend
def test_registering_the_same_again_changes_nothing(
    make: Callable[[], MetricsBackend], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    backend = make()
    labels = {"method": uuid.uuid4().hex, "status": "OK"}  # the registry of Prometheus is one for the process
    for _ in range(2):
        backend.register_counter("test.rules.calls", ["method", "status"])
        backend.register_histogram("test.rules.seconds", ["method"], [0.1, 1.0])
        backend.count("test.rules.calls", 1.0, labels)
    if backend.has_prometheus():
        series = f'test_rules_calls_total{{method="{labels["method"]}",status="OK"}} 2.0'
        assert series in generate_latest(get_prometheus_registry()).decode()
    if isinstance(backend, ConsoleMetricsBackend):
        backend.close()
        assert all(line.count("test.rules.calls") == 1 for line in lines(caplog))
        assert len(lines(caplog)) == 2


@every_backend
def test_registering_a_name_otherwise_is_refused(make: Callable[[], MetricsBackend]) -> None:
    backend = make()
    backend.register_counter("test.other.calls", ["method"])
    backend.register_histogram("test.other.seconds", ["method"], [0.1, 1.0])
    with pytest.raises(ValueError, match=r"'test.other.calls' is already registered"):
        backend.register_counter("test.other.calls", ["method", "status"])
    with pytest.raises(ValueError, match="already registered"):
        backend.register_histogram("test.other.calls", ["method"])
    with pytest.raises(ValueError, match="already registered"):
        backend.register_histogram("test.other.seconds", ["method"], [0.2, 1.0])


@every_backend
async def test_what_is_not_registered_or_lacks_a_label_is_refused(make: Callable[[], MetricsBackend]) -> None:
    backend = make()
    backend.register_counter("test.labels.calls", ["x"])
    with pytest.raises(ValueError, match=r"Label 'x' is required for Counter 'test.labels.calls'\."):
        await backend.inc_counter("test.labels.calls")
    with pytest.raises(ValueError, match=r"Counter 'test.labels.calls' has no label 'y'; its labels are \['x'\]"):
        await backend.inc_counter("test.labels.calls", labels={"x": "1", "y": "2"})
    with pytest.raises(ValueError, match=r"Counter 'test.labels.nothing' is not registered; call register_counter"):
        await backend.inc_counter("test.labels.nothing")
    with pytest.raises(ValueError, match=r"Histogram 'test.labels.calls' is not registered \(it is a Counter\)"):
        await backend.observe_histogram("test.labels.calls", 1.0, {"x": "1"})


@every_backend
async def test_a_gauge_is_registered_like_the_others(make: Callable[[], MetricsBackend]) -> None:
    backend = make()
    backend.register_gauge("test.gauge.depth", ["queue"])
    await backend.set_gauge("test.gauge.depth", 3.0, {"queue": "a"})
    backend.show("test.gauge.depth", 2.0, {"queue": "a"})
    with pytest.raises(ValueError, match=r"Label 'queue' is required for Gauge 'test.gauge.depth'\."):
        await backend.set_gauge("test.gauge.depth", 1.0)
    with pytest.raises(ValueError, match=r"is not registered \(it is a Gauge\); call register_counter"):
        await backend.inc_counter("test.gauge.depth", 1.0, {"queue": "a"})
    if backend.has_prometheus():
        assert 'test_gauge_depth{queue="a"} 2.0' in generate_latest(get_prometheus_registry()).decode()


# --- the terminal ------------------------------------------------------------------------------------------------


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.endswith("metrics.console")]


def test_the_first_event_is_logged_at_once_and_the_last_ones_by_a_timer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    logged = threading.Event()
    caplog.handler.addFilter(lambda record: logged.set() or True)
    backend = ConsoleMetricsBackend(log_interval_seconds=0.05)
    backend.register_counter("calls")
    backend.count("calls", 2.0)
    assert len(lines(caplog)) == 1
    assert re.fullmatch(r"calls=40\.00/s", lines(caplog)[0])
    logged.clear()
    backend.count("calls")
    assert logged.wait(10)
    assert lines(caplog)[1].startswith("calls=")


def test_closing_logs_what_was_not_logged_yet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    backend = ConsoleMetricsBackend(log_interval_seconds=3600.0, group_level=1)
    backend.register_counter("b.calls", ["method", "status"])
    backend.register_histogram("a.seconds", ["method"])
    backend.count("b.calls", labels={"method": "get", "status": "OK"})
    for status in ("OK", "OK", "KeyError"):
        backend.count("b.calls", labels={"method": "get", "status": status})
    for milliseconds in range(1, 102):
        backend.observe("a.seconds", milliseconds / 1000, {"method": "put"})
    assert len(lines(caplog)) == 1
    backend.close()
    assert lines(caplog)[1] == "a.seconds{method=put}=51.00ms,96.00ms,100.00ms  b.calls{method=get}=0.00/s"
    backend.close()
    assert len(lines(caplog)) == 2


def test_a_gauge_shows_what_was_said_last_summed_where_labels_are_merged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    backend = ConsoleMetricsBackend(log_interval_seconds=3600.0)
    backend.register_gauge("depth", ["queue"])
    for queue, value in (("a", 9), ("a", 2), ("b", 3)):
        backend.show("depth", value, {"queue": queue})
    backend.close()
    assert lines(caplog) == ["depth=9", "depth=5"]


@pytest.mark.parametrize(
    ("of_backend", "of_metric", "shown"),
    [(None, None, ["m"]), (None, 1, ["m{a=1}", "m{a=2}"]), (2, 1, ["m{a=1,b=1}", "m{a=2,b=2}"]), (0, 2, ["m"])],
)
def test_labels_beyond_the_group_level_are_merged(
    caplog: pytest.LogCaptureFixture, of_backend: int | None, of_metric: int | None, shown: list[str]
) -> None:
    caplog.set_level(logging.INFO)
    backend = ConsoleMetricsBackend(log_interval_seconds=3600.0, group_level=of_backend)
    backend.register_counter("m", ["a", "b"], group_level=of_metric)
    for value in ("1", "2"):
        backend.count("m", labels={"a": value, "b": value})
    backend.close()
    assert [entry.rsplit("=", 1)[0] for entry in lines(caplog)[-1].split("  ")] == shown


def test_a_window_forgets_what_is_old() -> None:
    window = Window(60.0)
    window.add(5.0, now=0.0)
    window.add(1.0, now=50.0)
    assert window.rate(50.0, least=10.0) == pytest.approx(6 / 50)
    window.forget(100.0)
    assert window.rate(100.0, least=10.0) == pytest.approx(1 / 50)
    window.forget(1000.0)
    assert not window


@pytest.mark.parametrize(
    ("values", "percents", "expected"),
    [
        ((4.0, 1.0, 3.0, 2.0), (0, 50, 95, 100), [1.0, 2.5, 3.85, 4.0]),
        ((7.0,), (50, 99), [7.0, 7.0]),
        (range(100_000), (0, 100), [95_904.0, 99_999.0]),  # of many the newest
    ],
)
def test_percentiles_are_those_of_the_values(values: list[float], percents: list[float], expected: list[float]) -> None:
    window = Window(None)
    for value in values:
        window.add(value, now=1e9)
    assert window.percentiles(percents) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.5, "1.50s"), (0.0125, "12.50ms"), (2e-6, "2.00µs"), (3e-9, "3.00ns"), (0.0, "0.00ns")]
)
def test_a_duration_is_told_in_its_own_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_window_of_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="window_seconds must be positive; got 0"):
        ConsoleMetricsBackend(window_seconds=0.0)


# --- Prometheus --------------------------------------------------------------------------------------------------


def scraped() -> str:
    return generate_latest(get_prometheus_registry()).decode()


async def test_prometheus_sees_names_with_underscores() -> None:
    backend = PrometheusMetricsBackend()
    assert backend.has_prometheus()
    backend.register_counter("test.prom.total", ["path"])
    backend.register_histogram("test.prom.latency", ["path"], [0.1, 1.0])
    await backend.inc_counter("test.prom.total", 2.0, {"path": "/a"})
    backend.count("test.prom.total", labels={"path": "/a"})
    await backend.observe_histogram("test.prom.latency", 0.5, {"path": "/a"})
    page = scraped()
    assert 'test_prom_total{path="/a"} 3.0' in page
    assert 'test_prom_latency_bucket{le="0.1",path="/a"} 0.0' in page
    assert 'test_prom_latency_bucket{le="1.0",path="/a"} 1.0' in page
    assert 'test_prom_latency_sum{path="/a"} 0.5' in page


def test_two_backends_of_one_process_count_together() -> None:
    for backend in (PrometheusMetricsBackend(), PrometheusMetricsBackend()):
        backend.register_counter("test.shared.total")
        backend.count("test.shared.total")
    assert "test_shared_total 2.0" in scraped()


def test_two_names_that_prometheus_cannot_tell_apart_are_refused() -> None:
    backend = PrometheusMetricsBackend()
    backend.register_counter("test.same_name")
    with pytest.raises(ValueError, match=r"'test_same.name' and 'test.same_name' are both 'test_same_name'"):
        backend.register_counter("test_same.name")


def run_python(code: str, **environment: str) -> str:
    return run_program("python", "-W", "error", "-c", code, environment=environment).stdout


def test_several_processes_are_scraped_as_one_and_the_directory_goes_with_the_first(tmp_path: Path) -> None:
    code = """
import os, sys
from agentlightning.utils.metrics import *
setup_multiprocess_prometheus()
directory = os.environ["PROMETHEUS_MULTIPROC_DIR"]
backend = PrometheusMetricsBackend()
backend.register_counter("shared.calls")
pids = []
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        backend.count("shared.calls")
        shutdown_metrics()
        sys.exit(0)
    pids.append(pid)
for pid in pids:
    os.waitpid(pid, 0)
    shutdown_metrics(None, type("Worker", (), {"pid": pid}))
backend.count("shared.calls")
from prometheus_client import generate_latest
assert "shared_calls_total 3.0" in generate_latest(get_prometheus_registry()).decode()
assert os.path.isdir(directory)
print(directory)
"""
    directory = run_python(code, TMPDIR=str(tmp_path)).strip()
    assert directory.startswith(str(tmp_path))
    assert not Path(directory).exists()


def test_preparing_several_processes_too_late_is_an_error() -> None:
    code = """
import prometheus_client
from agentlightning.utils.metrics import setup_multiprocess_prometheus
try:
    setup_multiprocess_prometheus()
except RuntimeError as error:
    assert "already imported" in str(error)
else:
    raise AssertionError
"""
    run_python(code)


def test_a_directory_that_somebody_else_named_is_kept_and_warned_of(tmp_path: Path) -> None:
    code = """
import logging, os
logging.basicConfig(format="%(message)s", stream=__import__("sys").stdout)
from agentlightning.utils.metrics import setup_multiprocess_prometheus, shutdown_metrics
setup_multiprocess_prometheus()
shutdown_metrics()
"""
    assert "delete its files between runs" in run_python(code, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    assert tmp_path.exists()


def test_the_module_alone_does_not_import_the_client() -> None:
    run_python("import sys, agentlightning.utils.metrics; assert 'prometheus_client' not in sys.modules")


# --- several, and those of users ---------------------------------------------------------------------------------


class Waiting(MetricsBackend):
    """A user's backend, which has only the public form and waits in it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []

    @override
    def register_counter(self, *args: object, **kwargs: object) -> None: ...

    @override
    def register_histogram(self, *args: object, **kwargs: object) -> None: ...

    @override
    async def inc_counter(self, name: str, amount: float = 1.0, labels: Mapping[str, str] | None = None) -> None:
        await asyncio.sleep(0)
        self.seen.append((name, amount))

    @override
    async def observe_histogram(self, name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        await asyncio.sleep(0)
        self.seen.append((name, value))


def test_several_backends_get_everything() -> None:
    first, second = Waiting(), Waiting()
    backend = MultiMetricsBackend([first, second])
    assert not backend.has_prometheus()
    assert MultiMetricsBackend([first, PrometheusMetricsBackend()]).has_prometheus()
    asyncio.run(backend.inc_counter("calls", 2.0))
    asyncio.run(backend.observe_histogram("seconds", 0.5))
    assert first.seen == second.seen == [("calls", 2.0), ("seconds", 0.5)]
    with pytest.raises(ValueError, match="at least one backend"):
        MultiMetricsBackend([])


async def test_a_backend_that_waits_is_not_waited_for() -> None:
    backend = Waiting()
    backend.count("calls")
    backend.observe("seconds", 0.5)
    assert backend.seen == []
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
    await asyncio.to_thread(backend.count, "from a thread")
    assert backend.seen == [("calls", 1.0), ("seconds", 0.5), ("from a thread", 1.0)]
