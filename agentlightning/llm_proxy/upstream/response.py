"""Responses of model servers: a whole one, or a stream that has begun. The server's key is taken out of both."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal

import aiohttp
from typing_extensions import override

from agentlightning.llm_proxy.dialects.chat import DONE
from agentlightning.llm_proxy.dialects.json_values import read_json
from agentlightning.llm_proxy.endpoints.models import ModelEndpoint
from agentlightning.llm_proxy.replies import CallFailed, unusable
from agentlightning.llm_proxy.sse import Frames, FrameTooLarge, data_of
from agentlightning.llm_proxy.upstream.provider_keys import KeyWatch, Secrets

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UpstreamResponse:
    """What came of one try: a response, or the reason why there is none."""

    status: int = 0
    """0 if there is no response."""
    body: bytes = b""
    retry_after: float | None = None
    """Seconds."""
    hid_key: bool = False
    """The server's key was in it; its tokens would spell it."""
    failure: Literal["", "unreachable", "cut", "timeout", "garbage", "not_asked"] = ""
    """`timeout`: that of the endpoint's entry. `not_asked`: it failed on this side, by a missing package or a wrong
    setting; `detail` says how."""
    detail: str = ""

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300 and not self.failure

    @property
    def others_may_serve(self) -> bool:
        """True if another server may do better: this one failed or is busy, and nothing of a reply has come."""
        return self.failure in ("unreachable", "cut", "timeout") or (
            not self.failure and (self.status == 429 or self.status >= 500)
        )

    @property
    def outcome(self) -> str:
        """The failure or the status, for logs and errors."""
        return f"{self.failure} ({self.detail})" if self.failure else f"status {self.status}"


class UpstreamStream(ABC):
    """A stream that a model server has begun. `frames` reads it once; whoever opened it closes it."""

    def __init__(self, endpoint: ModelEndpoint, limit: int) -> None:
        self._endpoint, self._limit = endpoint, limit
        self._watch = KeyWatch(Secrets(endpoint.secrets))
        self._watches = bool(Secrets(endpoint.secrets).keys)

    @property
    def hid_key(self) -> bool:
        """The server's key was in it so far; its tokens would spell it."""
        return self._watch.found

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Give the frames as they come, but for the server's key; one that may be the begin of it waits for the next.

        Raises:
            CallFailed: the connection broke, or the stream is beyond its bound.
        """
        failure: CallFailed | None = None
        try:
            async for frame in self.raw_frames():
                for shown in self._watch.feed(frame) if self._watches else (frame,):
                    yield shown
        except CallFailed as error:
            failure = error
        for shown in self._watch.end():
            yield shown
        if failure is not None:
            raise failure

    @abstractmethod
    def raw_frames(self) -> AsyncGenerator[bytes, None]:
        """Give the frames as the server sends them.

        Raises:
            CallFailed: the connection broke, or the stream is beyond its bound.
        """

    @abstractmethod
    async def close(self) -> None:
        """End the connection; what was not read is not generated."""

    def broken(self, detail: str) -> CallFailed:
        """Return the failure of a stream that broke off."""
        logger.warning("the model server %s broke off its stream: %s", self._endpoint.label, detail)
        return unusable(f"The model server broke off its stream: {detail}")


class HttpStream(UpstreamStream):
    """A stream over HTTP."""

    def __init__(self, response: aiohttp.ClientResponse, endpoint: ModelEndpoint, limit: int) -> None:
        super().__init__(endpoint, limit)
        self._response = response
        self._first = b""

    async def has_begun(self) -> bool:
        """Wait for the first bytes; False if the connection broke before them."""
        try:
            self._first = await self._response.content.readany()
        except (TimeoutError, aiohttp.ClientError, OSError):
            return False
        return bool(self._first)

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        if self._first:
            yield self._first
        async for chunk in self._response.content.iter_any():
            yield chunk

    @override
    async def close(self) -> None:
        self._response.close()

    @override
    async def raw_frames(self) -> AsyncGenerator[bytes, None]:
        frames, size = Frames(self._limit), 0
        try:
            async for chunk in self._chunks():
                size += len(chunk)
                if size > self._limit:
                    raise FrameTooLarge(f"a stream above {self._limit} bytes")
                for frame in frames.feed(chunk):
                    yield frame
        except FrameTooLarge as error:
            raise self.broken(f"{type(error).__name__} after {size} bytes of the stream: {error}") from error
        except (TimeoutError, aiohttp.ClientError, OSError) as error:  # their texts may hold the address
            raise self.broken(f"{type(error).__name__} after {size} bytes of the stream") from error
        # A last frame may say a whole thing though the stream ended before the empty line after it. Any other rest is a
        # part of a frame, which counts for nothing (server-sent events, section 9.2.6).
        data = data_of(frames.rest())
        if data is not None and (data.strip() == DONE or read_json(data) is not None):
            yield frames.rest().rstrip(b"\r\n") + b"\n\n"
