"""Dispatch of JSON operations as one ASGI callable: a table of paths, the body, the answer. HTTP itself is uvicorn's.

It serves the hot path at about twice the rate of a routing framework; whatever it does not know goes to `fallback`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote_to_bytes

from pydantic import ValidationError

from agentlightning.errors import WIRE_ERRORS, AgentLightningError, BusyError, TooLargeError
from agentlightning.utils.auth import ASGIApp, Receive, Scope, Send

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Request:
    """One request as a handler sees it."""

    path: dict[str, str]
    query: list[tuple[str, str]]
    body: bytes
    token: str | None
    """Value of the header `Idempotency-Key`."""


Handler = Callable[[Request], Awaitable[tuple[int, bytes]]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path that is served."""

    method: str
    path: str
    """Segments in braces are parameters; literal segments win over them."""
    handler: Handler
    may_wait: bool = False
    """The handler may take long; it is cancelled when the client leaves."""


class JsonDispatch:
    """Serves `endpoints`; anything else goes to `fallback`."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        fallback: ASGIApp,
        *,
        headers: Sequence[tuple[bytes, bytes]] = (),
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self._fallback = fallback
        self._headers = [(b"content-type", b"application/json"), *headers]
        self._max_body = max_body_bytes
        self._literal: dict[str, dict[str, Endpoint]] = {}
        self._patterns: dict[int, list[tuple[list[str], dict[str, Endpoint]]]] = {}
        for endpoint in endpoints:
            self._add(endpoint)
        for patterns in self._patterns.values():
            patterns.sort(key=lambda pattern: [segment.startswith("{") for segment in pattern[0]])

    def _add(self, endpoint: Endpoint) -> None:
        if "{" not in endpoint.path:
            self._literal.setdefault(endpoint.path, {})[endpoint.method] = endpoint
            return
        segments = endpoint.path.split("/")
        patterns = self._patterns.setdefault(len(segments), [])
        for known, methods in patterns:
            if known == segments:
                methods[endpoint.method] = endpoint
                return
        patterns.append((segments, {endpoint.method: endpoint}))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._fallback(scope, receive, send)
            return
        methods, parameters = self._find(scope)
        if methods is None:
            await self._fallback(scope, receive, send)
            return
        extra: list[tuple[bytes, bytes]] = []
        endpoint = methods.get(scope["method"])
        if endpoint is None:
            status, body = 405, _error_body("Method Not Allowed", "MethodNotAllowed")
            extra.append((b"allow", ", ".join(sorted(methods)).encode()))
        else:
            try:
                status, body = await self._serve(endpoint, parameters, scope, receive)
            except _ClientLeftError:
                return
            except Exception as error:  # the boundary: every failure becomes an answer
                status, body = describe_error(error, f"{scope['method']} {scope['path']}")
                if isinstance(error, BusyError):
                    extra.append((b"retry-after", str(max(1, round(error.retry_after))).encode()))
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": status, "headers": [*self._headers, length, *extra]})
        await send({"type": "http.response.body", "body": body})

    def _find(self, scope: Scope) -> tuple[dict[str, Endpoint] | None, dict[str, str]]:
        """Return the methods of the path that fits best and serves this method, else of one that fits at all."""
        method, literal = scope["method"], self._literal.get(scope["path"])
        if literal is not None and method in literal:
            return literal, {}
        raw = (scope.get("raw_path") or scope["path"].encode()).split(b"?", 1)[0]
        parts = [unquote_to_bytes(part).decode("utf-8", "replace") for part in raw.split(b"/")]
        other = literal
        for segments, methods in self._patterns.get(len(parts), ()):
            if all(s.startswith("{") or s == part for s, part in zip(segments, parts, strict=True)):
                if method in methods:
                    pairs = zip(segments, parts, strict=True)
                    return methods, {s[1:-1]: part for s, part in pairs if s.startswith("{")}
                other = other or methods
        return other, {}

    async def _serve(
        self, endpoint: Endpoint, parameters: dict[str, str], scope: Scope, receive: Receive
    ) -> tuple[int, bytes]:
        body = await self._read(receive)
        token = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"idempotency-key"), None)
        query = parse_qsl(scope["query_string"].decode("utf-8", "replace"), keep_blank_values=True)
        answer = endpoint.handler(Request(parameters, query, body, token))
        return await (_unless_left(answer, receive) if endpoint.may_wait else answer)

    async def _read(self, receive: Receive) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _ClientLeftError
            chunk: bytes = message.get("body", b"")
            size += len(chunk)
            if size > self._max_body:
                raise TooLargeError(f"The body is larger than {self._max_body} bytes; send it in smaller parts")
            chunks.append(chunk)
            if not message.get("more_body"):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)


class _ClientLeftError(Exception):
    """The client closed the connection before it was answered."""


async def _unless_left(answer: Awaitable[tuple[int, bytes]], receive: Receive) -> tuple[int, bytes]:
    """Await an answer that may take long; cancel it when the client leaves, so that it takes no work with it."""
    work = asyncio.ensure_future(answer)
    left = asyncio.ensure_future(receive())
    try:
        await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise _ClientLeftError
    finally:
        for task in (work, left):
            task.cancel()
        await asyncio.gather(work, left, return_exceptions=True)


_PLAIN_ERRORS: dict[type[Exception], int] = {NotImplementedError: 501, TypeError: 400, ValueError: 400}


def describe_error(error: Exception, request: str) -> tuple[int, bytes]:
    """Return status and body of the answer to a request that failed; never a traceback."""
    if isinstance(error, ValidationError):
        details = error.errors(include_url=False, include_input=False, include_context=False)
        for detail in details:
            detail["loc"] = ("body", *detail["loc"])
        return 422, json.dumps({"detail": details, "error_type": "ValidationError"}, default=str).encode()
    if isinstance(error, AgentLightningError):
        name = next((n for n, cls in WIRE_ERRORS.items() if isinstance(error, cls)), "RuntimeError")
        return error.http_status, _error_body(str(error), name)
    for kind, status in _PLAIN_ERRORS.items():
        if isinstance(error, kind):
            return status, _error_body(str(error), kind.__name__)
    logger.exception("%s failed", request)
    return 500, _error_body("Internal server error", type(error).__name__)


def _error_body(detail: str, error_type: str) -> bytes:
    return json.dumps({"detail": detail, "error_type": error_type}).encode()
