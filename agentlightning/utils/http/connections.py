"""Persistent connections to one HTTP server; a small request takes a quarter of the time of a general client.
They are for a server of this package (or a proxy in front of it) at a fixed address: without redirects, cookies,
compression, and proxies of the environment.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import socket
import ssl
from collections import deque
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import quote, unquote, urlsplit

import httptools
from typing_extensions import override

from agentlightning.base.terminal import cut
from agentlightning.errors import BadRequestError

_IDLE_SECONDS = 20.0
"""Seconds after which an idle connection is not reused; servers of this package close them after 30."""
_PIECE_BYTES = 1 << 20
"""Size of a piece in which a larger body is written, so that sending it does not block the loop."""
_HEAD_BYTES = 64 * 1024
"""Maximum size of the status line and headers of a response."""


_PIECES = 1024
"""Number of pieces of a response body to keep separately; more are joined, since small pieces take more memory."""


class NotConnectedError(ConnectionError):
    """Raised when no connection to the server exists, so that nothing was sent."""


class BrokenAnswerError(ConnectionError):
    """Raised when the server sent no complete HTTP response; `status` is 0 unless its head arrived."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class CutAnswerError(BrokenAnswerError):
    """Raised when the server closed the connection before the end of its response."""


@dataclass(slots=True)
class Answer:
    """The response of a server."""

    status: int
    headers: dict[bytes, bytes]
    """Values by lower-case name; the last one if a name repeats."""
    content: bytes

    def header(self, name: str) -> str | None:
        """Return the value of a header by its lower-case name; None if it is missing."""
        value = self.headers.get(name.encode())
        return None if value is None else value.decode("latin-1")


class HttpConnections:
    """The connections of one event loop to the server at `address`, each with one request at a time.

    Their number is limited only by the number of callers. Owned by the loop that first uses it, in the process that
    created it.
    """

    def __init__(
        self,
        address: str,
        *,
        connect_seconds: float,
        idle_seconds: float = _IDLE_SECONDS,
        most_bytes: int | None = None,
    ) -> None:
        """Prepare without connecting. A response with a body of more than `most_bytes` is rejected."""
        url = urlsplit(address)
        try:
            self._host, port = (url.hostname or "").encode("idna").decode(), url.port
        except ValueError as error:
            raise BadRequestError(f"{address!r} is not the address of a server: {error}") from error
        self._port = port or (443 if url.scheme == "https" else 80)
        self._connect_seconds, self._idle_seconds, self._most_bytes = connect_seconds, idle_seconds, most_bytes
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._prefix = quote(url.path.rstrip("/"), safe="/%:@!$&'()*+,;=~")
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._head = f"host: {host if port is None else f'{host}:{port}'}\r\naccept-encoding: identity\r\n"
        self._login = ""
        if url.username is not None:
            login = f"{unquote(url.username)}:{unquote(url.password or '')}"
            self._login = f"authorization: Basic {base64.b64encode(login.encode()).decode()}\r\n"
        self._idle: deque[_Connection] = deque()
        self._all: set[_Connection] = set()
        self._closed = False
        self._process = os.getpid()

    async def request(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes | None,
        timeout: float,
        *,
        fresh: bool = False,
    ) -> Answer:
        """Send a request and return the response. `path` is already escaped; `fresh` requires a new connection. An
        `Authorization` header is sent instead of the name and password in the address.

        Raises:
            TimeoutError: no connection within `connect_seconds`, or no response within `timeout` seconds.
            NotConnectedError: the connection could not be opened.
            BrokenAnswerError: the response is not HTTP, is too large, or is incomplete.
            OSError: the connection failed before the response began.
        """
        named = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        length = "" if body is None else f"content-length: {len(body)}\r\n"
        login = self._login
        if login and any(name.lower() == "authorization" for name in headers):
            login = ""
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}{login}{named}{length}\r\n".encode()
        if named.count("\n") != len(headers) or "\n" in path:
            raise BadRequestError("A header of the request contains a line break")
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        connection = None if fresh else self._kept(loop.time())
        if connection is None:
            async with asyncio.timeout(min(timeout, self._connect_seconds)):
                connection = await self._connected(loop)
            connection.owner, connection.most_bytes = self._all, self._most_bytes
            self._all.add(connection)
        timer = loop.call_at(until, connection.expire)
        try:
            answer = await connection.ask(loop, head, body or b"")
        except BaseException:  # a cancelled caller, too: the answer has no receiver
            connection.forget()
            connection.drop()
            raise
        finally:
            timer.cancel()
        connection.forget()
        if connection.is_kept and not fresh and not self._closed:
            connection.idle_since = loop.time()
            self._idle.append(connection)
        else:
            connection.drop()
        return answer

    async def _connected(self, loop: asyncio.AbstractEventLoop) -> _Connection:
        try:
            return (await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls))[1]
        except (TimeoutError, ssl.SSLError):
            raise
        except OSError as error:
            raise NotConnectedError(*error.args) from error

    def _kept(self, now: float) -> _Connection | None:
        while self._idle and now - self._idle[0].idle_since > self._idle_seconds:
            self._idle.popleft().drop()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_kept:
                return connection
        return None

    def close(self) -> None:
        """Close all connections; requests in progress fail. May be called twice, and after the loop has ended.

        A forked process closes its copies, because the parent continues to use the loop's selector, which both share.
        """
        self._closed = True
        self._idle.clear()
        for connection in list(self._all):
            if os.getpid() == self._process:
                connection.drop()
            else:
                connection.let_go()


