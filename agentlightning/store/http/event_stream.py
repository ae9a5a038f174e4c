"""Server-sent events. A client of the event stream receives every change within a tenth of a second.

    id: 41
    event: cursor
    data: {"cursor":"41"}

| event | data |
| --- | --- |
| `cursor` | `{"cursor":"41"}` |
| `rollout` | `{"rollout_id":"ro-...","status":"running",...}` |
| `run` | `{"run_id":"...","state":"running","last_step":7,...}` |
| `worker` | `{"worker_id":"...","status":"busy","current_rollout_id":"ro-...",...}` |
| `resources` | `{"resources_id":"rs-...","version":2,"run_id":"..."}` |
| `lag` | `{"behind":1000}` |

The first message has the cursor at which the stream begins. A client that requests its lists after this message misses
no change. A client that reconnects with the last id (`Last-Event-ID`, or `?after=`) continues there, even after a
restart of the server on a durable store. An event has the current state of its rollout or run, so several changes in
quick succession are one event, and an event can be sent again after a reconnect. Workers and resources are compared
once a second; their current state is sent when a stream begins. `lag` means that at least this number of changes is
pending: a client that shows lists should request them again instead of applying each change.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Final
from urllib.parse import parse_qs

from agentlightning.errors import AgentLightningError, BadRequestError, BusyError, StoreUnreachableError
from agentlightning.store.base import LightningStore
from agentlightning.store.http.operations import PREFIX
from agentlightning.store.http.redaction import hidden
from agentlightning.types import EventPage, ResourcesUpdate, Worker
from agentlightning.utils.http.auth import Receive, Scope, Send
from agentlightning.utils.http.byte_budget import ClientLeftError
from agentlightning.utils.http.dispatch import unless_left
from agentlightning.utils.http.errors import describe_error
from agentlightning.utils.http.uvicorn_server import STOPPING

logger = logging.getLogger(__name__)
EVENTS_PATH = f"{PREFIX}/events"
KEEP_ALIVE_SECONDS = 15.0
_PAUSE_SECONDS = 0.1
"""Seconds between two groups of messages. Changes in between are sent together."""
_PAGE, _LONGEST_CURSOR = 1000, 200
_FULL_RETRY_SECONDS = 5.0
LOOK_SECONDS: Final = 1.0
_MOST_TOLD: Final = 1000
"""Largest number of pending messages for one client. Further messages are sent later."""
_OF_WORKER: Final = ("worker_id", "status", "run_id", "current_rollout_id", "current_attempt_id", "last_busy_time")

Told = tuple[str, dict[str, Any]]
"""Name and data of an event."""


class EventStreams:
    """ASGI app that serves the event streams of one store. It belongs to the event loop of the server.

    Serves at most `limit` streams at the same time; further requests get 429. A stream ends when its client
    disconnects, when the server stops, or with an `error` event when the store fails.
    """

    def __init__(
        self, store: Callable[[], LightningStore], *, limit: int = 256, keep_alive_seconds: float = KEEP_ALIVE_SECONDS
    ) -> None:
        self._store = store
        self._limit = limit
        self._keep_alive = keep_alive_seconds
        self._open = 0
        self._watch = ListWatch(store)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._open >= self._limit:
            text = f"This server already has {self._limit} event streams, which is its limit; retry later"
            await describe_error(BusyError(text, _FULL_RETRY_SECONDS), scope["path"]).send(send)
            return
        self._open += 1
        try:
            try:
                after, filters = _read_request(scope)
                begin = after or (await self._store().query_events(limit=1, **filters)).cursor
                page = await self._store().query_events(after=begin, limit=_PAGE, **filters)
            except Exception as error:  # the boundary: not a stream yet, so an ordinary answer
                await describe_error(error, "GET " + scope["path"]).send(send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            if scope["method"] != "HEAD":
                stream = _Stream(self._store, filters, begin, send, self._watch)
                stopping = scope.get("state", {}).get(STOPPING)
                with contextlib.suppress(ClientLeftError, StoreUnreachableError):
                    await unless_left(stream.run(page, self._keep_alive), receive, stopping)
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._open -= 1


class _Stream:
    """The stream of one client."""

    def __init__(
        self, store: Callable[[], LightningStore], filters: dict[str, Any], cursor: str, send: Send, watch: ListWatch
    ) -> None:
        self._store = store
        self._watch = watch
        self._turn = asyncio.Lock()
        self._lags = False
        self._filters = filters
        self._cursor = cursor
        self._send = send
        self._written = 0.0

    async def run(self, page: EventPage, keep_alive: float) -> None:
        """Send `page` and all later changes, until the store fails."""
        await self._write(_message(self._cursor, "cursor", _json({"cursor": self._cursor})))
        async with self._watch.follow() as lists:
            telling = asyncio.ensure_future(self._tell_lists(lists))
            try:
                await self._tell_changes(page, keep_alive)
            finally:
                telling.cancel()
                await asyncio.gather(telling, return_exceptions=True)

    async def _tell_lists(self, lists: asyncio.Queue[Told]) -> None:
        """Send the changes of workers and resources; pending changes are sent together."""
        while True:
            events = [await lists.get()]
            while not lists.empty():
                events.append(lists.get_nowait())
            if "run_id" in self._filters:
                events = [one for one in events if one[1]["run_id"] == self._filters["run_id"]]
            if events:
                await self._write(b"".join(_message(self._cursor, kind, _json(data)) for kind, data in events))

    async def _tell_changes(self, page: EventPage, keep_alive: float) -> None:
        try:
            while True:
                await self._tell(page)
                await asyncio.sleep(_PAUSE_SECONDS)
                try:
                    page = await self._store().query_events(
                        after=self._cursor, limit=_PAGE, timeout=keep_alive, **self._filters
                    )
                except BusyError as error:
                    await asyncio.sleep(error.retry_after)
                    page = EventPage(events=[], cursor=self._cursor)
                if not page.events and time.monotonic() - self._written >= keep_alive:
                    await self._write(b": keep-alive\n\n")
        except Exception as error:  # the boundary: the answer has begun, so the failure is its last message
            failure = describe_error(error, "a stream of events")
            await self._write(_message(self._cursor, "error", failure.body.decode()))

    async def _tell(self, page: EventPage) -> None:
        """Send a page in one piece. Only the last message has a cursor, so a client that got a part gets all again."""
        page = hidden(page)
        events = [("run", run) for run in page.runs] + [("rollout", event) for event in page.events]
        messages = [_message(self._cursor, kind, event.model_dump_json()) for kind, event in events[:-1]]
        lags, self._lags = self._lags, len(events) >= _PAGE
        if self._lags and not lags:
            messages.insert(0, _message(self._cursor, "lag", _json({"behind": len(events)})))
        if events:
            kind, event = events[-1]
            messages.append(_message(page.cursor, kind, event.model_dump_json()))
        elif page.cursor != self._cursor:
            messages.append(_message(page.cursor, "cursor", _json({"cursor": page.cursor})))
        self._cursor = page.cursor
        if messages:
            await self._write(b"".join(messages))

    async def _write(self, text: bytes) -> None:
        async with self._turn:
            await self._send({"type": "http.response.body", "body": text, "more_body": True})
        self._written = time.monotonic()


_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


def _message(cursor: str, event: str, data: str) -> bytes:
    return f"id: {cursor}\nevent: {event}\ndata: {data}\n\n".encode()


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _read_request(scope: Scope) -> tuple[str | None, dict[str, Any]]:
    """Return the cursor at which to continue, and the filters. A client that reconnects sends its cursor in a header.

    Raises:
        BadRequestError: the cursor has invalid characters.
    """
    query = parse_qs(scope["query_string"].decode("utf-8", "replace"), max_num_fields=20)
    last = dict[bytes, bytes](scope["headers"]).get(b"last-event-id", b"").decode("latin-1")
    after = last or query.get("after", [""])[-1]
    if len(after) > _LONGEST_CURSOR or not after.isprintable():
        raise BadRequestError(f"{after[:50]!a} is not a cursor; use the id of an event of this server")
    return after or None, {"run_id": query["run_id"][-1]} if "run_id" in query else {}


# --- workers and resources ------------------------------------------------------------------------------------------


class ListWatch:
    """Events of workers and resources. Their changes have no numbers, so their lists, which are short, are compared.

    The lists are read once a second for all streams, and only while there are streams.
    """

    def __init__(self, store: Callable[[], LightningStore], *, look_seconds: float = LOOK_SECONDS) -> None:
        self._store = store
        self._look_seconds = look_seconds
        self._followers: set[asyncio.Queue[Told]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._known: dict[tuple[str, str], dict[str, Any]] = {}

    @contextlib.asynccontextmanager
    async def follow(self) -> AsyncGenerator[asyncio.Queue[Told]]:
        """Yield a queue of changes. It begins with the current state of each worker and resource."""
        queue = asyncio.Queue[Told](_MOST_TOLD)
        self._followers.add(queue)
        for item in self._known.items():
            _offer(queue, (item[0][0], item[1]))
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look())
        try:
            yield queue
        finally:
            self._followers.discard(queue)
            if not self._followers and self._looking is not None:
                looking, self._looking = self._looking, None
                self._known = {}
                looking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await looking

    async def _look(self) -> None:
        while True:
            try:
                self._compare(await self._lists())
            except NotImplementedError:
                return  # a store that has no such lists
            except (AgentLightningError, OSError) as error:
                logger.debug("cannot list workers and resources for event streams: %s", error)
            await asyncio.sleep(self._look_seconds)

    async def _lists(self) -> dict[tuple[str, str], dict[str, Any]]:
        store = self._store()
        workers = {("worker", worker.worker_id): _of_worker(worker) for worker in await store.query_workers()}
        return workers | {
            ("resources", update.resources_id): _of_resources(update) for update in await store.query_resources()
        }

    def _compare(self, entries: Mapping[tuple[str, str], dict[str, Any]]) -> None:
        for place, data in entries.items():
            if self._known.get(place) != data:
                for queue in self._followers:
                    _offer(queue, (place[0], data))
        self._known = dict(entries)


def _offer(queue: asyncio.Queue[Told], event: Told) -> None:
    with contextlib.suppress(asyncio.QueueFull):
        queue.put_nowait(event)


def _of_worker(worker: Worker) -> dict[str, Any]:
    return {name: getattr(worker, name) for name in _OF_WORKER}


def _of_resources(update: ResourcesUpdate) -> dict[str, Any]:
    return {"resources_id": update.resources_id, "version": update.version, "run_id": update.run_id}
