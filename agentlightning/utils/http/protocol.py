"""HTTP/1.1 connections with an end to everything: time a request may take to arrive, time an answer may lie unread,
time a connection may lie idle, number of connections. The sizes of messages are in `messages.py`.

uvicorn speaks the protocol; here is what it leaves without a bound. The hot path pays a few assignments for it: times
are judged by `sweep`, which the server calls for every connection about once a second.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any, cast

from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from agentlightning.utils.http.auth import ASGIApp, Receive, Scope, Send
from agentlightning.utils.http.errors import ErrorReply, refusal
from agentlightning.utils.http.messages import BoundedMessages, HttpBounds, refuse

__all__ = ["BoundedHttp", "HttpBounds"]

logger = logging.getLogger(__name__)

_RESERVE = 64
"""Connections beyond the bound: a question for the health is answered there, all else is told that the server is full.
Further ones are closed without a word."""
_ROOM_MADE = 64
"""The part of the connections, as a divisor, that is closed when there is no room: not one look at all for each."""
_PROGRESS_BYTES = 256 * 1024
"""A client that takes less of its answer within the time for it counts as one that does not read."""
_LINGER_SECONDS = 5.0
_LINGER_BYTES = 4 * 1024 * 1024
"""For how long and how much of a refused request is read on, so that the client gets to read the refusal."""


class BoundedHttp(BoundedMessages):
    """One connection. Owned by the serving loop."""

    def __init__(self, *args: object, bounds: HttpBounds, **kwargs: object) -> None:
        super().__init__(*args, bounds=bounds, **kwargs)
        self._made_at = 0.0
        self._refused_at: float | None = None
        self._discarded = 0
        self._idle: tuple[RequestResponseCycle | None, float] | None = None
        self._unread: tuple[float, int] | None = None

    # --- arrival ---------------------------------------------------------------------------------------------------

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] -- as in uvicorn
        if len(self.connections) >= self._bounds.connections:
            # Close those on which no request is worked on: first those with half a request, the oldest of them first,
            # then idle ones. Whoever sends requests and waits for answers keeps its connection.
            connections = [each for each in cast("set[Any]", self.connections) if isinstance(each, BoundedHttp)]
            others = [other for other in connections if other._running is None and other._is_answered()]
            others.sort(key=lambda other: other._made_at if other._arriving_since is None else other._arriving_since)
            others.sort(key=lambda other: other._arriving_since is None and cast(Any, other.cycle) is not None)
            closed = others[: max(1, self._bounds.connections // _ROOM_MADE)]
            for other in closed:
                other.drop()
                self.connections.discard(other)
            if closed:
                logger.info("closed %d connections that asked for nothing: all were in use", len(closed))
        beyond = len(self.connections) - self._bounds.connections
        super().connection_made(transport)
        self._made_at = self.loop.time()
        if beyond >= _RESERVE:
            transport.abort()
        elif beyond >= 0:
            text = f"The server has its {self._bounds.connections} connections in use; try again later"
            full = partial(refuse, refusal(503, text, "StoreUnreachableError"))
            self.app = cast(Any, partial(_serve_reserved, self.app, self._bounds.reserved_paths, full))

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._release_running()
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        if self._refused_at is None:
            super().data_received(data)
            return
        self._discarded += len(data)
        if self._discarded > _LINGER_BYTES:
            self.transport.abort()

    # --- an end to it ----------------------------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """End the connection if it is beyond one of its times. `now` is the loop's time."""
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
            logger.info("%s: cut, it did not take its answer within %g s", self._name(), self._bounds.unread_seconds)
            self.drop()
            return
        if self._arriving_since is not None:
            if self.flow.read_paused:  # it is the server that waits
                self._arriving_since = now
            if now - self._arriving_since > self._bounds.arrival_seconds:
                logger.info("%s: 408, its request took longer than %g s", self._name(), self._bounds.arrival_seconds)
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
        """True while part of an answer is out and the rest is not."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is not None and cycle.response_started and not cycle.response_complete

    def drop(self) -> None:
        """Close the connection at once; whoever works on its request is told that the client left."""
        self._release_cycle()
        self.transport.abort()

    @override
    def resume_writing(self) -> None:
        self._unread = None  # what was full has drained, whatever is written next
        super().resume_writing()

    def _refuse(self, reply: ErrorReply) -> None:
        """Answer in place of the app, then read on for a while without looking, and close."""
        was_answered = self._in_body and self._is_answered()
        if not self._release_cycle():
            self.transport.abort()
            return
        self._refused_at, self._arriving_since = self.loop.time(), None
        self._in_head = self._in_body = False
        self.headers, self.scope = [], cast(Any, {})
        self._unset_keepalive_if_required()
        if was_answered:  # the answer went out before the whole request was here: one is enough
            self.transport.write_eof()
            return
        headers = (*self.server_state.default_headers, *reply.closing().headers)
        lines = [b"%s: %s\r\n" % header for header in headers]
        self.transport.write(b"".join((STATUS_LINE[reply.status], *lines, b"\r\n", reply.body)))
        self.transport.write_eof()

    def _release_cycle(self) -> bool:
        """Tell the requests in hand that their client left; False if it could not tell whose answer comes next."""
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
    """Serve some paths of an app only; all else gets another app's answer, and the connection ends."""
    await (app if scope["path"] in paths else otherwise)(scope, receive, send)