class _Connection(asyncio.Protocol):
    """One connection, with the callbacks of the parser of its responses."""

    def __init__(self) -> None:
        self._parser: Any = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._waiting: asyncio.Future[Answer] | None = None
        self._room: asyncio.Future[None] | None = None
        """Set while the transport accepts no more data."""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes | bytearray] = []
        self._head_bytes = self._body_bytes = 0
        self._in_body = False
        self.most_bytes: int | None = None
        self.is_kept = True
        """True if another request may be sent after the response to this one."""
        self.idle_since = 0.0
        self.owner: set[_Connection] = set()

    async def ask(self, loop: asyncio.AbstractEventLoop, head: bytes, body: bytes) -> Answer:
        """Send a request and return the response."""
        waiting = self._waiting = loop.create_future()
        if len(body) <= _PIECE_BYTES:
            self._transport.write(head + body)
            return await waiting
        self._transport.write(head)
        for start in range(0, len(body), _PIECE_BYTES):
            self._transport.write(body[start : start + _PIECE_BYTES])
            if self._room is not None:
                await asyncio.wait((self._room, waiting), return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():  # answered, refused perhaps, before all of it was sent
                self.is_kept = False
                break
            await asyncio.sleep(0)
        return await waiting

    def expire(self) -> None:
        """Fail the request, because the time for the response is over."""
        self._fail(TimeoutError("no response in time"))

    def forget(self) -> None:
        """Drop the last response and its future."""
        waiting, self._waiting = self._waiting, None
        self._headers, self._body = {}, []
        if waiting is not None and not waiting.cancel() and not waiting.cancelled():
            waiting.exception()  # nobody may be waiting for it

    def drop(self) -> None:
        """Close the connection immediately."""
        self.is_kept = False
        self.owner.discard(self)
        try:
            self._transport.abort()
        except RuntimeError:  # its loop has ended, and calls nothing any more
            with contextlib.suppress(OSError):
                self._transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    def let_go(self) -> None:
        """Close the copy of the socket in a forked process. Its descriptor then refers to an empty file."""
        self.is_kept = False
        self.owner.discard(self)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), self._transport.get_extra_info("socket").fileno())

    @property
    def _status(self) -> int:
        return cast(int, self._parser.get_status_code())

    def _fail(self, error: Exception) -> None:
        self.is_kept = False
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)

    # --- the transport ---------------------------------------------------------------------------------------------

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    @override
    def data_received(self, data: bytes) -> None:
        if self._waiting is None or self._waiting.done():  # nobody asked: a server says why it closes
            self.drop()
            return
        if not self._in_body:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(BrokenAnswerError(f"not an HTTP response: {error}: {cut(repr(data[:60]), 80)}"))
        except httptools.HttpParserUpgrade:
            self._fail(BrokenAnswerError("the server requested another protocol"))
        if self._head_bytes > _HEAD_BYTES and not self._in_body and not self._waiting.done():
            self._fail(BrokenAnswerError(f"the head of the response has more than {_HEAD_BYTES} bytes"))

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.is_kept = False
        self.owner.discard(self)
        self.resume_writing()
        if exc is None and self._in_body and not {b"content-length", b"transfer-encoding"} & self._headers.keys():
            self.on_message_complete()  # an answer that ends with its connection
        if self._in_body:
            self._fail(
                CutAnswerError(
                    f"the server closed the connection after {self._body_bytes} bytes of the response", self._status
                )
            )
        self._fail(exc if isinstance(exc, OSError) else ConnectionResetError("the server closed the connection"))

    @override
    def pause_writing(self) -> None:
        self._room = asyncio.get_running_loop().create_future()

    @override
    def resume_writing(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    # --- the parser ------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Begin a response; a response without a request makes the connection unusable."""
        self._headers, self._body, self._body_bytes = {}, [], 0
        if self._waiting is None or self._waiting.done():
            self.is_kept = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header; ignore headers after a chunked body."""
        if not self._in_body:
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Prepare for the body."""
        self._in_body = True

    def on_body(self, body: bytes) -> None:
        """Store a part of the body."""
        self._body.append(body)
        self._body_bytes += len(body)
        if len(self._body) > _PIECES:
            whole = self._body[0] if isinstance(self._body[0], bytearray) else bytearray(self._body[0])
            whole += b"".join(self._body[1:])
            self._body = [whole]
        if self.most_bytes is not None and self._body_bytes > self.most_bytes:
            self._body.clear()
            self._fail(BrokenAnswerError(f"the response has more than {self.most_bytes} bytes", self._status))

    def on_message_complete(self) -> None:
        """Complete the response; ignore an interim response (1xx)."""
        self._in_body = False
        self._head_bytes = 0
        status = self._status
        if status >= 200 and self._waiting is not None and not self._waiting.done():
            self.is_kept = self.is_kept and self._parser.should_keep_alive()
            self._waiting.set_result(Answer(status, self._headers, b"".join(self._body)))
