"""LightningStoreClient, the client of a store server. Its operations come from the table in `operations.py`."""

# pyright: reportMissingParameterType=false
# The types of an operation's parameters stand in the contract, store/base.py, from where a checker takes them over.

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import threading
import time
import warnings
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any, cast
from urllib.parse import quote, urlsplit

from pydantic_core import PydanticSerializationError
from typing_extensions import override

from agentlightning.errors import WIRE_ERRORS, BadRequestError, ConflictError, StoreUnreachableError
from agentlightning.store.base import LightningStore, LightningStoreCapabilities, call_token
from agentlightning.store.cursors import pages_of
from agentlightning.store.http.operations import OPERATIONS, POLL_SECONDS, PREFIX, Arguments, WireOperation
from agentlightning.store.http.span_changes import CHANGES, spans_of_answer
from agentlightning.store.operations import OPERATIONS as DECLARED
from agentlightning.store.operations import forward_operations, refuse_broken_texts
from agentlightning.store.rules.query import check_page, page_of
from agentlightning.store.rules.values import evolve, to_json, valid
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, EventPage, PaginatedResult, Rollout, Span
from agentlightning.utils.backoff import OUTAGE_SECONDS, Outage, backoff_delay, doubled, retry_after_seconds
from agentlightning.utils.http.auth import auth_headers, server_token
from agentlightning.utils.http.connections import HttpConnections
from agentlightning.utils.id import generate_id
from agentlightning.utils.masking import HIDDEN
from agentlightning.utils.texts import without_password
from agentlightning.utils.version import VERSION, same_major

logger = logging.getLogger(__name__)
CHUNK = 2000
"""Items per request for a list in `_IN_CHUNKS` without a limit."""
_IN_CHUNKS = frozenset(("query_rollouts", "query_spans", "query_run_records"))
"""Lists that can be too long for one response. Other lists are read in one request, as a snapshot."""
_BY_ID = 16
"""Number of rollouts that are requested by id concurrently."""
_RETRIED_STATUS = frozenset((408, 429, 502, 503, 504))
_SHORTEST_TRY = 2.0
_TRIES = 6
"""The first try takes at most the deadline divided by this number; each further try has twice the time."""
_SLOWEST_UPLOAD = 1e6
"""Bytes per second: a large body gets additional time for its upload at this speed."""
_FORMS = {name: each for name, each in DECLARED.items() if each.many is not None and not each.ways}
"""Operations for one object that are sent as their bulk form, which has a default `limit` of 1."""
_ERRORS: dict[str, type[Exception]] = {
    **WIRE_ERRORS,
    "ValueError": ValueError,
    "TypeError": TypeError,
    "NotImplementedError": NotImplementedError,
}
"""Error classes that a server sends by name and that are raised again here."""


class _Retry(Exception):
    """Raised when a try failed and the next one may succeed."""

    def __init__(self, reason: str, pause: float | None = None, *, hung: bool = False) -> None:
        super().__init__(reason)
        self.pause = pause
        self.hung = hung
        """No data arrived on the connection, which may be dead without an error on either side."""


class _NoSuchPath(Exception):
    """Raised when a server of another version does not have the path."""

    def __init__(self, path: str, version: str) -> None:
        super().__init__(path)
        self.version = version


_MOST_ASKERS = 10_000


