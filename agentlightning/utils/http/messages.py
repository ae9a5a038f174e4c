"""HTTP/1.1 messages with a bound on everything but the body, which is for the app to bound: request line and headers,
what frames the chunks of a body, what follows the last chunk, and requests that are sent ahead of their answers.

uvicorn speaks the protocol and leaves these without a bound. A message beyond one is refused as soon as that is seen,
at the latest after the piece of data in which it happened.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, cast

from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from agentlightning.field_help import explain_fields
from agentlightning.utils.http.auth import Receive, Scope, Send
from agentlightning.utils.http.errors import ErrorReply, refusal

logger = logging.getLogger(__name__)


def _connections() -> int:
    """Return how many connections fit into the open files of the process, at most 4096."""
    try:
        import resource
    except ImportError:  # Windows, whose sockets are no open files
        return 4096
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if files == resource.RLIM_INFINITY else max(32, min(4096, files * 3 // 4))


@explain_fields
@dataclass(frozen=True)
class HttpBounds:
    """Bounds of a server's connections. Times are in seconds, sizes in bytes."""

    head_bytes: int = 64 * 1024
    """Request line and headers of one request; beyond: 431. Also what may frame a chunked body, beside one byte for
    each byte of the body, and what may come between two pieces of it; beyond: 400."""
    head_lines: int = 256
    """Headers of one request; beyond: 431."""
    url_bytes: int = 32 * 1024
    """Beyond: 414."""
    pipelined: int = 16
    """Requests that wait for the answer to the one before them; beyond: the connection is cut."""
    arrival_seconds: float = 60.0
    """From a request's first byte to its last, as long as the server reads; beyond: 408."""
    unread_seconds: float = 30.0
    """For a client to take what is left of its answer, or a good part of it; beyond: the connection is cut."""
    connections: int = field(default_factory=_connections)
    """At once; beyond: those with half a request are closed, then idle ones, and if there are none: 503."""
    reserved_paths: frozenset[str] = frozenset(("/health", "/v1/agl/health"))
    """Served also when all connections are in use."""


class BoundedMessages(HttpToolsProtocol):
    """The messages of one connection. Owned by the serving loop; the subclass says how a refusal is sent."""

    def __init__(self, *args: Any, bounds: HttpBounds, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bounds = bounds
        self._arriving_since: float | None = None
        self._in_head = self._in_body = False
        self._head_bytes = 0
        self._large_piece = False
        self._verdict: ErrorReply | None = None
        self._piece_body = self._begun = 0
        self._body_bytes = 0
        self._framing_bytes = 0
        self._framing_since_body = 0
        self._running: RequestResponseCycle | None = None
        """The request that is worked on while others wait behind it; else `cycle` is the one."""

    def _refuse(self, reply: ErrorReply) -> None:
        """Answer in place of the app and close the connection."""
        raise NotImplementedError

    def _name(self) -> str:
        return "{}:{}".format(*self.client) if self.client else "a client"

    @override
    def data_received(self, data: bytes) -> None:
        bound, was_in_head, was_in_body = self._bounds.head_bytes, self._in_head, self._in_body
        self._large_piece = len(data) > bound
        self._piece_body = self._begun = 0
        super().data_received(data)
        if self._begun > (not was_in_head and not was_in_body):
            return  # of several messages in one piece the last one's share is not known: its next piece is counted
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > bound:
                self._refuse(self._head_refusal())
        elif self._in_body:
            # what was no body in a piece that lay within a body; of a body with a length there is nothing
            size = len(data) - self._piece_body if was_in_body else max(0, len(data) - self._piece_body - bound)
            self._body_bytes += self._piece_body
            self._framing_bytes += size
            self._framing_since_body = size if self._piece_body else self._framing_since_body + size
            if self._framing_since_body > bound or self._framing_bytes > bound + self._body_bytes:
                framing, body = self._framing_bytes, self._body_bytes
                logger.info("%s: 400, %d bytes frame a body of %d", self._name(), framing, body)
                text = f"The chunks' own bytes, {framing}, are too many for a body of {body} bytes"
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
            self._object(400, "Trailers are not taken: the body ends with its last chunk", "BadRequestError")
        if len(self.headers) >= self._bounds.head_lines:
            self._object(431, f"The request has more than {self._bounds.head_lines} headers", "TooLargeError")
        if name == b"transfer-encoding":
            if value.strip().lower() != b"chunked":
                shown = value[:80].decode("latin-1")
                self._object(501, f"Transfer-Encoding {shown!a} is not taken, only 'chunked'", "BadRequestError")
            version = cast(Any, self.parser).get_http_version()
            if version == "1.0" or any(name == b"transfer-encoding" for name, _ in self.headers):
                self._object(400, "Transfer-Encoding is given twice, or in HTTP/1.0", "BadRequestError")
        elif name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    @override
    def on_headers_complete(self) -> None:
        self._in_head = False
        waiting = len(self.pipeline)
        if waiting >= self._bounds.pipelined:
            logger.info("%s: cut, it sent %d requests ahead of their answers", self._name(), waiting)
            self._object(400, "Too many requests were sent ahead of their answers", "BadRequestError")
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
            self.app, self.url = cast(Any, partial(refuse, reply)), b"/"
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

    # --- refusals --------------------------------------------------------------------------------------------------

    def _object(self, status: int, text: str, error_type: str) -> NoReturn:
        """Stop the parser; `send_400_response` is called then."""
        self._verdict = refusal(status, text, error_type)
        raise _Refused(text)

    @override
    def send_400_response(self, msg: str) -> None:
        self._refuse(self._verdict or refusal(400, msg, "BadRequestError"))

    @override
    def _unsupported_upgrade_warning(self) -> None:
        logger.info("%s: asked to upgrade the protocol, which is not done", self._name())


async def refuse(reply: ErrorReply, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer one thing, whatever is asked, and close the connection after it; an app when its reply is bound."""
    await reply.closing().send(send)


class _Refused(Exception):
    """Ends the parser's work on a message."""
