"""LightningStoreServer: any store, offered over HTTP. Operations come from the table in `routes.py`."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from typing_extensions import override

from agentlightning.errors import BadRequestError
from agentlightning.store.base import LightningStore, LightningStoreCapabilities, request_token
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.forward import forward_operations
from agentlightning.store.openapi import openapi_document
from agentlightning.store.routes import LONG_POLLS, OPERATIONS, POLL_SECONDS, PREFIX, Operation
from agentlightning.store.threading import LightningStoreThreaded
from agentlightning.utils.asgi import Endpoint, Handler, JsonDispatch, Request
from agentlightning.utils.auth import ASGIApp, BearerAuth, Scope, check_bind, server_token
from agentlightning.utils.server_launcher import LaunchMode, PythonServerLauncher, PythonServerLauncherArgs
from agentlightning.utils.version import VERSION

logger = logging.getLogger(__name__)

DEFAULT_PORT = 4747
OPEN_PATHS = frozenset(("/health", f"{PREFIX}/health"))
"""What answers without a token."""


@forward_operations
class LightningStoreServer(LightningStore):
    """Serves `store` over HTTP, and is a store itself.

    In the process that made it, calls go straight to the store, from any thread. In a process that inherited it (fork)
    or received it (pickle) they go over HTTP to the address. `bind` takes the port before anything else starts; `start`
    and `stop` belong to the process that made it. Beyond loopback it refuses to start without `AGL_TOKEN`.
    """

    def __init__(
        self,
        store: LightningStore,
        host: str | None = None,
        port: int | None = None,
        cors_allow_origins: str | Sequence[str] | None = None,
        launch_mode: LaunchMode = "thread",
        launcher_args: PythonServerLauncherArgs | None = None,
        *,
        token: str | None = None,
    ) -> None:
        if launcher_args is not None and (host is not None or port is not None or launch_mode != "thread"):
            raise BadRequestError("host, port, and launch_mode cannot be set when launcher_args is provided.")
        if not store.capabilities.get("async_safe"):
            raise BadRequestError(
                f"The store is not async-safe: {type(store).__name__}.capabilities says so, "
                "and a server calls it concurrently. Make it async-safe and declare it."
            )
        self.store: LightningStore | None = store
        self._inner: LightningStore | None = _for_threads(store)
        self._token = token or server_token()
        self.launcher_args = launcher_args or PythonServerLauncherArgs(
            host=host,
            port=DEFAULT_PORT if port is None else port,
            launch_mode=launch_mode,
            healthcheck_url="/health",
        )
        check_bind(self.launcher_args.host or "127.0.0.1", self._token)
        self.app: ASGIApp | None = _with_cors(self._build_app(), cors_allow_origins)
        self.server_launcher = PythonServerLauncher(self.app, self.launcher_args)
        self._owner_pid = os.getpid()
        self._client: LightningStoreClient | None = None
        self._client_pid = 0

    # --- life ------------------------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """URL to tell others."""
        return self.server_launcher.access_endpoint

    def bind(self) -> None:
        """Take the port; connections queue until `start`.

        Raises:
            RuntimeError: the port is taken.
        """
        self.server_launcher.bind()

    async def start(self) -> None:
        """Serve; returns when requests are answered."""
        self._check_owner("start")
        await self.server_launcher.start()
        logger.info("store server listens on %s", self.server_launcher.endpoint)

    async def stop(self) -> None:
        """Stop serving and free the port; the store stays open."""
        self._check_owner("stop")
        await self.server_launcher.stop()
        if self._inner is not self.store and self._inner is not None:
            await self._inner.close()

    async def run_forever(self) -> None:
        """Serve until cancelled."""
        self._check_owner("run_forever")
        await self.server_launcher.run_forever()

    def _check_owner(self, what: str) -> None:
        if self.store is None or os.getpid() != self._owner_pid:
            raise RuntimeError(f"{what}() belongs to the process that made the server (pid {self._owner_pid})")

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return LightningStoreClient, (self.endpoint,)

    # --- being a store ---------------------------------------------------------------------------------------------

    @property
    @override
    def capabilities(self) -> LightningStoreCapabilities:
        persistent = bool(self.store is not None and self.store.capabilities.get("persistent"))
        return {
            "async_safe": True,
            "thread_safe": True,
            "zero_copy": True,
            "otlp_traces": False,
            "distributed": True,
            "persistent": persistent,
        }

    @override
    async def close(self) -> None:
        if self._client is not None and self._client_pid == os.getpid():
            await self._client.close()

    async def _call(self, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return await getattr(self._target(), operation)(*args, **kwargs)

    def _target(self) -> LightningStore:
        pid = os.getpid()
        if self._inner is not None and pid == self._owner_pid:
            return self._inner
        if self._client is None or self._client_pid != pid:
            self._client, self._client_pid = LightningStoreClient(self.endpoint, token=self._token), pid
        return self._client

    # --- the app ---------------------------------------------------------------------------------------------------

    def _build_app(self) -> ASGIApp:
        endpoints = [
            Endpoint(method, PREFIX + path, self._handler(operation, method), operation.name in LONG_POLLS)
            for operation in OPERATIONS.values()
            for method, path in ((operation.row.method, operation.row.path), *operation.row.also)
        ]
        others = Starlette(
            routes=[
                Route("/health", _health),
                Route(f"{PREFIX}/health", _health),
                Route("/openapi.json", _openapi),
            ],
            exception_handlers={404: _not_found},
        )
        version = (b"x-agl-version", VERSION.encode())
        return BearerAuth(JsonDispatch(endpoints, others, headers=[version]), self._token, _is_open)

    def _handler(self, operation: Operation, method: str) -> Handler:
        long_poll = operation.name in LONG_POLLS

        async def handle(request: Request) -> tuple[int, bytes]:
            if method == "GET":
                arguments = operation.read_query(request.query)
            else:
                arguments = operation.read_body(request.body)
                if operation.in_query:
                    arguments.update(operation.read_query(request.query))
            if long_poll:
                arguments["timeout"] = _poll_time(arguments.get("timeout", _default_wait(operation)))
            request_token.set(request.token)
            assert self._inner is not None
            answer = await getattr(self._inner, operation.name)(**request.path, **arguments)
            return operation.row.status, operation.write_answer(answer)

        return handle


def _for_threads(store: LightningStore) -> LightningStore:
    return store if store.capabilities.get("thread_safe") else LightningStoreThreaded(store)


def _default_wait(operation: Operation) -> float | None:
    return operation.signature.parameters["timeout"].default


def _poll_time(asked: float | None) -> float:
    return POLL_SECONDS if asked is None else max(0.0, min(POLL_SECONDS, asked))


def _is_open(scope: Scope) -> bool:
    return scope["path"] in OPEN_PATHS


def _with_cors(app: ASGIApp, origins: str | Sequence[str] | None) -> ASGIApp:
    """Allow the named origins; none by default. `*` allows every page, without credentials."""
    listed = [origins] if isinstance(origins, str) else list(origins or [])
    listed = [origin.strip() for origin in listed if origin.strip()]
    if not listed:
        return app
    every = "*" in listed
    return CORSMiddleware(
        app,
        allow_origins=["*"] if every else listed,
        allow_methods=["*"],
        allow_headers=["*"],
        allow_credentials=not every,
        expose_headers=["*"],
    )


async def _health(request: HttpRequest) -> Response:
    return JSONResponse({"status": "ok", "version": VERSION}, headers={"x-agl-version": VERSION})


async def _openapi(request: HttpRequest) -> Response:
    return JSONResponse(openapi_document())


async def _not_found(request: HttpRequest, error: Exception) -> Response:
    return JSONResponse({"detail": "Not Found", "error_type": "NotFound"}, status_code=404)
