"""Metrics of a store server: requests by path, method and status, and the Prometheus page.

`docs/reference/settings.md` is generated from `exported_metrics`. A test compares them with the page of a server.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast, get_type_hints

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentlightning.base.field_help import field_docstrings
from agentlightning.errors import BadRequestError, DamagedRecordError
from agentlightning.store import metrics
from agentlightning.store.base import LightningStore, LightningStoreStatistics
from agentlightning.store.metrics import Metric
from agentlightning.types import RolloutStatus, WorkerStatus
from agentlightning.utils.http.auth import ASGIApp, Message, Receive, Scope, Send
from agentlightning.utils.http.dispatch import PathTable
from agentlightning.utils.metrics import MetricsBackend, get_prometheus_registry

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Scraped

logger = logging.getLogger(__name__)
_REQUEST = ("path", "method", "status")
REQUESTS = Metric("agl.http.total", "counter", _REQUEST, "requests to the server; `path` is the route or `other`")
REQUEST_SECONDS = Metric("agl.http.latency", "histogram", _REQUEST, "seconds of a request to the server")
OPEN_ROLLOUTS = Metric("agl_rollouts_open", "gauge", ("status",), "rollouts that are queued or running")
WORKERS = Metric("agl_workers", "gauge", ("status",), "workers that the store knows, by status")
STORE_UP = Metric("agl_store_up", "gauge", (), "1 if the store responds, else 0")
_RUN = {
    Metric(name, "gauge", ("run",), meaning): figures
    for name, figures, meaning in (
        ("agl_run_step", (), "last recorded step of a run"),
        ("agl_run_reward", ("mean_reward", "reward"), "mean reward of the last recorded step of a run"),
        ("agl_run_loss", ("update.loss", "loss"), "loss of the last recorded step of a run"),
        ("agl_run_calls_trained", ("calls_trained",), "model calls used for training in the last step of a run"),
        ("agl_run_calls_excluded", ("calls_excluded",), "model calls excluded from training in the last step of a run"),
    )
}
"""Gauges of a run, each with the names of metrics of a step. The first metric that exists is used."""
MOST_RUNS = 20
"""Largest number of runs on the page, newest first. Each run is a separate label value."""
PROMETHEUS_PATH = "/v1/prometheus"
OPEN_STATUSES: tuple[RolloutStatus, ...] = ("queuing", "requeuing", "preparing", "running")
WORKER_STATUSES: tuple[WorkerStatus, ...] = ("idle", "busy", "unknown")
OTHER = "other"
"""Label of every path without a known template, and of every unusual method."""
_METHODS = frozenset(("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"))
_CLIENT_LEFT, _UNDETERMINED = "499", "520"
_Figures = list[tuple[Metric, str, float]]
"""Gauge, label value, value."""


class HttpMetrics:
    """ASGI middleware that counts and times requests. Mount it as the outermost one, to count rejected requests too.

    `templates` are the served paths, with parameters in braces. The label of a request is the matching template.
    """

    def __init__(self, app: ASGIApp, tracker: MetricsBackend, templates: Iterable[str]) -> None:
        self._app = app
        self._tracker = tracker
        self._template_of = path_templates(templates)
        REQUESTS.register(tracker)
        REQUEST_SECONDS.register(tracker)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = _UNDETERMINED
        start = time.perf_counter()

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        async def note_leaving() -> Message:
            nonlocal status
            message = await receive()
            if message["type"] == "http.disconnect" and status == _UNDETERMINED:
                status = _CLIENT_LEFT
            return message

        try:
            await self._app(scope, note_leaving, note_status)
        except Exception:  # the server answers 500 for any error
            status = "500" if status == _UNDETERMINED else status
            raise
        finally:
            method = scope["method"] if scope["method"] in _METHODS else OTHER
            labels = {"path": self._template_of(scope), "method": method, "status": status}
            self._tracker.count(REQUESTS.key, 1.0, labels)
            self._tracker.observe(REQUEST_SECONDS.key, time.perf_counter() - start, labels)


def path_templates(templates: Iterable[str]) -> Callable[[Scope], str]:
    """Return a function that finds the template of a path. Literal segments take precedence over parameters."""
    table = PathTable((template, "GET", template) for template in templates)

    def template_of(scope: Scope) -> str:
        try:
            methods, _ = table.find(scope, "GET")
        except BadRequestError:
            return OTHER
        return OTHER if methods is None else methods["GET"]

    return template_of


def prometheus_routes(store: Callable[[], LightningStore]) -> list[Route]:
    """Return the routes of the Prometheus page, with and without a slash at the end."""

    async def page(request: Request) -> Response:
        return await prometheus_response(store(), request.headers.get("accept", ""))

    return [Route(path, page, methods=["GET"]) for path in (PROMETHEUS_PATH, PROMETHEUS_PATH + "/")]


async def prometheus_response(store: LightningStore, accept: str = "") -> Response:
    """Return the metrics of this process (of all workers if they share them) and the counts of the store.

    Works without a tracker, too. If the store does not respond, `agl_store_up` is 0.
    """
    from prometheus_client.exposition import choose_encoder

    sizes: Mapping[str, object] = {}
    figures: _Figures = []
    try:
        sizes = await store.statistics()
        for status in OPEN_STATUSES:  # counted, not fetched
            figures.append((OPEN_ROLLOUTS, status, (await store.query_rollouts(status_in=[status], limit=1)).total))
        for status in WORKER_STATUSES:
            figures.append((WORKERS, status, (await store.query_workers(status_in=[status], limit=1)).total))
        figures += await _figures_of_runs(store)
    except Exception:  # the boundary: a scraper must see that the store is down, and the other metrics
        logger.exception("cannot read the statistics of the store for the metrics page")
    encode, content_type = choose_encoder(accept)
    return Response(encode(_Page(sizes, figures)), headers={"content-type": content_type})


async def _figures_of_runs(store: LightningStore) -> _Figures:
    """Return the metrics of the last step of the newest runs; empty for a store that does not support runs."""
    figures: _Figures = []
    try:
        for run in await store.query_runs(sort_by="start_time", sort_order="desc", limit=MOST_RUNS):
            try:
                page = await store.query_run_records(run.run_id, kind_in=["step"], sort_order="desc", limit=1)
            except DamagedRecordError as error:
                logger.info("run %a: metrics page has no values: %s", run.run_id, error)
                continue
            for record in page:
                for gauge, names in _RUN.items():
                    values = [_number(record.data, name) for name in names] if names else [float(record.step)]
                    figures += [(gauge, run.run_id or "-", value) for value in values if value is not None][:1]
    except NotImplementedError:
        return []
    return figures


def _number(data: Mapping[str, Any], name: str) -> float | None:
    """Return a value by its dotted name, or the sum of counts by reason; None if it is not a number."""
    value: object = data
    for part in name.split("."):
        value = cast("Mapping[str, object]", value).get(part) if isinstance(value, Mapping) else None
    if isinstance(value, Mapping):
        counts = cast("Mapping[str, object]", value).values()
        value = sum(count for count in counts if isinstance(count, (int, float)))
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


class _Page:
    """The metrics page: the registry, then the counts of the store at the time of the request."""

    def __init__(self, sizes: Mapping[str, object], figures: _Figures) -> None:
        self._registry = get_prometheus_registry()
        self._sizes = sizes
        self._figures = figures

    def collect(self) -> Iterator[Scraped]:
        from prometheus_client.metrics_core import GaugeMetricFamily

        yield from self._registry.collect()
        yield GaugeMetricFamily(STORE_UP.key, "1 if the store responds", value=float(bool(self._sizes)))
        for key, value in self._sizes.items():
            if isinstance(value, (int, float)):
                yield GaugeMetricFamily(_size_name(key), f"{key} of the store's statistics", value=float(value))
        for gauge in (OPEN_ROLLOUTS, WORKERS, *_RUN):
            family = GaugeMetricFamily(gauge.key, gauge.meaning, labels=gauge.labels)
            for metric, label, number in self._figures:
                if metric is gauge:
                    family.add_metric([label], number)
            yield family


def _size_name(key: str) -> str:
    return "agl_store_" + ("uptime_seconds" if key == "uptime" else key.removeprefix("total_"))


def exported_metrics() -> Iterator[Metric]:
    """Yield every metric. Counters and histograms appear on the page after their first value, gauges always."""
    yield from (metrics.ENDS, metrics.ATTEMPT_ENDS, metrics.CALLS, metrics.TOKENS, metrics.OPERATIONS, REQUESTS)
    yield from (metrics.END_SECONDS, metrics.CLAIM_SECONDS, metrics.CALL_SECONDS, metrics.OPERATION_SECONDS)
    yield from (REQUEST_SECONDS, OPEN_ROLLOUTS, WORKERS, *_RUN, STORE_UP)
    meanings = field_docstrings(LightningStoreStatistics)
    for key, kind in get_type_hints(LightningStoreStatistics).items():
        if kind in (int, float):
            meaning = meanings[key].rstrip(".")
            yield Metric(_size_name(key), "gauge", (), meaning[0].lower() + meaning[1:])
