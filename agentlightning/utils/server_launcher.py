"""Runs any ASGI app on a socket, in the running loop or in a separate thread.

The socket is bound and listening before requests are served (`bind`), so that a port conflict is detected immediately
and a parent may bind, fork, and only then start threads. Stopping is graceful first and forced after
`shutdown_timeout`: open keep-alive connections and long polls never delay it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import logging
import socket
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final, Literal, cast

from agentlightning.base.field_help import explain_fields
from agentlightning.utils.http.auth import ASGIApp
from agentlightning.utils.http.connections import HttpConnections
from agentlightning.utils.http.protocol import HttpBounds
from agentlightning.utils.http.sockets import bracket, listen, outbound_address
from agentlightning.utils.http.uvicorn_server import AsgiServer, new_event_loop

logger = logging.getLogger(__name__)

LaunchMode = Literal["asyncio", "thread"]
SERVER_THREAD = "agl-server"
"""Name of the thread of a server that runs in a separate thread."""
_Done = concurrent.futures.Future[Exception | None]
"""Resolves when serving has ended, to the error that ended it, if any."""


@explain_fields
@dataclass
class PythonServerLauncherArgs:
    """Settings of a server. Times are in seconds."""

    port: int | None = None
    """Port to bind; None or 0 selects a free one, which then stays the same across restarts."""
    host: str | None = None
    """Address to bind; None is 127.0.0.1."""
    access_host: str | None = None
    """Address for other machines; None is the host, or this machine's outbound address for 0.0.0.0 and ::."""
    launch_mode: LaunchMode = "asyncio"
    """`asyncio`: a task in the caller's loop. `thread`: a daemon thread with its own loop."""
    healthcheck_url: str | None = None
    """Path that must return 200 before `start` returns; None disables the health check."""
    log_level: int = logging.WARNING
    """Level of uvicorn's own loggers."""
    access_log: bool = False
    """Whether uvicorn logs a line for each request."""
    startup_timeout: float = 60.0
    """Time that `start` waits for the server, and then again for its health check."""
    kill_unhealthy_server: bool = True
    """Whether to stop a server that failed its health check."""
    thread_join_timeout: float = 10.0
    """Time that `stop` waits beyond `shutdown_timeout` for a server that has not ended."""
    timeout_keep_alive: int = 30
    """Time that a connection may be idle."""
    shutdown_timeout: float = 2.0
    """Time that requests in progress may take to end after `stop`; then they are cancelled with status 503."""
    bounds: HttpBounds = field(default_factory=HttpBounds)
    """Limits of connections: sizes, times, number of concurrent connections."""

    @property
    def told_host(self) -> str:
        """Host of the address for other machines."""
        host = self.host or "127.0.0.1"
        return self.access_host or (outbound_address() if host in ("0.0.0.0", "::") else host)


