"""`agl agentops`: a local endpoint for programs traced with the AgentOps SDK. Their data is written to a store.

The SDK exchanges an API key for a token and sends OTLP. Each trace becomes a rollout.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterable, Iterator
from typing import cast

import typer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentlightning.cli.main import main_of
from agentlightning.cli.output import HOST, LOG_JSON, LOG_LEVEL, PORT, log_to_stderr
from agentlightning.cli.serving import app_with_checks, serve_until_signal
from agentlightning.errors import BadRequestError
from agentlightning.store.base import LightningStore
from agentlightning.store.http.otlp import TRACES_PATH, otlp_routes, store_spans
from agentlightning.store.spec import spec_of, store_from_spec
from agentlightning.utils.http.auth import same_token, server_token
from agentlightning.utils.http.byte_budget import client_hold, read_body
from agentlightning.utils.otlp import Rejections
from agentlightning.utils.otlp.decode import ATTEMPT_ID, ROLLOUT_ID
from agentlightning.utils.otlp.http import answer_export
from agentlightning.utils.server_launcher import PythonServerLauncherArgs

logger = logging.getLogger(__name__)

TOKEN_PATH = "/v3/auth/token"
LOGS_UPLOAD_PATH = "/v4/logs/upload/"
PLACEHOLDER_KEY = "00000000-0000-0000-0000-000000000000"
"""Placeholder API key that the SDK accepts if the server requires none."""

_TOKEN_BODY_BYTES = 64 * 1024
_SPANS_PER_TURN = 128
_MOST_OPEN = 10_000
"""Maximum number of traces without a root span. Above it, the oldest one ends as failed."""
_Ids = tuple[str, str]


def agentops(
    store: str = typer.Option(
        "sqlite:///agl.db", help="Store for the spans: a file, or an address such as postgresql://host/db"
    ),
    host: str = HOST,
    port: int = PORT,
    log_level: str = LOG_LEVEL,
    log_json: bool = LOG_JSON,
) -> None:
    """Receive the data of the AgentOps SDK without the AgentOps service or an account.

    Prints the variables to set for the program. Each trace becomes one rollout, which ends with the trace. Spans
    that name a rollout and an attempt are added to that attempt. If AGL_TOKEN is set, its value is the API key of the
    program. Press Ctrl+C to stop (exit code 0).

    Example: agl agentops --store run.db --port 4749
    """
    log_to_stderr(log_level, json_lines=log_json)
    asyncio.run(serve(spec_of(store), host, port))


async def serve(spec: str, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM. Traces without a root span end as failed."""
    store = store_from_spec(spec)
    traces = Traces(store)
    try:
        app = app_with_checks(agentops_routes(store, traces), host, open_paths=[TOKEN_PATH])
        await serve_until_signal(app, PythonServerLauncherArgs(host=host, port=port), _lines)
        await traces.close()
    finally:
        await store.close()


def _lines(endpoint: str) -> list[str]:
    return [
        f"AGENTOPS_API_ENDPOINT={endpoint}",
        f"AGENTOPS_EXPORTER_ENDPOINT={endpoint}{TRACES_PATH}",
        "AGENTOPS_API_KEY=" + ("the value of AGL_TOKEN" if server_token() else PLACEHOLDER_KEY),
    ]


