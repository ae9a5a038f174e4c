"""Dispatch of JSON operations as one ASGI callable: a table of paths, the body, the response. uvicorn handles HTTP.

It serves the hot path at about twice the rate of a routing framework; `fallback` serves all other paths.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qsl, unquote_to_bytes

from pydantic import ValidationError

from agentlightning.errors import BadRequestError, StoreUnreachableError
from agentlightning.utils.http.auth import ASGIApp, Receive, Scope, Send
from agentlightning.utils.http.byte_budget import (
    MAX_BODY_BYTES,
    PROCESS,
    ByteBudget,
    ClientLeftError,
    UnsupportedMediaError,
    check_length,
    client_hold,
    read_on,
)
from agentlightning.utils.http.errors import WrongShapeError, describe_error, refusal
from agentlightning.utils.http.protocol import send_whole
from agentlightning.utils.http.uvicorn_server import STOPPING, StopSignal

_MAX_QUERY_FIELDS = 2000

E = TypeVar("E")
T = TypeVar("T")


@dataclass(slots=True)
class Request:
    """A request to a handler."""

    path: dict[str, str]
    query: Sequence[tuple[str, str]]
    body: bytes
    token: str | None
    """Value of the header `Idempotency-Key`."""
    version: str | None = None
    """Value of the header `X-AGL-Version`, which the clients of this package send."""
    answer: bytes | None = None
    """Value of the header `X-AGL-Answer`: the requested form of the response."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One served path: a request is processed by `read`, `call` and `encode`."""

    method: str
    path: str
    """Path; segments in braces are parameters, and literal segments take precedence over them."""
    read: Callable[[Request], dict[str, Any]]
    """Returns the arguments; raises pydantic's `ValidationError` for a wrong shape."""
    call: Callable[[Request, dict[str, Any]], Awaitable[Any]]
    """Does the work."""
    encode: Callable[[Any], bytes]
    """Returns the JSON of the result."""
    status: int = 200
    may_wait: Callable[[dict[str, Any]], bool] | None = None
    """Returns True if the call may take long with these arguments; it is then cancelled when the client leaves."""