class PythonServerLauncher:
    """Serves an app on a socket.

    In thread mode, `start` and `stop` may be awaited from any loop; in asyncio mode, from the same one. It has one
    owner and no lock. `serve_context` is called at each start; the context manager that it returns is active while the
    app is served, on the serving loop. `headers` are sent with every response.

    Raises:
        ValueError: the launch mode is unknown or cannot be served.
    """

    def __init__(
        self,
        app: ASGIApp,
        args: PythonServerLauncherArgs,
        serve_context: Callable[[], AbstractAsyncContextManager[object]] | None = None,
        *,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        mode: str = args.launch_mode
        if mode == "mp":
            raise ValueError("launch_mode='mp' is not supported: use 'thread' (with its own loop) or 'asyncio'")
        if mode not in ("asyncio", "thread"):
            raise ValueError(f"Unsupported launch mode: {mode}; use 'asyncio' or 'thread'")
        self.app = app
        self.args = args
        self.host = args.host or "127.0.0.1"
        self._headers = headers
        self._serve_context = serve_context or contextlib.nullcontext
        self._port = args.port or None
        self._socket: socket.socket | None = None
        self._server: AsgiServer | None = None
        self._done: _Done | None = None
        self._runner: threading.Thread | asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port. If it is not set, bind a free one."""
        if self._port is None:
            self.bind()
        assert self._port is not None
        return self._port

    @property
    def endpoint(self) -> str:
        """URL of the bound address."""
        return f"http://{bracket(self.host)}:{self.port}"

    @property
    def access_endpoint(self) -> str:
        """URL for other processes."""
        return f"http://{bracket(self.args.told_host)}:{self.port}"

    @property
    def health_url(self) -> str | None:
        """URL of the health check, or None."""
        path = self.args.healthcheck_url
        return None if path is None else f"{self.access_endpoint}/{path.lstrip('/')}"

    def is_running(self) -> bool:
        """Return True while requests are served; False for a server that died."""
        return self._done is not None and not self._done.done()

    def bind(self) -> None:
        """Bind the port and listen; connections are queued until `start`. No effect if already bound.

        Raises:
            RuntimeError: the address cannot be bound.
        """
        if self._socket is None or self._socket.fileno() < 0:  # below 0: let go of by a fork
            self._socket = listen(self.host, self._port or 0)
            weakref.finalize(self, self._socket.close)
            self._port = cast(int, self._socket.getsockname()[1])

    async def start(self) -> None:
        """Start serving; return when requests are accepted and the health path, if set, has returned 200.

        Raises:
            RuntimeError: the server is already running, the port is in use, or the server did not start in time.
        """
        if self.is_running():
            raise RuntimeError(f"The server at {self.endpoint} is already running; stop it first")
        self.bind()
        assert self._socket is not None
        args = self.args
        self._server = AsgiServer(
            self.app,
            patience=args.shutdown_timeout,
            keep_alive=args.timeout_keep_alive,
            bounds=args.bounds,
            headers=self._headers,
            log_level=args.log_level,
            access_log=args.access_log,
        )
        self._done = done = _Done()
        arguments = (self._server, self._socket, done)
        if args.launch_mode == "asyncio":
            self._runner = asyncio.create_task(self._serve(*arguments))
        else:
            self._runner = threading.Thread(target=self._run_thread, args=arguments, name=SERVER_THREAD, daemon=True)
            self._runner.start()
        await self._until_ready(self._server, done)
        if args.healthcheck_url is not None:
            await self._until_healthy("/" + args.healthcheck_url.lstrip("/"))

    async def stop(self) -> None:
        """Stop serving and close the port. No effect if the server is not running.

        Raises:
            RuntimeError: the server did not end within `shutdown_timeout` plus `thread_join_timeout`.
        """
        server, done, runner, listening = self._server, self._done, self._runner, self._socket
        self._server = self._done = self._runner = self._socket = None
        try:
            if server is not None and done is not None:
                server.request_stop()
                seconds = self.args.shutdown_timeout + self.args.thread_join_timeout
                await asyncio.wait([asyncio.wrap_future(done)], timeout=seconds)
                if not done.done():
                    raise RuntimeError(f"The server on port {self._port} did not end in time: its app blocks the loop")
                if error := done.result():  # logged, since nobody waits for it
                    logger.error("the server ended with an error", exc_info=error)
                if isinstance(runner, threading.Thread):
                    runner.join()  # it has nothing left to do
        finally:
            if listening is not None:
                listening.close()

    async def reload(self) -> None:
        """Stop if running, then restart on the same port."""
        await self.stop()
        await self.start()

    async def run_forever(self) -> None:
        """Start and wait until the server ends; when cancelled, stop it and raise the cancellation."""
        await self.start()
        assert self._done is not None
        try:
            await asyncio.shield(asyncio.wrap_future(self._done))
        finally:
            await self.stop()

    async def _serve(self, server: AsgiServer, listening: socket.socket, done: _Done) -> None:
        failure: Exception | None = None
        try:
            async with self._serve_context():
                with short_pauses():
                    await server.serve(sockets=[listening])
        except Exception as error:  # boundary: waiters for the server get the error that ended it
            failure = error
        finally:
            done.set_result(failure)

    def _run_thread(self, server: AsgiServer, listening: socket.socket, done: _Done) -> None:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(self._serve(server, listening, done))

    async def _until_ready(self, server: AsgiServer, done: _Done) -> None:
        either = [asyncio.wrap_future(server.ready), asyncio.wrap_future(done)]
        await asyncio.wait(either, timeout=self.args.startup_timeout, return_when=asyncio.FIRST_COMPLETED)
        if server.ready.done():
            return
        cause = done.result() if done.done() else None
        reason = repr(cause) if cause else f"Server did not start up within {self.args.startup_timeout} seconds."
        if cause:
            self._done = None  # said below, so `stop` need not log it
        await self.stop()
        raise RuntimeError(f"The server at {self.host}:{self._port} failed to start: {reason}") from cause

    async def _until_healthy(self, path: str) -> None:
        """Return once GET `path` returns 200; ignore proxy settings of the environment."""
        host, seconds = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host), self.args.startup_timeout
        connections = HttpConnections(f"http://{bracket(host)}:{self.port}", connect_seconds=seconds)
        try:
            async with asyncio.timeout(seconds):  # the app has no event to offer
                while (await connections.request("GET", path, {}, None, seconds)).status != 200:  # noqa: ASYNC110 -- see above
                    await asyncio.sleep(0.05)
        except TimeoutError:
            fate = "it was stopped" if self.args.kill_unhealthy_server else "it was left running"
            if self.args.kill_unhealthy_server:
                await self.stop()
            text = f"Server is not healthy at {self.endpoint}{path} after {seconds} seconds; {fate}"
            raise RuntimeError(text) from None
        finally:
            connections.close()


# --- the pauses of the garbage collector -----------------------------------------------------------------------------

_serving: Final = set[object]()
"""One object for each active block of `short_pauses`."""
_for_good = False


def freeze_for_good() -> None:
    """Exclude all existing objects from later garbage collections; blocks of `short_pauses` then have no effect.

    For a process that starts and ends many servers, such as a test run.
    """
    global _for_good
    _for_good = True
    gc.freeze()


@contextlib.contextmanager
def short_pauses() -> Generator[None]:
    """Exclude objects that exist at the beginning of the block from garbage collection within it.

    A full collection visits every object of the process, which takes a quarter of a second with the training stack
    loaded and blocks all threads. Cycles among those objects are collected after the last such block. May be entered
    from any thread, also concurrently.
    """
    if _for_good:
        yield
        return
    block = object()
    _serving.add(block)
    gc.freeze()
    try:
        yield
    finally:
        _serving.discard(block)
        if not _serving:
            gc.unfreeze()
