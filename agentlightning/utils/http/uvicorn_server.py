"""uvicorn for this package: no signal handlers, woken by events, with bounds and a limited time for stopping."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import socket
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, cast

import uvicorn
from typing_extensions import override

from agentlightning.utils.http.auth import ASGIApp, Receive, Scope, Send
from agentlightning.utils.http.errors import refusal
from agentlightning.utils.http.protocol import BoundedHttp, HttpBounds

logger = logging.getLogger(__name__)

STOPPING = "stopping"
"""Key in `scope["state"]` of the `StopSignal` of the server: every wait ends when it is set."""


class StopSignal(asyncio.Event):
    """Set when a server stops. It wakes waiting tasks and calls registered functions, so that a thousand requests that
    wait for something else do not need a task each."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: set[Callable[[object], None]] = set()

    @override
    def set(self) -> None:
        super().set()
        for call in list(self._calls):
            call(self)

    @contextlib.contextmanager
    def calling(self, call: Callable[[object], None]) -> Generator[None, None, None]:
        """Call `call` with this signal within the block once it is set; at once if it is set already."""
        self._calls.add(call)
        try:
            if self.is_set():
                call(self)
            yield
        finally:
            self._calls.discard(call)


class AsgiServer(uvicorn.Server):
    """One serving of one app, on the loop that runs `serve`.

    `ready` resolves when requests are accepted. `request_stop` may be called from any thread; requests in progress
    then have `patience` seconds, after which they are cancelled (and answered 503 if nothing was sent yet).
    `headers` are sent with every answer, including those that do not come from the app.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        patience: float,
        keep_alive: int = 30,
        bounds: HttpBounds,
        headers: Sequence[tuple[str, str]] = (),
        log_level: int,
        access_log: bool = False,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                cast(Any, partial(_interruptible, app)),
                interface="asgi3",
                http=cast(Any, partial(BoundedHttp, bounds=bounds)),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level=log_level,
                access_log=access_log,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=keep_alive,
                headers=list(headers),
            )
        )
        self._sweep_seconds = min(1.0, keep_alive / 4, bounds.arrival_seconds / 4, bounds.unread_seconds / 4)
        self.ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._patience = patience
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_asked = StopSignal()

    def request_stop(self) -> None:
        """Ask the serving loop to end; may be called from any thread, more than once."""
        self.should_exit = True
        with contextlib.suppress(RuntimeError):  # the loop ended by itself
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._stop_asked.set)

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self.lifespan.state[STOPPING] = self._stop_asked
        await super().startup(sockets)
        self.ready.set_result(None)

    @override
    async def main_loop(self) -> None:
        loop = asyncio.get_running_loop()
        while not await self.on_tick(0):  # tick 0 refreshes the date header
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop_asked.wait(), self._sweep_seconds)
            for connection in self._connections():
                connection.sweep(loop.time())

    @override
    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().serve(sockets)
        finally:  # also when the task was cancelled and `shutdown` did not run
            self._close_listeners()
            self._drop_connections()

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._close_listeners()
        for connection in list(self.server_state.connections):
            connection.shutdown()  # closes idle ones; the others end with their response
        if tasks := set(self.server_state.tasks):
            _, late = await asyncio.wait(tasks, timeout=self._patience)
            for connection in self._connections():
                if connection.is_answering():
                    connection.drop()
            for task in late:
                task.cancel()
            if late:
                logger.info("stopping: cancelled %d requests that did not end in %s s", len(late), self._patience)
                await asyncio.wait(late, timeout=1.0)
        self._drop_connections()
        await asyncio.sleep(0)  # lets the transports report that they are closed

    @contextlib.contextmanager
    @override
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    def _connections(self) -> list[BoundedHttp]:
        return [connection for connection in self.server_state.connections if isinstance(connection, BoundedHttp)]

    def _close_listeners(self) -> None:
        for server in getattr(self, "servers", []):
            server.close()

    def _drop_connections(self) -> None:
        for connection in list(self.server_state.connections):
            transport = cast("asyncio.Transport | None", getattr(connection, "transport", None))
            if transport is not None and not transport.is_closing():
                transport.abort()


async def _interruptible(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Call the app, and answer a request that is cancelled when the server stops."""
    try:
        await app(scope, receive, send)
    except asyncio.CancelledError:
        with contextlib.suppress(RuntimeError):  # uvicorn's word for: an answer has begun already
            await refusal(503, "The server is stopping", "StoreUnreachableError").closing().send(send)
