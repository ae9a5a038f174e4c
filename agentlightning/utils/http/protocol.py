"""HTTP/1.1 connections of uvicorn with limits that uvicorn lacks, and responses in one write.

uvicorn has no limit for: the time of a request's head, its headers, the framing of chunks and the data after the last
one, a response that is not read, connections (beyond its limit, all requests get 503, including health checks). A
message beyond a limit is rejected as soon as this is detected, at the latest after the piece of data that exceeds it.
The cost on the hot path is a few assignments: `sweep`, which the server calls for every connection about once a second,
checks the times.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, cast

import httptools
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from agentlightning.base.field_help import explain_fields
from agentlightning.utils.http.auth import ASGIApp, Receive, Scope, Send
from agentlightning.utils.http.errors import ErrorReply, refusal

logger = logging.getLogger(__name__)

_RESERVE = 64
"""Number of connections beyond the limit: they serve health requests, and respond with 503 to all others. Further
connections are closed without a response."""
_ROOM_MADE = 64
"""Divisor: this part of the connections is closed at a time at the limit, so that not every new one scans all."""
_PROGRESS_BYTES = 256 * 1024
"""A client that reads fewer bytes of its response in the allowed time counts as a client that does not read."""
_LINGER_SECONDS = 5.0
_LINGER_BYTES = 4 * 1024 * 1024
"""Time and bytes for which a rejected request is still read, so that the client can read the response."""


def _connections() -> int:
    """Return the number of connections that the limit of open files allows, at most 4096."""
    try:
        import resource
    except ImportError:  # Windows, where sockets are not open files
        return 4096
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if files == resource.RLIM_INFINITY else max(32, min(4096, files * 3 // 4))


@explain_fields
@dataclass(frozen=True)
class HttpBounds:
    """Limits of a server's connections. Times are in seconds, sizes in bytes."""

    head_bytes: int = 64 * 1024
    """Size of request line and headers; beyond: 431. Also the size of the framing of a chunked body, in addition to one
    byte per byte of the body, and of the data between two pieces of it; beyond: 400."""
    head_lines: int = 256
    """Number of headers of a request; beyond: 431."""
    url_bytes: int = 32 * 1024
    """Size of the URL of a request; beyond: 414."""
    pipelined: int = 16
    """Number of requests that wait for the response to an earlier one; beyond: the connection is closed."""
    arrival_seconds: float = 60.0
    """Time from a request's first byte to its last, while the server reads; beyond: 408."""
    unread_seconds: float = 30.0
    """Time for a client to read the rest of its response, or a large part of it; beyond: the connection is closed."""
    connections: int = field(default_factory=_connections)
    """Number of concurrent connections; beyond: connections with an incomplete request are closed, then idle ones. If
    there are neither, the response is 503."""
    reserved_paths: frozenset[str] = frozenset(("/health", "/v1/agl/health"))
    """Paths to serve even if all connections are in use."""


