"""The ASGI app of a store server with its middleware, from the outermost layer to the innermost:

HostDoor       checks the Host header
NamedOrigins   lets pages of the allowed origins read responses
BearerAuth     checks the token
JsonDispatch   the operations of `operations.py`, which are most of the requests
Starlette      all other paths: events, OTLP, metrics, health, the OpenAPI document, and the mounted parts
               (`mounts.py`), such as the dashboard
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentlightning.errors import AgentLightningError
from agentlightning.store.base import LightningStore
from agentlightning.store.http.endpoints import operation_endpoints
from agentlightning.store.http.event_stream import EVENTS_PATH, EventStreams
from agentlightning.store.http.metrics import prometheus_routes
from agentlightning.store.http.mounts import mounts_of
from agentlightning.store.http.openapi import HEALTH_PATHS, OPENAPI_PATH, openapi_document
from agentlightning.store.http.operations import PREFIX
from agentlightning.store.http.otlp import otlp_routes
from agentlightning.utils.http.allowed_hosts import AllowedHosts, HostDoor, NamedOrigins
from agentlightning.utils.http.auth import ASGIApp, BearerAuth, Receive, Scope, Send
from agentlightning.utils.http.dispatch import JsonDispatch
from agentlightning.utils.http.errors import ErrorReply, describe_error, failure, refusal
from agentlightning.utils.version import VERSION

logger = logging.getLogger(__name__)


class StoreApp:
    """Serve the store that `store` returns. `store` is called once per request.

    Without a token, every request with an allowed Host header is accepted, except writes from pages of an origin that
    is not in `origins`.
    """

    def __init__(
        self, store: Callable[[], LightningStore], *, token: str | None, hosts: AllowedHosts, origins: Sequence[str]
    ) -> None:
        mounts = mounts_of(store)
        self._open = [mount.is_open for mount in mounts]
        routes = [
            Route(EVENTS_PATH, EventStreams(store), methods=["GET"]),
            *otlp_routes(store),
            *prometheus_routes(store),
            *(Route(path, _health, methods=["GET"]) for path in HEALTH_PATHS),
            Route(OPENAPI_PATH, _openapi, methods=["GET"]),
            *(route for mount in mounts for route in mount.routes),
        ]
        self.others = Starlette(routes=routes, exception_handlers=_EXCEPTION_HANDLERS)
        self.others.router.redirect_slashes = False
        self.dispatch = JsonDispatch(operation_endpoints(store), self.others)
        app: ASGIApp = self.dispatch if token is None else BearerAuth(self.dispatch, token, self._is_open)
        if origins:
            app = NamedOrigins(app, origins)
        self._door = HostDoor(app, hosts, same_origin=token is None, origins=origins)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return self._door(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        path = scope["path"]
        return path in HEALTH_PATHS or any(is_open(path) for is_open in self._open)

    def paths(self) -> list[str]:
        """Return every served path, with parameters in braces."""
        others = [route.path for route in self.others.routes if isinstance(route, Route)]
        return [*(endpoint.path for endpoint in self.dispatch.endpoints), *others]


# --- everything else -----------------------------------------------------------------------------------------------


async def _on_error(request: HttpRequest, error: Exception) -> Response:
    """Return the response for an error of this package."""
    return _response(describe_error(error, f"{request.method} {request.url.path[:200]!a}"))


async def _on_failure(request: HttpRequest, error: Exception) -> Response:
    """Return the response for an unexpected error. The server raises it again and logs it once."""
    return _response(failure(error))


async def _on_refusal(request: HttpRequest, error: Exception) -> Response:
    """Return the response for an unknown path or method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        text = (
            f"Not Found: this server has no path {request.url.path[:200]!r}. The operations are under {PREFIX}; "
            f"{OPENAPI_PATH} lists all paths."
        )
        reply = refusal(404, text, "NotFound")
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        reply = refusal(405, f"Method Not Allowed: {request.method}; this path allows {allowed}", "MethodNotAllowed")
    else:
        reply = refusal(error.status_code, str(error.detail), "HTTPException")
    logger.info("%s %.200a: %d", request.method, request.url.path, error.status_code)
    return _response(reply, error.headers)


_EXCEPTION_HANDLERS: dict[Any, Any] = {
    HTTPException: _on_refusal,
    AgentLightningError: _on_error,
    Exception: _on_failure,
}


def _response(reply: ErrorReply, headers: Mapping[str, str] | None = None) -> Response:
    extra = {name.decode(): value.decode() for name, value in reply.extra}
    return Response(reply.body, reply.status, {**extra, **(headers or {})}, media_type="application/json")


async def _health(request: HttpRequest) -> Response:
    return JSONResponse({"status": "ok", "version": VERSION})


async def _openapi(request: HttpRequest) -> Response:
    return Response(await asyncio.to_thread(_document), media_type="application/json")


_document = cache(lambda: json.dumps(openapi_document()).encode())
