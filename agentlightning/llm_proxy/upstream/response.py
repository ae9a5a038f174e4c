"""Responses of model servers: a complete one, or a stream that has begun. The server's key is removed from both."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from agentlightning.llm_proxy.dialects.chat import DONE
from agentlightning.llm_proxy.dialects.json_values import read_json
from agentlightning.llm_proxy.endpoints.models import ModelEndpoint
from agentlightning.llm_proxy.replies import CallFailed, unusable
from agentlightning.llm_proxy.sse import Frames, FrameTooLarge, data_of
from agentlightning.llm_proxy.upstream.provider_keys import KeyWatch, secrets_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UpstreamResponse:
    """The result of one try: a response, or the reason why there is none."""

    status: int = 0
    """HTTP status; 0 if there is no response."""
    body: bytes = b""
    retry_after: float | None = None
    """Seconds after which the server may be tried again."""
    hid_key: bool = False
    """True if the server's key was removed from it; its tokens would reveal the key."""
    failure: Literal["", "unreachable", "cut", "timeout", "garbage", "not_asked"] = ""
    """`timeout`: the time limit in the endpoint's entry. `not_asked`: the server was not called, because of a missing
    package or a wrong setting; `detail` has the reason."""
    detail: str = ""

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300 and not self.failure

    @property
    def others_may_serve(self) -> bool:
        """True if another server may succeed: this one failed or is busy, and no part of a reply has arrived."""
        return self.failure in ("unreachable", "cut", "timeout") or (
            not self.failure and (self.status == 429 or self.status >= 500)
        )

    @property
    def outcome(self) -> str:
        """The failure or the status, for logs and errors."""
        return f"{self.failure} ({self.detail})" if self.failure else f"status {self.status}"


NOT_BEGUN = UpstreamResponse(200, failure="cut", detail="before the first frame of a stream")


class BrokenStreamError(Exception):
    """A stream was interrupted; the message has the reason, without keys and addresses."""


class UpstreamStream:
    """A stream that a model server has begun; `pieces` raise `BrokenStreamError` if it is interrupted.

    `frames` reads it once. Close it, so that the server does not generate the unread rest.
    """

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        endpoint: ModelEndpoint,
        limit: int,
        close: Callable[[], Awaitable[None] | None],
    ) -> None:
        self._pieces, self._endpoint, self._limit, self._close = pieces, endpoint, limit, close
        self._first: bytes | None = None
        secrets = secrets_of(endpoint)
        self._watch, self._watches = KeyWatch(secrets), bool(secrets.keys)

    @property
    def hid_key(self) -> bool:
        """True if the server's key was removed from it so far; its tokens would reveal the key."""
        return self._watch.hid_key

    async def begin(self) -> bool:
        """Wait for the first piece. If the stream ends before it, close it and return False.

        Raises:
            BrokenStreamError: it was interrupted before the first piece.
        """
        try:
            self._first = await anext(self._pieces, None)
        finally:
            if self._first is None:
                await self.close()
        return self._first is not None

    async def close(self) -> None:
        """Close the connection."""
        if (closing := self._close()) is not None:
            await closing

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the frames as they arrive, without the server's key; one that may begin the key waits for the next one.

        Raises:
            CallFailed: the connection was interrupted, or the stream exceeds its limit.
        """
        failure: CallFailed | None = None
        try:
            async for frame in self._raw_frames():
                for visible in self._watch.feed(frame) if self._watches else (frame,):
                    yield visible
        except CallFailed as error:
            failure = error
        for visible in self._watch.end():
            yield visible
        if failure is not None:
            raise failure

    async def _raw_frames(self) -> AsyncGenerator[bytes, None]:
        size, frames, piece = 0, Frames(self._limit), self._first
        try:
            while piece is not None:
                size += len(piece)
                if size > self._limit:
                    raise FrameTooLarge(f"a stream of more than {self._limit} bytes")
                for frame in frames.feed(piece):
                    yield frame
                piece = await anext(self._pieces, None)
        except FrameTooLarge as error:
            raise self.broken(f"{type(error).__name__} after {size} bytes of the stream: {error}") from error
        except BrokenStreamError as error:
            raise self.broken(f"{error} after {size} bytes of the stream") from error
        # A last frame may be complete though the stream ended before the empty line after it. Any other rest is a
        # part of a frame, which is ignored (server-sent events, section 9.2.6).
        data = data_of(frames.rest())
        if data is not None and (data.strip() == DONE or read_json(data) is not None):
            yield frames.rest().rstrip(b"\r\n") + b"\n\n"

    def broken(self, detail: str) -> CallFailed:
        """Return the failure for a stream that was interrupted."""
        logger.warning("the stream of the model server %s was interrupted: %s", self._endpoint.label, detail)
        return unusable(f"The stream of the model server was interrupted: {detail}")
