"""A server with uvicorn's connections: without signal handlers, woken by events, with limits and a stop timeout."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import socket
from collections.abc import Callable, Generator, Sequence
from email.utils import formatdate
from functools import partial
from typing import Any, cast

import uvicorn
from typing_extensions import override
from uvicorn.server import ServerState

from agentlightning.utils.http.auth import ASGIApp, Receive, Scope, Send
from agentlightning.utils.http.errors import refusal
from agentlightning.utils.http.protocol import BoundedHttp, HttpBounds

logger = logging.getLogger(__name__)

STOPPING = "stopping"
"""Key of the server's `StopSignal` in `scope["state"]`: every wait ends when the signal is set."""


class StopSignal(asyncio.Event):
    """Set when a server stops. It wakes waiting tasks and calls registered functions, so that waiting requests do not
    need a task each."""

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
        """Call `call` with this signal once it is set within the block; immediately if it is already set."""
        self._calls.add(call)
        try:
            if self.is_set():
                call(self)
            yield
        finally:
            self._calls.discard(call)


class AsgiServer:
    """Serves an app once, on the loop that runs `serve`.

    `ready` resolves when requests are accepted. `request_stop` may be called from any thread; requests in progress
    then have `patience` seconds, after which they are cancelled (with status 503 if nothing has been sent).
    `headers` are sent with every response, including responses that are not from the app.
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
        self._config = uvicorn.Config(
            cast(Any, partial(_interruptible, app)),
            interface="asgi3",
            http="httptools",
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
        self._bounds, self._patience, self._state = bounds, patience, ServerState()
        self._sweep_seconds = min(1.0, keep_alive / 4, bounds.arrival_seconds / 4, bounds.unread_seconds / 4)
        self.ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_to_stop = False
        self._stopping = StopSignal()

    def request_stop(self) -> None:
        """Request the serving loop to end; may be called from any thread, more than once."""
        self._is_to_stop = True
        with contextlib.suppress(RuntimeError):  # the loop ended by itself
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._stopping.set)

    def run(self, sockets: Sequence[socket.socket]) -> None:
        """Serve on a loop of this thread."""
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(self.serve(sockets))

    async def serve(self, sockets: Sequence[socket.socket]) -> None:
        """Serve on listening sockets until a stop is requested."""
        loop = self._loop = asyncio.get_running_loop()
        self._config.load()

        def connected() -> BoundedHttp:
            return BoundedHttp(self._config, self._state, {STOPPING: self._stopping}, loop, bounds=self._bounds)

        listeners: list[asyncio.Server] = []
        try:
            for each in sockets:
                listeners.append(await loop.create_server(connected, sock=each, backlog=self._config.backlog))
            self.ready.set_result(None)
            while not self._is_to_stop:
                date = (b"date", formatdate(usegmt=True).encode())
                self._state.default_headers = [date, *self._config.encoded_headers]
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), self._sweep_seconds)
                for connection in self._connections():
                    connection.sweep(loop.time())
            for listener in listeners:
                listener.close()
            await self._end_requests()
        finally:  # also when the task was cancelled
            for listener in listeners:
                listener.close()
            for connection in self._connections():
                if not connection.transport.is_closing():
                    connection.transport.abort()
        await asyncio.sleep(0)  # lets the transports report that they are closed

    async def _end_requests(self) -> None:
        for connection in self._connections():
            connection.shutdown()  # closes idle ones; the others end with their response
        if tasks := set(self._state.tasks):
            _, late = await asyncio.wait(tasks, timeout=self._patience)
            for connection in self._connections():
                if connection.is_answering():
                    connection.drop()
            for task in late:
                task.cancel()
            if late:
                logger.info("stopping: cancelled %d requests that did not end within %s s", len(late), self._patience)
                await asyncio.wait(late, timeout=1.0)

    def _connections(self) -> list[BoundedHttp]:
        return cast("list[BoundedHttp]", list(self._state.connections))


async def _interruptible(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Call the app, and respond to a request that is cancelled because the server stops."""
    try:
        await app(scope, receive, send)
    except asyncio.CancelledError:
        with contextlib.suppress(RuntimeError):  # uvicorn's word for: an answer has begun already
            await refusal(503, "The server is stopping", "StoreUnreachableError").closing().send(send)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a loop for a server: uvloop's if it supports the platform."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
