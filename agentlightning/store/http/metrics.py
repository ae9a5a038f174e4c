"""Metrics of a store server: its requests by path, method and status, and the page that Prometheus reads."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentlightning.store.base import LightningStore
from agentlightning.store.http import run_metrics
from agentlightning.store.metrics import SECONDS_BUCKETS
from agentlightning.types import RolloutStatus, WorkerStatus
from agentlightning.utils.http.auth import ASGIApp, Message, Receive, Scope, Send
from agentlightning.utils.metrics import MetricsBackend, get_prometheus_registry

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

logger = logging.getLogger(__name__)
REQUESTS, REQUEST_SECONDS = "agl.http.total", "agl.http.latency"
REQUEST_LABELS = ("path", "method", "status")
PROMETHEUS_PATH = "/v1/prometheus"
OPEN_ROLLOUTS, WORKERS, STORE_UP = "agl_rollouts_open", "agl_workers", "agl_store_up"
OPEN_STATUSES: tuple[RolloutStatus, ...] = ("queuing", "requeuing", "preparing", "running")
WORKER_STATUSES: tuple[WorkerStatus, ...] = ("idle", "busy", "unknown")
OTHER = "other"
"""The label of every path that is not served under a known template, and of every unusual method."""
_METHODS = frozenset(("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"))
_CLIENT_LEFT, _UNDETERMINED = "499", "520"


class HttpMetrics:
    """ASGI middleware that counts and times requests; mount it outermost, so that refused ones are counted too.

    `templates` are the paths that are served, parameters in braces: a request is labelled with the one that it fits.
    """

    def __init__(self, app: ASGIApp, tracker: MetricsBackend, templates: Iterable[str]) -> None:
        self._app = app
        self._tracker = tracker
        self._template_of = path_templates(templates)
        tracker.register_counter(REQUESTS, REQUEST_LABELS)
        tracker.register_histogram(REQUEST_SECONDS, REQUEST_LABELS, SECONDS_BUCKETS)

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
        except Exception:  # whatever it is, the server answers 500 for it
            status = "500" if status == _UNDETERMINED else status
            raise
        finally:
            method = scope["method"] if scope["method"] in _METHODS else OTHER
            labels = {"path": self._template_of(scope), "method": method, "status": status}
            self._tracker.count(REQUESTS, 1.0, labels)
            self._tracker.observe(REQUEST_SECONDS, time.perf_counter() - start, labels)


def path_templates(templates: Iterable[str]) -> Callable[[Scope], str]:
    """Return a function that finds the template of a request's path; literal segments win over parameters."""
    served = dict.fromkeys(templates)
    literal = {template for template in served if "{" not in template}
    patterns: dict[int, list[tuple[str, list[str]]]] = {}
    for template in served:
        if template not in literal:
            segments = template.split("/")
            patterns.setdefault(len(segments), []).append((template, segments))
    for found in patterns.values():
        found.sort(key=lambda pattern: [segment.startswith("{") for segment in pattern[1]])

    def template_of(scope: Scope) -> str:
        path: str = scope["path"]
        if path in literal:
            return path
        raw: bytes = (scope.get("raw_path") or path.encode()).split(b"?", 1)[0]
        parts = [unquote_to_bytes(part).decode("utf-8", "replace") for part in raw.split(b"/")]
        for template, segments in patterns.get(len(parts), ()):
            if all(s.startswith("{") or s == part for s, part in zip(segments, parts, strict=True)):
                return template
        return OTHER

    return template_of


def prometheus_routes(store: Callable[[], LightningStore]) -> list[Route]:
    """Return the page that Prometheus reads, with and without a slash at the end."""

    async def page(request: Request) -> Response:
        return await prometheus_response(store(), request.headers.get("accept", ""))

    return [Route(path, page, methods=["GET"]) for path in (PROMETHEUS_PATH, PROMETHEUS_PATH + "/")]


async def prometheus_response(store: LightningStore, accept: str = "") -> Response:
    """Return the metrics of this process (of all workers where they share them) and the sizes of the store.

    It answers without a tracker too. A store that cannot tell its sizes is `agl_store_up 0`.
    """
    from prometheus_client.exposition import choose_encoder

    sizes: Mapping[str, object] = {}
    numbers: dict[tuple[str, str], int] = {}
    figures: list[tuple[str, str, float]] = []
    try:
        sizes = await store.statistics()
        rollouts = {(OPEN_ROLLOUTS, s): await store.query_rollouts(status_in=[s], limit=1) for s in OPEN_STATUSES}
        workers = {(WORKERS, s): await store.query_workers(status_in=[s], limit=1) for s in WORKER_STATUSES}
        numbers = {key: page.total for key, page in (*rollouts.items(), *workers.items())}  # counted, not fetched
        figures = await run_metrics.figures_of_runs(store)
    except Exception:  # the boundary: who watches the store must see that it is down, and the rest
        logger.exception("the store could not tell its sizes")
    encode, content_type = choose_encoder(accept)
    return Response(encode(_Page(sizes, numbers, figures)), headers={"content-type": content_type})


def size_name(key: str) -> str:
    """Return the name of the gauge that shows one of the store's statistics."""
    return "agl_store_" + ("uptime_seconds" if key == "uptime" else key.removeprefix("total_"))


class _Page:
    """What is scraped: the registry, then the sizes of the store as they were when the page was asked for."""

    def __init__(
        self,
        sizes: Mapping[str, object],
        numbers: Mapping[tuple[str, str], int],
        figures: list[tuple[str, str, float]],
    ) -> None:
        self._registry = get_prometheus_registry()
        self._sizes = sizes
        self._numbers = numbers
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import GaugeMetricFamily

        yield from self._registry.collect()
        yield GaugeMetricFamily(STORE_UP, "1 if the store answers", value=float(bool(self._sizes)))
        for key, value in self._sizes.items():
            if isinstance(value, (int, float)):
                yield GaugeMetricFamily(size_name(key), f"{key} of the store's statistics", value=float(value))
        for gauge, text in ((OPEN_ROLLOUTS, "rollouts that have not ended"), (WORKERS, "workers that were heard of")):
            family = GaugeMetricFamily(gauge, text, labels=["status"])
            for (name, status), number in self._numbers.items():
                if name == gauge:
                    family.add_metric([status], number)
            yield family
        yield from run_metrics.collect(self._figures)