class BoundedHttp(HttpToolsProtocol):
    """One connection. Owned by the serving loop."""

    def __init__(self, *args: Any, bounds: HttpBounds, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bounds = bounds
        self._made_at = 0.0
        self._refused_at: float | None = None
        self._discarded = 0
        self._idle: tuple[RequestResponseCycle | None, float] | None = None
        self._unread: tuple[float, int] | None = None
        self._arriving_since: float | None = None
        self._in_head = self._in_body = False
        self._head_bytes = 0
        self._large_piece = False
        self._verdict: ErrorReply | None = None
        self._piece_body = self._begun = 0
        self._body_bytes = self._framing_bytes = self._framing_since_body = 0
        self._running: RequestResponseCycle | None = None
        """The request in progress while others wait behind it; otherwise it is `cycle`."""

    # --- arrival ---------------------------------------------------------------------------------------------------

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] -- as in uvicorn
        if len(self.connections) >= self._bounds.connections:
            # Close those on which no request is worked on: first those with half a request, the oldest of them first,
            # then idle ones. Whoever sends requests and waits for answers keeps its connection.
            connections = cast("set[BoundedHttp]", self.connections)
            others = [other for other in connections if other._running is None and other._is_answered()]
            others.sort(key=lambda other: other._made_at if other._arriving_since is None else other._arriving_since)
            others.sort(key=lambda other: other._arriving_since is None and cast(Any, other.cycle) is not None)
            closed = others[: max(1, self._bounds.connections // _ROOM_MADE)]
            for other in closed:
                other.drop()
                self.connections.discard(other)
            if closed:
                logger.info("all connections in use: closed %d without a complete request", len(closed))
        beyond = len(self.connections) - self._bounds.connections
        super().connection_made(transport)
        self._made_at = self.loop.time()
        if beyond >= _RESERVE:
            transport.abort()
        elif beyond >= 0:
            text = f"All {self._bounds.connections} connections of the server are in use; retry later"
            full = partial(_refuse, refusal(503, text, "StoreUnreachableError"))
            self.app = cast(Any, partial(_serve_reserved, self.app, self._bounds.reserved_paths, full))

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._release_running()
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        if self._refused_at is not None:
            self._discarded += len(data)
            if self._discarded > _LINGER_BYTES:
                self.transport.abort()
            return
        bound, was_in_head, was_in_body = self._bounds.head_bytes, self._in_head, self._in_body
        self._large_piece = len(data) > bound
        self._piece_body = self._begun = 0
        try:
            cast(Any, self.parser).feed_data(data)
        except httptools.HttpParserUpgrade:
            logger.info("%s: protocol upgrade requested, which is not supported", self._name())
        except httptools.HttpParserError as error:
            self._refuse(self._verdict or refusal(400, f"The request is not valid HTTP: {error}", "BadRequestError"))
        if self._begun > (not was_in_head and not was_in_body):
            return  # of several messages in one piece the last one's share is not known: its next piece is counted
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > bound:
                self._refuse(self._head_refusal())
        elif self._in_body:
            # bytes that are not body in a piece within a body; a body with a length has none
            size = len(data) - self._piece_body if was_in_body else max(0, len(data) - self._piece_body - bound)
            self._body_bytes += self._piece_body
            self._framing_bytes += size
            self._framing_since_body = size if self._piece_body else self._framing_since_body + size
            if self._framing_since_body > bound or self._framing_bytes > bound + self._body_bytes:
                framing, body = self._framing_bytes, self._body_bytes
                logger.info(
                    "%s: refused with status 400: %d bytes of chunk framing for a body of %d bytes",
                    self._name(),
                    framing,
                    body,
                )
                text = f"The chunk framing has {framing} bytes, too many for a body of {body} bytes"
                way = "send larger chunks, without extensions and trailers"
                self._refuse(refusal(400, f"{text}; {way}", "TooLargeError"))

    # --- head ------------------------------------------------------------------------------------------------------

    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun += 1
        self._arriving_since = self.loop.time()
        self._in_head, self._in_body = True, False
        self._head_bytes = self._body_bytes = self._framing_bytes = self._framing_since_body = 0

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if not self._in_head:
            self._object(400, "Trailers are not supported: the body ends with its last chunk", "BadRequestError")
        if len(self.headers) >= self._bounds.head_lines:
            self._object(431, f"The request has more than {self._bounds.head_lines} headers", "TooLargeError")
        if name == b"transfer-encoding":
            if value.strip().lower() != b"chunked":
                shown = value[:80].decode("latin-1")
                self._object(501, f"Transfer-Encoding {shown!a} is not supported, only 'chunked'", "BadRequestError")
            version = cast(Any, self.parser).get_http_version()
            if version == "1.0" or any(name == b"transfer-encoding" for name, _ in self.headers):
                self._object(400, "Transfer-Encoding is set twice, or in HTTP/1.0", "BadRequestError")
        elif name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    @override
    def on_headers_complete(self) -> None:
        self._in_head = False
        waiting = len(self.pipeline)
        if waiting >= self._bounds.pipelined:
            logger.info(
                "%s: connection closed: %d requests were waiting for a response, which is above the limit",
                self._name(),
                waiting,
            )
            self._object(400, "Too many requests were sent before the responses", "BadRequestError")
        in_hand = cast("RequestResponseCycle | None", self.cycle)
        beyond = len(self.url) > self._bounds.url_bytes
        if self._large_piece or self._head_bytes:  # else it is smaller than one piece, which was not large
            headers = sum(len(name) + len(value) for name, value in self.headers)
            beyond = beyond or len(self.url) + headers > self._bounds.head_bytes
        if not beyond:
            super().on_headers_complete()
        else:
            app: Any = self.app
            reply = self._head_refusal()
            self.app, self.url = cast(Any, partial(_refuse, reply)), b"/"
            try:
                super().on_headers_complete()
            finally:
                self.app = app
        self._in_body = True
        if self.pipeline and not waiting:
            self._running = in_hand

    def _head_refusal(self) -> ErrorReply:
        bounds = self._bounds
        if len(self.url) > bounds.url_bytes:
            logger.info("%s: 414, URL beyond %d bytes", self._name(), bounds.url_bytes)
            text = f"The URL is longer than {bounds.url_bytes} bytes; send long values in the body (POST .../search)"
            return refusal(414, text, "TooLargeError")
        logger.info("%s: 431, head beyond %d bytes", self._name(), bounds.head_bytes)
        return refusal(431, f"The request's head is larger than {bounds.head_bytes} bytes", "TooLargeError")

    # --- body ------------------------------------------------------------------------------------------------------

    @override
    def on_body(self, body: bytes) -> None:
        self._piece_body += len(body)
        super().on_body(body)

    @override
    def on_message_complete(self) -> None:
        self._arriving_since, self._in_body = None, False
        super().on_message_complete()

    @override
    def on_response_complete(self) -> None:
        waiting = self.pipeline
        self._running = waiting[-1][0] if len(waiting) > 1 else None
        if waiting or self.transport.is_closing():
            super().on_response_complete()
        else:  # uvicorn's timer for an idle connection is made and cancelled with each request; `sweep` closes those
            self.server_state.total_requests += 1
            self.flow.resume_reading()

    # --- an end to it ----------------------------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """End the connection if it exceeds a time limit. `now` is the loop's time."""
        if self._refused_at is not None:
            if now - self._refused_at > _LINGER_SECONDS:
                self.transport.abort()
            return
        waiting = self.transport.get_write_buffer_size()
        if not waiting:
            self._unread = None
        elif self._unread is None or self._unread[1] - waiting >= _PROGRESS_BYTES:
            self._unread = now, waiting
        if self._unread is not None and now - self._unread[0] > self._bounds.unread_seconds:
            logger.info("%s: closed, response not read within %g s", self._name(), self._bounds.unread_seconds)
            self.drop()
            return
        if self._arriving_since is not None:
            if self.flow.read_paused:  # it is the server that waits
                self._arriving_since = now
            if now - self._arriving_since > self._bounds.arrival_seconds:
                logger.info("%s: 408, request not received within %g s", self._name(), self._bounds.arrival_seconds)
                text = f"The request did not arrive within {self._bounds.arrival_seconds:g} s"
                self._refuse(refusal(408, text, "StoreUnreachableError"))
                return
        # uvicorn's own timer starts with the first answer and ends with the next byte, whatever that byte is
        if self._arriving_since is not None or not self._is_answered():
            self._idle = None
        elif self._idle is None or self._idle[0] is not self.cycle:
            self._idle = self.cycle, now
        if self._idle is not None and now - self._idle[1] > self.timeout_keep_alive:
            self.transport.close()

    def is_answering(self) -> bool:
        """Return True while a part of a response is sent and the rest is not."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is not None and cycle.response_started and not cycle.response_complete

    def drop(self) -> None:
        """Close the connection immediately; for the handler of its request, the client has left."""
        self._release_cycle()
        self.transport.abort()

    @override
    def resume_writing(self) -> None:
        self._unread = None  # the full buffer has drained, whatever is written next
        super().resume_writing()

    def _name(self) -> str:
        return "{}:{}".format(*self.client) if self.client else "a client"

    # --- refusals --------------------------------------------------------------------------------------------------

    def _object(self, status: int, text: str, error_type: str) -> NoReturn:
        """Stop the parser; its caller then sends the rejection."""
        self._verdict = refusal(status, text, error_type)
        raise _Refused(text)

    def _refuse(self, reply: ErrorReply) -> None:
        """Respond instead of the app, discard further data for a while, then close."""
        was_answered = self._in_body and self._is_answered()
        if not self._release_cycle():
            self.transport.abort()
            return
        self._refused_at, self._arriving_since = self.loop.time(), None
        self._in_head = self._in_body = False
        self.headers, self.scope = [], cast(Any, {})
        if was_answered:  # the answer went out before the whole request was here: one is enough
            self.transport.write_eof()
            return
        headers = (*self.server_state.default_headers, *reply.closing().headers)
        lines = [b"%s: %s\r\n" % header for header in headers]
        self.transport.write(b"".join((STATUS_LINE[reply.status], *lines, b"\r\n", reply.body)))
        self.transport.write_eof()

    def _release_cycle(self) -> bool:
        """Notify the requests in progress that their client left; return False if the next response is unclear."""
        if self._release_running():
            _release(self.cycle)
            return False
        if self._is_answered():
            return True
        _release(self.cycle)
        return not self.cycle.response_started

    def _release_running(self) -> bool:
        running, self._running = self._running, None
        self.pipeline.clear()
        if running is not None:
            _release(running)
        return running is not None

    def _is_answered(self) -> bool:
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is None or cycle.response_complete


def _release(cycle: RequestResponseCycle) -> None:
    cycle.disconnected = True
    cycle.message_event.set()


async def _serve_reserved(
    app: Any, paths: frozenset[str], otherwise: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    """Serve only some paths of an app; other requests get another app's response, and the connection ends."""
    await (app if scope["path"] in paths else otherwise)(scope, receive, send)


async def _refuse(reply: ErrorReply, scope: Scope, receive: Receive, send: Send) -> None:
    """Send a fixed response to any request, and close the connection; an ASGI app once `reply` is bound."""
    await reply.closing().send(send)


class _Refused(Exception):
    """Ends the parser's work on a message."""


# --- an answer in one write -------------------------------------------------------------------------------------------

_Headers = list[tuple[bytes, bytes]]
_written: tuple[_Headers, bytes] = [], b""
"""The latest headers that a server sends with each response, and their encoded form."""


async def send_whole(send: Send, status: int, media_type: bytes, body: bytes) -> None:
    """Send a status and a body in one system call: uvicorn uses one for each of ASGI's two messages, which is a fifth
    of the cost of a small request."""
    cycle = getattr(send, "__self__", None)
    if isinstance(cycle, RequestResponseCycle) and _can_write(cycle):
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        head = b"content-type: %s\r\ncontent-length: %d\r\n\r\n" % (media_type, len(body))
        cycle.transport.write(b"".join((STATUS_LINE[status], _common_headers(cycle.default_headers), head, body)))
        cycle.message_event.set()
        cycle.on_response()
        return
    form = [(b"content-type", media_type), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": form})
    await send({"type": "http.response.body", "body": body})


def _can_write(cycle: RequestResponseCycle) -> bool:
    """Return True for a usual response, for which uvicorn would neither wait nor add nor log anything."""
    return (
        cycle.keep_alive
        and not (cycle.response_started or cycle.disconnected or cycle.flow.write_paused or cycle.access_log)
        and cycle.scope["method"] != "HEAD"
    )


def _common_headers(headers: _Headers) -> bytes:
    global _written
    if _written[0] is not headers:  # a server makes a new list each second, for the date in it
        _written = headers, b"".join(b"%s: %s\r\n" % header for header in headers)
    return _written[1]