@refuse_broken_texts
@forward_operations
class LightningStoreClient(LightningStore):
    """The client of a store server, for example at `http://127.0.0.1:4747`. Usable from any thread and event loop.

    A failed request is retried, with growing, jittered pauses, until `deadline` seconds are over, without the time in
    which this process was paused. The default is 60, or the `store_unreachable_timeout` of the runner. Retrying is safe
    because every operation is repeatable or carries a token. Each try gets a part of the deadline, at most
    `request_timeout`, and uses a new connection if the last one may be dead. If you set `retry_delays`, they are the
    pauses, and each try gets `request_timeout`. If a claim gets no response, the worker's next request repeats it with
    the same token. `token` is the token of the server (default `AGL_TOKEN`), `connection_timeout` the seconds to open a
    connection. `endpoint` and `base_url` are aliases of `server_address`. Pickling keeps only the settings.
    """

    def __init__(
        self,
        server_address: str | None = None,
        *,
        retry_delays: Sequence[float] | None = None,
        request_timeout: float = 30.0,
        connection_timeout: float = 5.0,
        deadline: float | None = None,
        token: str | None = None,
        endpoint: str | None = None,
        base_url: str | None = None,
    ) -> None:
        addresses = [address for address in (server_address, endpoint, base_url) if address is not None]
        if len(addresses) != 1:
            raise TypeError("Pass exactly one address, for example LightningStoreClient('http://127.0.0.1:4747')")
        if not addresses[0].startswith(("http://", "https://")):
            raise BadRequestError(
                f"The address of a store server must begin with http:// or https://; got {addresses[0]!r}"
            )
        self.server_address_root = addresses[0].rstrip("/")
        self.server_address = self.server_address_root + PREFIX
        self._shown_address = without_password(self.server_address_root)
        self._settings: dict[str, Any] = {
            "retry_delays": retry_delays,
            "request_timeout": request_timeout,
            "connection_timeout": connection_timeout,
            "deadline": deadline,
            "token": token,
        }
        self._delays = None if retry_delays is None else tuple(retry_delays)
        self._deadline = OUTAGE_SECONDS if deadline is None else deadline
        self._request_timeout = request_timeout
        self._connection_timeout = connection_timeout
        self._token = token or server_token()
        if self._token and "@" in urlsplit(self.server_address_root).netloc:
            where = "token=" if token else "AGL_TOKEN"
            raise BadRequestError(
                f"The address {self._shown_address} has a user, and {where} sets a token, but a request has only one "
                "Authorization header. Use the token for a store server. If a proxy in front of it needs a password, "
                "configure the proxy to send the token."
            )
        self._connections: dict[asyncio.AbstractEventLoop, HttpConnections] = {}
        self._guards: dict[asyncio.AbstractEventLoop, AsyncGenerator[None]] = {}
        self._met = False
        self._lock = threading.Lock()
        self._unanswered: dict[tuple[object, ...], list[str]] = {}
        """Tokens of claim requests without a response, by process and arguments."""

    @override
    def __reduce__(self) -> tuple[object, ...]:
        return partial(LightningStoreClient, self.server_address_root, **self._settings), ()

    def set_default_deadline(self, seconds: float) -> None:
        """Use this deadline if the client was created without one."""
        if self._settings["deadline"] is None:
            self._deadline = seconds

    @property
    @override
    def capabilities(self) -> LightningStoreCapabilities:
        return {"async_safe": True, "thread_safe": True, "zero_copy": True, "otlp_traces": False, "distributed": True}

    @override
    async def close(self) -> None:
        """Close the connections of all event loops."""
        here = asyncio.get_running_loop()
        while self._connections:
            loop, connections = self._connections.popitem()
            if loop is not here and loop.is_running():
                loop.call_soon_threadsafe(connections.close)
            else:
                connections.close()

    async def _call(self, operation: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if (many := _FORMS.get(operation)) is not None:  # it travels in its form for many
            bound = many.signature.bind(None, *args, **kwargs).arguments
            del bound["self"]
            if operation == "enqueue_rollout":
                with valid("the rollout"):
                    bound = {"rollouts": [EnqueueRolloutRequest(**{**bound, "input": to_json(bound["input"])})]}
            answers: Any = await getattr(self, cast("str", many.many))(**bound)
            return next(iter(answers), None)
        if operation not in OPERATIONS:  # it is made of others
            return await getattr(LightningStore, operation)(self, *args, **kwargs)
        row = OPERATIONS[operation]
        arguments = row.bind(args, kwargs)
        if operation == "query_rollouts":
            for old, new in (("status", "status_in"), ("rollout_ids", "rollout_id_in")):
                if old in arguments:
                    warnings.warn(f"{old} is deprecated; use {new} instead", DeprecationWarning, stacklevel=3)
                    arguments.setdefault(new, arguments.pop(old))
        if row.declared.waits:
            return await self._poll(row, arguments)
        if operation == "query_rollouts":
            page = await self._page(row, arguments)
            return page.model_copy(update={"items": await self._with_inputs(page.items)})
        if operation == "update_rollout":
            return (await self._with_inputs([await self._request(row, arguments)]))[0]
        return await self._page(row, arguments) if row.is_page else await self._request(row, arguments)

    async def _page(self, row: WireOperation, arguments: Arguments) -> Any:
        limit, offset = arguments.get("limit", -1), arguments.get("offset", 0)
        if limit not in (0, -1):
            return await self._request(row, arguments)
        if limit == 0:  # the wire has no page without items
            page = await self._request(row, {**arguments, "limit": 1})
            return page.model_copy(update={"items": [], "limit": 0, "cursor": None})
        if row.name not in _IN_CHUNKS:
            return await self._request(row, arguments)
        return await self._chunks(row, arguments, offset)

    async def _chunks(self, row: WireOperation, arguments: Arguments, offset: int) -> Any:
        """Return a list without a limit, in chunks. Rollouts may change meanwhile, so they are read in the order of
        insertion, which skips and repeats none, and sorted here."""
        rest = {name: value for name, value in arguments.items() if name not in ("limit", "offset")}
        sort_by, order = rest.get("sort_by"), rest.get("sort_order", "asc")
        check_page(Rollout, None, -1, offset)
        here = row.name == "query_rollouts" and "cursor" not in rest and order in ("asc", "desc")
        if here:
            sort_by = check_page(Rollout, sort_by, -1, offset)
            rest = {name: value for name, value in rest.items() if name not in ("sort_by", "sort_order")}

        async def ask(**arguments: Any) -> PaginatedResult[Any]:
            return await self._request(row, arguments)

        pages = [page async for page in pages_of(ask, limit=CHUNK, **rest)]
        items = [item for page in pages for item in page]
        items = page_of(items, sort_by, order == "desc", -1, offset)[0] if here else items[offset:]
        return pages[-1].model_copy(update={"items": items, "limit": -1, "offset": offset, "cursor": None})

    async def _with_inputs(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return rollouts with complete inputs and metadata, because lists omit secrets that the program needs."""
        items = list(rollouts)
        places = [at for at, each in enumerate(items) if HIDDEN in str((each.input, each.metadata))]
        for first in range(0, len(places), _BY_ID):
            some = places[first : first + _BY_ID]
            complete = await asyncio.gather(*(self.get_rollout_by_id(items[at].rollout_id) for at in some))
            for at, whole in zip(some, complete, strict=True):
                if whole is not None:
                    items[at] = evolve(items[at], input=whole.input, metadata=whole.metadata)
        return items

    async def _poll(self, row: WireOperation, arguments: Arguments) -> object:
        """Send requests that the server holds open, until there is a result or the timeout is over."""
        waits = row.name == "wait_for_rollouts"
        timeout: float | None = arguments.get("timeout", None if waits else 0.0)
        end = None if timeout is None else time.monotonic() + timeout
        callers = call_token(row.name)
        for chunk in itertools.count():
            wait = POLL_SECONDS if end is None else max(0.0, min(POLL_SECONDS, end - time.monotonic()))
            began = time.monotonic()
            if row.name == "dequeue_many_rollouts" and callers is None:
                result: Any = await self._claim(row, arguments, wait)
            else:  # each chunk is a call of its own: a copy of one that found nothing finds nothing
                token = f"{callers}#{chunk}" if callers and chunk else callers
                result = await self._request(row, {**arguments, "timeout": wait}, wait, token)
            if isinstance(result, EventPage):  # continue at the end of the last page, or changes in between are lost
                arguments, complete = {**arguments, "after": result.cursor}, bool(result.events or result.runs)
            elif waits:
                complete = time.monotonic() - began < wait
            else:  # a copy of a question that found nothing is answered at once, and asks no further
                complete = bool(result) or (callers is not None and timeout is not None and timeout <= POLL_SECONDS)
            if complete or (end is not None and time.monotonic() >= end):
                return result

    async def _claim(self, row: WireOperation, arguments: Arguments, wait: float) -> list[AttemptedRollout]:
        """Request claims once. If the response is lost or the caller stops waiting, the store may have made a claim.
        The worker's next request then has the same token, so that the store returns this claim."""
        request = {name: value for name, value in arguments.items() if name != "timeout"}
        # with the process, so that a copy of the client in a forked one does not repeat its parent's requests
        asker = (os.getpid(), *sorted(request.items()))
        with self._lock:
            token, *others = self._unanswered.pop(asker, None) or [generate_id(32)]
            if others:
                self._unanswered[asker] = others
        try:
            return await self._request(row, {**request, "timeout": wait}, wait, token)
        except (StoreUnreachableError, asyncio.CancelledError):
            with self._lock:
                self._unanswered.setdefault(asker, []).append(token)
                if len(self._unanswered) > _MOST_ASKERS:  # of workers that have not asked again
                    del self._unanswered[next(iter(self._unanswered))]
            raise

    async def _request(
        self, row: WireOperation, arguments: Arguments, wait: float = 0.0, token: str | None = None
    ) -> Any:
        """Send a request that the server can hold open for `wait` seconds."""
        url, body = self._encode(row, dict(arguments))
        headers = {"content-type": "application/json", "x-agl-version": VERSION, **auth_headers(self._token)}
        if row.declared.retry == "token":
            headers["idempotency-key"] = token or call_token(row.name) or generate_id(32)
        sent: Sequence[Span] | None = None
        if row.name == "add_many_spans":
            sent, headers["x-agl-answer"] = tuple(arguments["spans"]), CHANGES
        elif row.name == "add_span":
            sent, headers["x-agl-answer"] = [arguments["span"]], CHANGES
        outage, began, tries, hung = Outage(self._deadline), time.monotonic(), 0, False
        while True:
            tries += 1
            started = time.monotonic()
            limit = wait + self._limit(row, outage.tries + 1, outage.away, body)
            outage.expect(limit)
            try:
                content = await self._try(row.method, url, body, headers, limit, fresh=hung)
                stored = None if sent is None else spans_of_answer(sent, content)
                if stored is None:
                    return row.read_answer(content)
                return stored if row.name == "add_many_spans" else next(iter(stored), None)
            except _NoSuchPath as failure:
                raise NotImplementedError(
                    f"The store at {self._shown_address} does not have the operation {row.name}: it runs "
                    f"agentlightning {failure.version}, and this client runs {VERSION}. Upgrade the server ({failure})."
                ) from None
            except _Retry as failure:
                hung = failure.hung
                pause = failure.pause if failure.pause is not None else backoff_delay(tries, 0.05, 2.0)
                if self._delays is not None:
                    pause = self._delays[tries - 1] if tries <= len(self._delays) else None
                if pause is None or (outage.failed(started + wait, pause) and self._delays is None):
                    spent = time.monotonic() - began
                    raise StoreUnreachableError(
                        f"The store at {self._shown_address} did not respond to {row.name} "
                        f"(tried {tries} times in {spent:.1f} s; last: {failure}). Is the server running there?"
                    ) from failure.__cause__
            await asyncio.sleep(pause)

    def _limit(self, row: WireOperation, tries: int, spent: float, body: bytes | None) -> float:
        """Return the seconds for one try, without the time for which the server can hold the request open."""
        if self._delays is not None or row.declared.slow:
            return self._request_timeout
        first = max(_SHORTEST_TRY, self._deadline / _TRIES)
        growing = doubled(tries, first, max(first, self._deadline - spent))
        return min(self._request_timeout, growing + len(body or b"") / _SLOWEST_UPLOAD)

    def _encode(self, row: WireOperation, arguments: Arguments) -> tuple[str, bytes | None]:
        url = PREFIX + row.path_of(arguments)
        body = _to_json_bytes(arguments.pop(row.declared.body)) if row.declared.body else None
        if row.method == "POST" and row.declared.body is None:
            return url, _to_json_bytes(arguments)
        if arguments:
            url += "?" + "&".join(f"{name}={quote(str(value), safe='')}" for name, value in arguments.items())
        return url, body

    async def _try(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], timeout: float, *, fresh: bool
    ) -> bytes:
        try:
            answer = await self._here().request(method, path, headers, body, timeout, fresh=fresh)
        except TimeoutError as error:
            raise _Retry(f"no response within {timeout:.0f} s", hung=True) from error
        except OSError as error:
            raise _Retry(f"{type(error).__name__}: {error}") from error
        content, version = answer.content, answer.header("x-agl-version")
        if version is not None and not self._met:  # compared once, at the first answer that carries one
            if not same_major(VERSION, version):
                raise ConflictError(
                    f"This client runs agentlightning {VERSION} and the store at {self._shown_address} runs "
                    f"{version}. Install the same version on both sides."
                )
            self._met = True
        if answer.status < 300:
            return content
        if answer.status < 400:
            raise BadRequestError(
                f"The server at {self._shown_address} redirects to {answer.header('location')!r} ({answer.status}). "
                "Use the address of the store itself."
            )
        if answer.status in _RETRIED_STATUS:
            raise _Retry(
                f"HTTP {answer.status}", retry_after_seconds(answer.headers.get(b"retry-after", b"").decode("latin-1"))
            )
        try:
            reply: Any = json.loads(content)
            detail, name = reply["detail"], reply.get("error_type", "")
        except (ValueError, KeyError, TypeError, AttributeError):
            detail, name = content[:500].decode("utf-8", "replace"), ""
        if version is not None and version != VERSION and name in ("NotFound", "MethodNotAllowed"):
            raise _NoSuchPath(f"{method} {path.partition('?')[0]}: HTTP {answer.status}", version)
        text = detail if isinstance(detail, str) else json.dumps(detail)
        if name in _ERRORS:
            raise _ERRORS[name](text)
        if answer.status < 500:
            raise BadRequestError(text)
        raise RuntimeError(f"The store failed ({answer.status} {name}): {text}")

    def _here(self) -> HttpConnections:
        """Return the connections of the running loop."""
        loop = asyncio.get_running_loop()
        connections = self._connections.get(loop)
        if connections is None:
            for other in [other for other in self._connections if other.is_closed()]:
                if (dead := self._connections.pop(other, None)) is not None:
                    dead.close()
                self._guards.pop(other, None)
            connections = HttpConnections(self.server_address_root, connect_seconds=self._connection_timeout)
            self._connections[loop] = connections
            self._guards[loop] = guard = _closed_with_its_loop(connections)
            with contextlib.suppress(StopIteration):  # run it to its yield, at which the loop knows of it
                guard.__anext__().send(None)
        return connections


async def _closed_with_its_loop(connections: HttpConnections) -> AsyncGenerator[None]:
    """Close connections when their loop ends, because `asyncio.run` and `loops.run` then end all started generators."""
    try:
        yield
    finally:
        connections.close()


def _to_json_bytes(value: object) -> bytes:
    if not isinstance(value, dict):
        return _encoded(value, "input")
    named = cast("dict[str, object]", value)
    return b"{%s}" % b",".join(b'"%s":%s' % (name.encode(), _encoded(item, name)) for name, item in named.items())


def _encoded(value: Any, name: str) -> bytes:
    """Return the JSON of an argument. Spans and tasks, which are frequent, have their own serializers."""
    try:
        if value.__class__ in _WRITTEN:
            return _WRITTEN[value.__class__](value)
        if value.__class__ in (list, tuple) and value and _WRITTEN.keys() >= set(map(type, value)):
            return b"[%s]" % b",".join([_WRITTEN[item.__class__](item) for item in value])
    except PydanticSerializationError:  # a value that `to_json` converts, or whose place it reports
        pass
    return json.dumps(to_json(value, name), separators=(",", ":")).encode()


_WRITTEN: dict[type[object], Callable[[Any], bytes]] = {
    Span: partial(Span.__pydantic_serializer__.to_json, exclude_defaults=True),
    EnqueueRolloutRequest: EnqueueRolloutRequest.__pydantic_serializer__.to_json,
}
