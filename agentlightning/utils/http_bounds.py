"""HTTP/1.1 connections with an end to everything: size of a request's head, time a request may take to arrive, time an
answer may lie unread, time a connection may lie idle, number of connections.

uvicorn speaks the protocol; here is what it leaves without a bound. The hot path pays a few assignments for it: times
are judged by `sweep`, which the server calls for every connection about once a second.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from dataclasses import dataclass, field
from typing import Any, cast

from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from agentlightning.utils.auth import Receive, Scope, Send
from agentlightning.utils.error_replies import ErrorReply, refusal

logger = logging.getLogger(__name__)

_SPARE_CONNECTIONS = 64
"""Beyond the bound so many are told that the server is full; further ones are closed without a word."""
_PROGRESS_BYTES = 256 * 1024
"""A client that takes less of its answer within the time for it counts as one that does not read."""
_LINGER_SECONDS = 5.0
_LINGER_BYTES = 4 * 1024 * 1024
"""For how long and how much of a refused request is read on, so that the client gets to read the refusal."""


def _connections() -> int:
    """Return how many connections fit into the open files of the process, at most 4096."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if files == resource.RLIM_INFINITY else max(32, min(4096, files * 3 // 4))


@dataclass(frozen=True)
class HttpBounds:
    """Bounds of a server's connections. Times are in seconds, sizes in bytes."""

    head_bytes: int = 64 * 1024
    """Request line and headers of one request; beyond: 431."""
    url_bytes: int = 32 * 1024
    """Beyond: 414."""
    arrival_seconds: float = 60.0
    """From a request's first byte to its last, as long as the server reads; beyond: 408."""
    unread_seconds: float = 30.0
    """For a client to take what is left of its answer, or a good part of it; beyond: the connection is cut."""
    connections: int = field(default_factory=_connections)
    """At once; beyond: 503."""