class JsonDispatch:
    """Serves `endpoints`; `fallback` serves all other paths. Owned by the serving loop.

    A body larger than `max_body_bytes` is rejected with 413, a body beyond the byte budget with 429.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        fallback: ASGIApp,
        *,
        max_body_bytes: int = MAX_BODY_BYTES,
        budget: ByteBudget = PROCESS,
    ) -> None:
        self.endpoints = tuple(endpoints)
        self._fallback = fallback
        self._max_body, self._budget = max_body_bytes, budget
        self._paths = PathTable((e.path, e.method, e) for e in endpoints)

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
        headers: dict[bytes, bytes] = dict(scope["headers"])
        token, version = headers.get(b"idempotency-key"), headers.get(b"x-agl-version")
        try:
            with client_hold(scope, self._budget) as hold:
                content = b""
                if endpoint.method != "GET":
                    check_length(scope, self._max_body)
                    if headers.get(b"content-encoding", b"identity") != b"identity":
                        text = "This server does not accept compressed JSON; send the body without Content-Encoding"
                        raise UnsupportedMediaError(text)
                    content = await read_on(await receive(), receive, hold, self._max_body)
                request = Request(
                    parameters,
                    _query(scope["query_string"]) if scope["query_string"] else (),
                    content,
                    None if token is None else token.decode("latin-1"),
                    None if version is None else version.decode("latin-1"),
                    headers.get(b"x-agl-answer"),
                )
                try:
                    arguments = endpoint.read(request)
                except ValidationError as error:
                    raise WrongShapeError(error, "query" if endpoint.method == "GET" else "body") from None
                work = endpoint.call(request, arguments)
                if endpoint.may_wait is not None and endpoint.may_wait(arguments):
                    work = unless_left(work, receive, scope.get("state", {}).get(STOPPING))
                body = endpoint.encode(await work)
        except ClientLeftError:
            return
        except Exception as error:  # the boundary: every failure becomes an answer
            await describe_error(error, _title(scope)).send(send)
            return
        await send_whole(send, endpoint.status, b"application/json", body)


# --- which endpoint serves a path -----------------------------------------------------------------------------------


class PathTable(Generic[E]):
    """Endpoints by path and method. Literal segments precede parameters; an escaped slash belongs to its segment."""

    def __init__(self, endpoints: Iterable[tuple[str, str, E]]) -> None:
        self._literal: dict[str, dict[str, E]] = {}
        self._shapes: dict[int, list[_Shape[E]]] = {}
        shapes: dict[tuple[int, tuple[int, ...]], _Shape[E]] = {}
        for path, method, endpoint in endpoints:
            if "{" in path:
                segments = path.split("/")
                form = len(segments), tuple(i for i, segment in enumerate(segments) if segment.startswith("{"))
                shapes.setdefault(form, _Shape(*form)).add(path, method, endpoint)
            else:
                self._literal.setdefault(path, {})[method] = endpoint
        for form in sorted(shapes):
            self._shapes.setdefault(form[0], []).append(shapes[form])

    def find(self, scope: Scope, method: str) -> tuple[dict[str, E] | None, dict[str, str]]:
        """Return the methods of the best matching path that serves this method, else of any matching path, and the
        values of its parameters. HEAD is served like GET.

        Raises:
            BadRequestError: the path is not valid UTF-8.
        """
        path: str = scope["path"]
        raw: bytes = scope.get("raw_path") or b""
        parts: list[str] | None = None
        words: list[str] | None = None
        if b"%" in raw:  # an escaped segment is a value, even if it is equal to a word of a path
            written = raw.split(b"?", 1)[0].split(b"/")
            parts = [_text(part) for part in written]
            words = ["" if b"%" in part else part.decode("latin-1") for part in written]
            path = "" if "" in words[1:] else path
        other = self._literal.get(path)
        if other is not None and method in other:
            return other, {}
        parts = parts or path.split("/")
        words = words or parts
        for shape in self._shapes.get(len(parts), ()):
            match = shape.table.get(shape.literals(words))
            if match is not None:
                methods, names = match
                if method in methods or (method == "HEAD" and "GET" in methods):
                    return methods, {name: parts[index] for name, index in names}
                other = other or methods
        return other, {}


class _Shape(Generic[E]):
    """Paths with the same length and parameters at the same positions, by their other segments."""

    __slots__ = ("literals", "parameters", "table")

    def __init__(self, length: int, parameters: tuple[int, ...]) -> None:
        self.parameters = parameters
        self.literals = itemgetter(*(index for index in range(length) if index not in parameters))
        self.table: dict[tuple[str, ...], tuple[dict[str, E], list[tuple[str, int]]]] = {}

    def add(self, path: str, method: str, endpoint: E) -> None:
        segments = path.split("/")
        names = [(segments[index][1:-1], index) for index in self.parameters]
        methods, existing = self.table.setdefault(self.literals(segments), ({}, names))
        assert existing == names, f"{path} has other parameter names than the same path with another method"
        methods[method] = endpoint


def _text(part: bytes) -> str:
    try:
        return unquote_to_bytes(part).decode()
    except UnicodeDecodeError:
        raise BadRequestError("The path is not valid UTF-8") from None


# --- requests and answers -------------------------------------------------------------------------------------------


def _title(scope: Scope) -> str:
    """Return the name of the request for a log line."""
    return f"{scope['method']} {scope['path'][:200]!a}"


def _query(raw: bytes) -> list[tuple[str, str]]:
    try:
        text = raw.decode()
        return parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=_MAX_QUERY_FIELDS)
    except UnicodeDecodeError:
        raise BadRequestError("The query is not valid UTF-8") from None
    except ValueError:
        raise BadRequestError(f"The query has more than {_MAX_QUERY_FIELDS} fields; send them in a body") from None


async def _answer_other_method(method: str, methods: Mapping[str, Endpoint], send: Send) -> None:
    """Respond with the supported methods: 204 for OPTIONS, 405 for an unsupported method."""
    names = sorted({*methods, "OPTIONS", *(("HEAD",) if "GET" in methods else ())})
    allow = (b"allow", ", ".join(names).encode())
    if method == "OPTIONS":
        await send({"type": "http.response.start", "status": 204, "headers": [allow]})
        await send({"type": "http.response.body", "body": b""})
        return
    reply = refusal(405, f"Method Not Allowed: {method}; this path accepts {', '.join(names)}", "MethodNotAllowed")
    await reply._replace(extra=(allow,)).send(send)


async def unless_left(awaited: Awaitable[T], receive: Receive, stopping: StopSignal | None = None) -> T:
    """Await a result; cancel the work when the client leaves, and when the server stops if `stopping` is given.

    Raises:
        ClientLeftError: the client left.
        StoreUnreachableError: the server is stopping.
    """
    here = asyncio.current_task()
    assert here is not None
    cancelled_by: list[object] = []

    def cancel(by: object) -> None:
        if not cancelled_by:
            cancelled_by.append(by)
            here.cancel()

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    departure = asyncio.ensure_future(left())
    departure.add_done_callback(cancel)
    try:
        with contextlib.nullcontext() if stopping is None else stopping.calling(cancel):
            return await awaited
    except asyncio.CancelledError:
        if not cancelled_by or here.uncancel() > 0:  # somebody else cancels this task, too
            raise
        if cancelled_by[0] is stopping:
            raise StoreUnreachableError("The server is stopping") from None
        raise ClientLeftError("The client closed the connection before it got a response") from None
    finally:
        departure.remove_done_callback(cancel)
        departure.cancel()
