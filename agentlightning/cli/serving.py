"""Serve until a signal: the first signal shuts down in order, the second one immediately.

Commands with a few routes serve them through this module, which adds the checks of all servers of this package.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from types import FrameType

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentlightning.cli.output import say
from agentlightning.errors import AgentLightningError
from agentlightning.utils.http.allowed_hosts import AllowedHosts, HostDoor
from agentlightning.utils.http.auth import ASGIApp, BearerAuth, Scope, check_bind, server_token
from agentlightning.utils.http.errors import describe_error
from agentlightning.utils.server_launcher import PythonServerLauncher, PythonServerLauncherArgs

HEALTH_PATH = "/health"
_ECHO_SECONDS = 0.3
"""Seconds within which a second signal is ignored. `timeout`, for example, signals a child and then its group."""


def end_of_process() -> asyncio.Future[None]:
    """Return a future that resolves at the first SIGINT or SIGTERM. The second signal ends the process immediately.

    The handlers remain after the loop is closed, so that a repeated signal does not interrupt the shutdown. At
    interpreter exit both signals are ignored.
    """
    loop = asyncio.get_running_loop()
    end: asyncio.Future[None] = loop.create_future()
    first: float | None = None

    def stop() -> None:
        if not end.done():
            end.set_result(None)
        say("stopping: completing requests in progress")

    def note(number: int, _frame: FrameType | None) -> None:
        nonlocal first
        if first is None and not loop.is_closed():
            first = time.monotonic()
            loop.call_soon_threadsafe(stop)
        elif first is None or time.monotonic() - first > _ECHO_SECONDS:
            os.write(2, b"stopped immediately\n")
            os._exit(128 + number)

    def ignore() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    atexit.register(ignore)
    return end


def app_with_checks(routes: Sequence[Route], host: str, open_paths: Sequence[str] = ()) -> ASGIApp:
    """Return an app of the routes and `/health`. All paths require the token, except `/health` and `open_paths`.

    Raises:
        RuntimeError: `host` is beyond loopback and no token is set.
    """
    token = server_token()
    check_bind(host, token)
    free = {HEALTH_PATH, *open_paths}

    def is_open(scope: Scope) -> bool:
        return scope["path"] in free

    app: ASGIApp = Starlette(
        routes=[*routes, Route(HEALTH_PATH, _health, methods=["GET"])],
        exception_handlers={AgentLightningError: _on_error},
    )
    if token is not None:
        app = BearerAuth(app, token, is_open)
    return HostDoor(app, AllowedHosts.of(host, host, None), same_origin=token is None)


async def _on_error(request: Request, error: Exception) -> Response:
    reply = describe_error(error, f"{request.method} {request.url.path[:200]!a}")
    return Response(reply.body, reply.status, {name.decode(): value.decode() for name, value in reply.headers})


async def _health(request: Request) -> JSONResponse:
    return JSONResponse({"status": "ok"})


@asynccontextmanager
async def serving(app: ASGIApp, args: PythonServerLauncherArgs) -> AsyncGenerator[str]:
    """Serve while the context is open, and yield the public address."""
    server = PythonServerLauncher(app, args)
    server.bind()
    await server.start()
    try:
        yield server.access_endpoint
    finally:
        await server.stop()


async def serve_until_signal(
    app: ASGIApp, args: PythonServerLauncherArgs, tell: Callable[[str], Sequence[str]]
) -> None:
    """Serve until SIGINT or SIGTERM. `tell` returns the lines to print for an address."""
    end = end_of_process()
    async with serving(app, args) as endpoint:
        for line in tell(endpoint):
            say(line)
        await asyncio.wait([end])
