"""Dispatch of JSON operations as one ASGI callable: a table of paths, the body, the answer. HTTP itself is uvicorn's.

It serves the hot path at about twice the rate of a routing framework; whatever it does not know goes to `fallback`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl

from pydantic import ValidationError

from agentlightning.errors import BadRequestError, BusyError, StoreUnreachableError, TooLargeError
from agentlightning.utils.asgi_server import STOPPING
from agentlightning.utils.auth import ASGIApp, Receive, Scope, Send
from agentlightning.utils.error_replies import WrongShapeError, describe_error, refusal
from agentlightning.utils.path_table import PathTable

MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_HELD_BYTES = 16 * MAX_BODY_BYTES
_SMALL_BODY = 64 * 1024
_MAX_QUERY_FIELDS = 2000


class UnsupportedMediaError(BadRequestError):
    """The body is in a form that is not taken here (HTTP 415)."""

    http_status = 415


@dataclass(slots=True)
class Request:
    """One request as a handler sees it."""

    path: dict[str, str]
    query: Sequence[tuple[str, str]]
    body: bytes
    token: str | None
    """Value of the header `Idempotency-Key`."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path that is served: a request goes through `read`, `call` and `encode`."""

    method: str
    path: str
    """Segments in braces are parameters; literal segments win over them."""
    read: Callable[[Request], dict[str, Any]]
    """Returns the arguments; raises pydantic's `ValidationError` for a wrong shape."""
    call: Callable[[Request, dict[str, Any]], Awaitable[Any]]
    """Does the work."""
    encode: Callable[[Any], bytes]
    """Returns the JSON of what came of it."""
    status: int = 200
    may_wait: Callable[[dict[str, Any]], bool] | None = None
    """True for arguments with which it may take long: it is then cancelled when the client leaves."""


class JsonDispatch:
    """Serves `endpoints`; anything else goes to `fallback`. Owned by the serving loop.

    A body larger than `max_body_bytes` is refused with 413, and with 429 one that would make more than `max_held_bytes`
    of bodies that are read and worked on at once (small ones are not counted).
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        fallback: ASGIApp,
        *,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_held_bytes: int = MAX_HELD_BYTES,
    ) -> None:
        self.endpoints = tuple(endpoints)
        self._fallback = fallback
        self._max_body, self._max_held = max_body_bytes, max_held_bytes
        self._held_bytes = 0
        self._paths = PathTable((endpoint.path, endpoint.method, endpoint) for endpoint in endpoints)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http":
            return self._fallback(scope, receive, send)
        try:
            methods, parameters = self._paths.find(scope, scope["method"])
        except BadRequestError as error:
            return describe_error(error, _title(scope)).send(send)
        if methods is None:
            return self._fallback(scope, receive, send)
        return self._serve(methods, parameters, scope, receive, send)

    async def _serve(
        self, methods: Mapping[str, Endpoint], parameters: dict[str, str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        method: str = scope["method"]
        endpoint = methods.get(method) or (methods.get("GET") if method == "HEAD" else None)
        if endpoint is None:
            await _answer_other_method(method, methods, send)
            return
        try:
            content = b"" if endpoint.method == "GET" else await self._read(scope, receive)
            body = endpoint.encode(await self._begin(endpoint, parameters, scope, content, receive))
        except _ClientLeftError:
            return
        except Exception as error:  # the boundary: every failure becomes an answer
            await describe_error(error, _title(scope)).send(send)
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": endpoint.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _begin(
        self, endpoint: Endpoint, parameters: dict[str, str], scope: Scope, content: bytes, receive: Receive
    ) -> Awaitable[Any]:
        """Return the work that the request asks for."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        token = headers.get(b"idempotency-key")
        query = _query(scope["query_string"]) if scope["query_string"] else ()
        request = Request(parameters, query, content, None if token is None else token.decode("latin-1"))
        try:
            arguments = endpoint.read(request)
        except ValidationError as error:
            raise WrongShapeError(error, "query" if endpoint.method == "GET" else "body") from None
        work = endpoint.call(request, arguments)
        if len(content) > _SMALL_BODY:
            work = self._holding(len(content), work)
        if endpoint.may_wait is not None and endpoint.may_wait(arguments):
            work = _unless_left(work, receive, scope)
        return work

    async def _holding(self, size: int, work: Awaitable[Any]) -> Any:
        self._held_bytes += size
        try:
            return await work
        finally:
            self._held_bytes -= size

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        declared = headers.get(b"content-length", b"")
        if len(declared) > 7 and declared.isdigit() and int(declared) > self._max_body:
            raise self._too_large()
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise UnsupportedMediaError("This server takes no compressed JSON; send the body without Content-Encoding")
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientLeftError
        body: bytes = message.get("body", b"")
        if message.get("more_body") or len(body) > self._max_body:
            return await self._read_on(body, receive, more=message.get("more_body", False))
        return body

    async def _read_on(self, chunk: bytes, receive: Receive, *, more: bool) -> bytes:
        chunks: list[bytes] = []
        size = 0
        try:
            while True:
                chunks.append(chunk)
                size += len(chunk)
                self._held_bytes += len(chunk)
                if size > self._max_body:
                    raise self._too_large()
                if self._held_bytes > self._max_held:
                    raise BusyError("Too many large requests are under way; send this one again a little later")
                if not more:
                    return b"".join(chunks)
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _ClientLeftError
                chunk, more = message.get("body", b""), message.get("more_body", False)
        finally:
            self._held_bytes -= size

    def _too_large(self) -> TooLargeError:
        return TooLargeError(f"The body is larger than {self._max_body} bytes; send it in smaller parts")


def _title(scope: Scope) -> str:
    """Return what a line of log calls the request."""
    return f"{scope['method']} {scope['path'][:200]!a}"


def _query(raw: bytes) -> list[tuple[str, str]]:
    try:
        text = raw.decode()
        return parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=_MAX_QUERY_FIELDS)
    except UnicodeDecodeError:
        raise BadRequestError("The query is no valid UTF-8") from None
    except ValueError:
        raise BadRequestError(f"The query has more than {_MAX_QUERY_FIELDS} fields; send them in a body") from None


async def _answer_other_method(method: str, methods: Mapping[str, Endpoint], send: Send) -> None:
    """Say which methods there are: 204 to who asks, 405 to who used another."""
    names = sorted({*methods, "OPTIONS", *(("HEAD",) if "GET" in methods else ())})
    allow = (b"allow", ", ".join(names).encode())
    if method == "OPTIONS":
        await send({"type": "http.response.start", "status": 204, "headers": [allow]})
        await send({"type": "http.response.body", "body": b""})
        return
    reply = refusal(405, f"Method Not Allowed: {method}; this path takes {', '.join(names)}", "MethodNotAllowed")
    await replace(reply, extra=(allow,)).send(send)


class _ClientLeftError(Exception):
    """The client closed the connection before it was answered."""


async def _unless_left(awaited: Awaitable[Any], receive: Receive, scope: Scope) -> Any:
    """Await what may take long; cancel it when the client leaves, so that it takes no work with it, and when the server
    stops."""
    work = asyncio.ensure_future(awaited)
    ends: list[asyncio.Future[Any]] = [asyncio.ensure_future(receive())]
    stopping: asyncio.Event | None = scope.get("state", {}).get(STOPPING)
    if stopping is not None:
        ends.append(asyncio.ensure_future(stopping.wait()))
    try:
        await asyncio.wait((work, *ends), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        if stopping is not None and stopping.is_set():
            raise StoreUnreachableError("The server is stopping")
        raise _ClientLeftError
    finally:
        for end in ends:
            end.cancel()
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
