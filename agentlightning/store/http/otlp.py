"""OTLP endpoints over any store: traces become spans of attempts; metrics and logs are accepted but not stored."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentlightning.errors import NotFoundError
from agentlightning.store.base import LightningStore
from agentlightning.types import Span
from agentlightning.utils.otlp import Rejections, UnreadSpan, unread_steps_of
from agentlightning.utils.otlp.http import answer_export, handle_otlp_export

TRACES_PATH, METRICS_PATH, LOGS_PATH = "/v1/traces", "/v1/metrics", "/v1/logs"
_Add = Callable[[Sequence[Any]], Awaitable[object]]
_INLINE_BYTES = 1024 * 1024
"""Body size in bytes above which the spans are converted in a thread, so that the event loop is not blocked."""


def otlp_routes(store: Callable[[], LightningStore]) -> list[Route]:
    """Return the endpoints of the three signals. `store` is called once per request.

    `POST /v1/traces` stores spans. Spans that cannot be stored are reported in the partial success, and the others are
    stored. A repeated request stores nothing twice. `POST /v1/metrics` and `/v1/logs` return an empty success for a
    valid body and store nothing, so that programs can export all three signals to this server.
    """

    async def traces(request: Request) -> Response:
        async def take(message: ExportTraceServiceRequest, rejections: Rejections) -> ExportTraceServiceResponse:
            return await store_spans(store(), message, rejections)

        return await answer_export(request, ExportTraceServiceRequest, take, "traces")

    routes = [Route(TRACES_PATH, traces, methods=["POST"])]
    for path, signal, request_cls, response_cls in (
        (METRICS_PATH, "metrics", ExportMetricsServiceRequest, ExportMetricsServiceResponse),
        (LOGS_PATH, "logs", ExportLogsServiceRequest, ExportLogsServiceResponse),
    ):
        kinds = {"request_cls": request_cls, "response_cls": response_cls, "callback": None, "signal_name": signal}
        routes.append(Route(path, partial(handle_otlp_export, **kinds), methods=["POST"]))
    return routes


async def store_spans(
    store: LightningStore, message: ExportTraceServiceRequest, rejections: Rejections
) -> ExportTraceServiceResponse:
    """Store the spans of a request in steps, and return the response, which reports the rejected spans.

    Spans that the store rejects are added to `rejections`; the others are stored.

    Raises:
        BusyError, StoreUnreachableError: the request can be retried.
    """
    # a store of ours in memory keeps spans as they came, until somebody asks for them
    keep: _Add | None = getattr(store, "add_unread_spans", None)
    add = keep or store.add_many_spans
    steps = unread_steps_of(message, rejections, read_all=keep is None)
    in_thread = message.ByteSize() > _INLINE_BYTES  # one span may hold all of it
    while True:
        step = await asyncio.to_thread(next, steps, None) if in_thread else next(steps, None)
        if step is None:
            break
        if step:
            await _store(add, step, rejections)
        await asyncio.sleep(0)
    if not rejections.spans:
        return ExportTraceServiceResponse()
    partial = ExportTracePartialSuccess(rejected_spans=rejections.spans, error_message=rejections.message)
    return ExportTraceServiceResponse(partial_success=partial)


async def _store(
    add: Callable[[Sequence[Any]], Awaitable[object]], spans: Sequence[Span | UnreadSpan], rejections: Rejections
) -> None:
    """Store all spans in one call. If that fails, store them by attempt, then one by one, and reject failing ones."""
    try:
        await add(spans)
    except ValueError as error:
        attempts: dict[tuple[str, str], list[Span | UnreadSpan]] = {}
        for span in spans:
            attempts.setdefault((span.rollout_id, span.attempt_id), []).append(span)
        if len(attempts) > 1:
            for part in attempts.values():
                await _store(add, part, rejections)
        elif len(spans) == 1 or isinstance(error, NotFoundError):
            rejections.add(str(error), len(spans))
        else:
            for span in spans:
                await _store(add, [span], rejections)