class BoundedHttp(HttpToolsProtocol):
    """One connection. Owned by the serving loop."""

    def __init__(self, *args: Any, bounds: HttpBounds, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bounds = bounds
        self._arriving_since: float | None = None
        self._in_head = False
        self._head_bytes = 0
        self._large_piece = False
        self._refused_at: float | None = None
        self._discarded = 0
        self._idle: tuple[RequestResponseCycle | None, float] | None = None
        self._unread: tuple[float, int] | None = None

    # --- arrival ---------------------------------------------------------------------------------------------------

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] -- as in uvicorn
        beyond = len(self.connections) - self._bounds.connections
        super().connection_made(transport)
        if beyond >= _SPARE_CONNECTIONS:
            transport.abort()
        elif beyond >= 0:
            text = f"The server has its {self._bounds.connections} connections in use; try again later"
            self.app = cast(Any, _Refuse(refusal(503, text, "StoreUnreachableError")))

    @override
    def data_received(self, data: bytes) -> None:
        if self._refused_at is not None:
            self._discard(len(data))
            return
        self._large_piece = len(data) > self._bounds.head_bytes
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self._bounds.head_bytes:
                self._refuse(self._head_refusal())

    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._arriving_since = self.loop.time()
        self._in_head = True
        self._head_bytes = 0

    @override
    def on_headers_complete(self) -> None:
        self._in_head = False
        if not self._is_head_beyond():
            super().on_headers_complete()
            return
        app, reply = self.app, self._head_refusal()
        self.app, self.url = cast(Any, _Refuse(reply)), b"/"
        try:
            super().on_headers_complete()
        finally:
            self.app = app

    @override
    def on_message_complete(self) -> None:
        self._arriving_since = None
        super().on_message_complete()

    @override
    def send_400_response(self, msg: str) -> None:
        self._refuse(refusal(400, msg, "BadRequestError"))

    @override
    def _unsupported_upgrade_warning(self) -> None:
        logger.info("%s: asked to upgrade the protocol, which is not done", _name(self))

    def _is_head_beyond(self) -> bool:
        if len(self.url) > self._bounds.url_bytes:
            return True
        if not (self._large_piece or self._head_bytes):  # then it is smaller than one piece, which was not large
            return False
        headers = sum(len(name) + len(value) for name, value in self.headers)
        return len(self.url) + headers > self._bounds.head_bytes

    def _head_refusal(self) -> ErrorReply:
        bounds = self._bounds
        if len(self.url) > bounds.url_bytes:
            logger.info("%s: 414, URL beyond %d bytes", _name(self), bounds.url_bytes)
            text = f"The URL is longer than {bounds.url_bytes} bytes; send long values in the body (POST .../search)"
            return refusal(414, text, "TooLargeError")
        logger.info("%s: 431, head beyond %d bytes", _name(self), bounds.head_bytes)
        return refusal(431, f"The request's head is larger than {bounds.head_bytes} bytes", "TooLargeError")

    # --- an end to it ----------------------------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """End the connection if it is beyond one of its times. `now` is the loop's time."""
        if self._refused_at is not None:
            if now - self._refused_at > _LINGER_SECONDS:
                self.transport.abort()
        elif self._is_left_unread(now):
            logger.info("%s: cut, it did not take its answer within %g s", _name(self), self._bounds.unread_seconds)
            self.drop()
        elif self._is_late(now):
            logger.info("%s: 408, its request took longer than %g s", _name(self), self._bounds.arrival_seconds)
            text = f"The request did not arrive within {self._bounds.arrival_seconds:g} s"
            self._refuse(refusal(408, text, "StoreUnreachableError"))
        elif self._is_left_idle(now):
            self.transport.close()

    def is_answering(self) -> bool:
        """True while part of an answer is out and the rest is not."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is not None and cycle.response_started and not cycle.response_complete

    def drop(self) -> None:
        """Close the connection at once; whoever works on its request is told that the client left."""
        self._release_cycle()
        self.transport.abort()

    def _is_left_unread(self, now: float) -> bool:
        waiting = self.transport.get_write_buffer_size()
        if not waiting:
            self._unread = None
            return False
        if self._unread is None or self._unread[1] - waiting >= _PROGRESS_BYTES:
            self._unread = now, waiting
        return now - self._unread[0] > self._bounds.unread_seconds

    @override
    def resume_writing(self) -> None:
        self._unread = None  # what was full has drained, whatever is written next
        super().resume_writing()

    def _is_late(self, now: float) -> bool:
        if self._arriving_since is None:
            return False
        if self.flow.read_paused:  # it is the server that waits
            self._arriving_since = now
        return now - self._arriving_since > self._bounds.arrival_seconds

    def _is_left_idle(self, now: float) -> bool:
        """Uvicorn's own timer starts with the first answer and ends with the next byte, whatever that byte is."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if self._arriving_since is not None or not (cycle is None or cycle.response_complete):
            self._idle = None
        elif self._idle is None or self._idle[0] is not cycle:
            self._idle = cycle, now
        return self._idle is not None and now - self._idle[1] > self.timeout_keep_alive

    def _refuse(self, reply: ErrorReply) -> None:
        """Answer in place of the app, then read on for a while without looking, and close."""
        if not self._release_cycle():
            self.transport.abort()
            return
        self._refused_at, self._arriving_since, self._in_head = self.loop.time(), None, False
        self._unset_keepalive_if_required()
        headers = (*self.server_state.default_headers, *reply.closing().headers)
        lines = [b"%s: %s\r\n" % header for header in headers]
        self.transport.write(b"".join((STATUS_LINE[reply.status], *lines, b"\r\n", reply.body)))
        self.transport.write_eof()

    def _release_cycle(self) -> bool:
        """Tell the request in hand, if any, that its client left; False if part of its answer is out already."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is None or cycle.response_complete:
            return True
        cycle.disconnected = True
        cycle.message_event.set()
        return not cycle.response_started

    def _discard(self, size: int) -> None:
        self._discarded += size
        if self._discarded > _LINGER_BYTES:
            self.transport.abort()


class _Refuse:
    """An app that answers one thing, and closes the connection after it."""

    def __init__(self, reply: ErrorReply) -> None:
        self._reply = reply.closing()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._reply.send(send)


def _name(connection: BoundedHttp) -> str:
    return "{}:{}".format(*connection.client) if connection.client else "a client"
