"""Replies to the agent: a complete one, a stream and its end, and a failure, in the form of the dialect."""

from __future__ import annotations

import json
import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from agentlightning.errors import BusyError
from agentlightning.llm_proxy.access.limits import LONGEST_ERROR, LONGEST_NAME
from agentlightning.semconv import CallState
from agentlightning.utils.http.auth import Send
from agentlightning.utils.http.errors import ErrorReply
from agentlightning.utils.http.protocol import send_whole

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class JsonReply:
    """One HTTP reply with a JSON body."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict[str, str])

    async def send(self, send: Send) -> None:
        if not self.headers:
            await send_whole(send, self.status, b"application/json", self.body)
            return
        headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in self.headers.items()]
        await ErrorReply(self.status, self.body, tuple(headers)).send(send)


class ReplyStream:
    """The stream to the agent: begun at most once, ended by a `StreamEnd`."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False
        self.frames = 0
        """Number of frames sent so far."""

    async def write(self, data: bytes) -> None:
        """Send complete frames of a stream; the first call also sends the head."""
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        if data:
            self.frames += data.count(b"\n\n")
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, last: bytes) -> None:
        """Send the last part."""
        await self.write(b"")
        await self._send({"type": "http.response.body", "body": last})


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """The last part of a stream, sent when the call has been recorded."""

    reply_stream: ReplyStream
    last: bytes

    async def send(self, send: Send) -> None:
        await self.reply_stream.end(self.last)


AgentReply = JsonReply | StreamEnd


class CallFailed(Exception):
    """The call gets no reply of a model. `message` is for the agent's developer, and is also recorded on the span."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        state: CallState = "refused",
        upstream_error: bytes | None = None,
        others_may_serve: bool = False,
    ) -> None:
        message = message if len(message) <= LONGEST_ERROR else f"{message[:LONGEST_ERROR]}..."
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param if param is None or len(param) <= LONGEST_NAME else f"{param[:LONGEST_NAME]}..."
        self.retry_after = retry_after
        """Seconds after which the client may retry."""
        self.state: CallState = state
        self.upstream_error = upstream_error
        """The model server's error body, a JSON object, for an agent that uses the server's dialect."""
        self.others_may_serve = others_may_serve
        """True if the model servers failed (not the request) and no part of a reply has arrived."""

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of the failure."""
        if self.retry_after is None or not math.isfinite(self.retry_after):
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after)))}


@contextmanager
def busy() -> Generator[None, None, None]:
    """Refuse the call if its bytes exceed the budget.

    Raises:
        CallFailed: 429, the attempt or the process holds too many bytes.
    """
    try:
        yield
    except BusyError as error:
        raise CallFailed(429, str(error), code="too_many_bytes", retry_after=error.retry_after) from None


def unusable(message: str) -> CallFailed:
    """Return the failure for an unusable response of a model server (502)."""
    return CallFailed(502, message, code="upstream_unusable", state="upstream_error")


def json_reply(value: object, status: int = 200, headers: dict[str, str] | None = None) -> JsonReply:
    return JsonReply(status, json.dumps(value).encode(), headers or {})