class Traces:
    """The rollouts of open traces, owned by the event loop of the server."""

    def __init__(self, store: LightningStore) -> None:
        self._store = store
        self._open: dict[bytes, asyncio.Task[_Ids]] = {}

    async def claim(self, request: ExportTraceServiceRequest) -> list[bytes]:
        """Set the trace's rollout ids on each span without ids, and return the traces with a root span."""
        trace_ids: list[bytes] = []
        for number, (is_named, span) in enumerate(_spans_of(request), 1):
            if number % _SPANS_PER_TURN == 0:
                await asyncio.sleep(0)
            if is_named or _name_a_rollout(span.attributes):
                continue
            rollout_id, attempt_id = await self._ids_of(span.trace_id, span.name)
            for key, value in ((ROLLOUT_ID, rollout_id), (ATTEMPT_ID, attempt_id)):
                span.attributes.add(key=key).value.string_value = value
            if not span.parent_span_id:
                trace_ids.append(span.trace_id)
        return trace_ids

    async def end(self, trace_id: bytes) -> None:
        """End the rollout of a trace as succeeded. Later spans of the trace start another rollout."""
        task = self._open.pop(trace_id, None)
        if task is not None:
            await self._store.update_attempt(*await task, status="succeeded")

    async def close(self) -> None:
        """End the traces without a root span as failed."""
        for trace_id in list(self._open):
            await self._give_up(trace_id)

    async def _give_up(self, trace_id: bytes) -> None:
        rollout_id, attempt_id = await self._open.pop(trace_id)
        await self._store.fail_rollout(rollout_id, attempt_id, reason="no_root_span")

    async def _ids_of(self, trace_id: bytes, name: str) -> _Ids:
        if trace_id not in self._open:
            if len(self._open) >= _MOST_OPEN:
                await self._give_up(next(iter(self._open)))
            self._open[trace_id] = asyncio.create_task(self._begin(trace_id, name))
        try:
            return await asyncio.shield(self._open[trace_id])
        except Exception:  # the sender retries, and so does the store
            self._open.pop(trace_id, None)
            raise

    async def _begin(self, trace_id: bytes, name: str) -> _Ids:
        task = {"program": "agl agentops", "trace_id": trace_id.hex()}
        rollout = await self._store.start_rollout(input=task)
        logger.info("trace %s: rollout %s started (first span %r)", trace_id.hex(), rollout.rollout_id, name)
        return rollout.rollout_id, rollout.attempt.attempt_id


def agentops_routes(store: LightningStore, traces: Traces) -> list[Route]:
    """Return the paths that the SDK uses."""

    async def token(request: Request) -> Response:
        expected = server_token()
        with client_hold(request.scope) as hold:  # unauthenticated: the body is small or refused
            body = await read_body(request.scope, request.receive, hold, _TOKEN_BODY_BYTES)
        try:
            content: object = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise BadRequestError(f"The body is not JSON: {error}. Expected an object with api_key") from error
        if not isinstance(content, dict):
            raise BadRequestError(f"The body is a JSON {type(content).__name__}. Expected an object with api_key")
        key = cast("dict[str, object]", content).get("api_key")
        if expected is not None and not same_token(str(key), expected):
            return JSONResponse({"error": "The API key does not match the AGL_TOKEN of this server"}, status_code=401)
        return JSONResponse(
            {"token": expected or PLACEHOLDER_KEY, "project_id": "local", "project_prem_status": "local"}
        )

    async def take(message: ExportTraceServiceRequest, rejections: Rejections) -> ExportTraceServiceResponse:
        trace_ids = await traces.claim(message)
        answer = await store_spans(store, message, rejections)
        for trace_id in trace_ids:
            await traces.end(trace_id)
        return answer

    async def traces_page(request: Request) -> Response:
        return await answer_export(request, ExportTraceServiceRequest, take, "traces")

    async def logs_upload(request: Request) -> Response:
        return JSONResponse({"url": "", "size": 0})  # what a program printed is not kept

    others = [route for route in otlp_routes(lambda: store) if route.path != TRACES_PATH]
    return [
        Route(TOKEN_PATH, token, methods=["POST"]),
        Route(TRACES_PATH, traces_page, methods=["POST"]),
        Route(LOGS_UPLOAD_PATH, logs_upload, methods=["POST"]),
        *others,
    ]


def _spans_of(request: ExportTraceServiceRequest) -> Iterator[tuple[bool, SpanMessage]]:
    """Yield each span, and whether its resource names a rollout."""
    for group in request.resource_spans:
        is_named = _name_a_rollout(group.resource.attributes)
        for group_scope in group.scope_spans:
            for span in group_scope.spans:
                yield is_named, span


def _name_a_rollout(attributes: Iterable[KeyValue]) -> bool:
    return any(attribute.key == ROLLOUT_ID for attribute in attributes)


main = main_of("agentops")

if __name__ == "__main__":
    sys.exit(main())
