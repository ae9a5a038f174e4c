"""What one try at a model server gave: a whole answer or a stream that has begun, never with the server's key in it."""

from __future__ import annotations

import asyncio
import email.utils
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal

import aiohttp
from typing_extensions import override

from agentlightning.llm_proxy.dialects.base import read_json
from agentlightning.llm_proxy.dialects.chat import DONE
from agentlightning.llm_proxy.models import Endpoint
from agentlightning.llm_proxy.replies import CallFailed
from agentlightning.llm_proxy.sse import Frames, FrameTooLarge, data_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one try gave."""

    status: int = 0
    """0 if there is no reply."""
    body: bytes = b""
    retry_after: float | None = None
    """Seconds."""
    trouble: Literal["", "unreachable", "cut", "garbage"] = ""
    detail: str = ""

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300 and not self.trouble


class Opened(ABC):
    """A stream that a model server has begun. `frames` reads it once; whoever opened it closes it."""

    def __init__(self, endpoint: Endpoint, limit: int) -> None:
        self._endpoint, self._limit = endpoint, limit

    @abstractmethod
    def frames(self) -> AsyncGenerator[bytes, None]:
        """Give the frames as they come.

        Raises:
            CallFailed: the connection broke, or the stream is beyond its bound.
        """

    @abstractmethod
    async def close(self) -> None:
        """End the connection; what was not read is not generated."""

    def broken(self, detail: str) -> CallFailed:
        """Return the failure of a stream that broke off."""
        logger.warning("the model server %s broke off its stream: %s", self._endpoint.label, detail)
        return CallFailed(
            502, f"The model server broke off its stream: {detail}", code="upstream_unusable", state="upstream_error"
        )


class OpenedResponse(Opened):
    """A stream over HTTP."""

    def __init__(self, response: aiohttp.ClientResponse, endpoint: Endpoint, limit: int) -> None:
        super().__init__(endpoint, limit)
        self._response = response

    @override
    async def close(self) -> None:
        self._response.close()

    @override
    async def frames(self) -> AsyncGenerator[bytes, None]:
        frames, size = Frames(self._limit), 0
        try:
            async for chunk in self._response.content.iter_any():
                size += len(chunk)
                if size > self._limit:
                    raise FrameTooLarge(f"a stream above {self._limit} bytes")
                for frame in frames.feed(chunk):
                    yield without_secret(frame, self._endpoint.api_key)
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError, FrameTooLarge) as error:
            raise self.broken(f"{type(error).__name__} after {size} bytes of the stream: {error}") from error
        if _lacks_only_its_end(frames.rest()):
            yield without_secret(frames.rest().rstrip(b"\r\n") + b"\n\n", self._endpoint.api_key)


def _lacks_only_its_end(rest: bytes) -> bool:
    """True for a last frame that says a whole thing, though the stream ended before the empty line after it.

    Any other rest is a part of a frame, which counts for nothing (server-sent events, section 9.2.6).
    """
    data = data_of(rest)
    return data is not None and (data.strip() == DONE or read_json(data) is not None)


def without_secret(body: bytes, api_key: str | None) -> bytes:
    """A server that repeats its key must not hand it to the agent."""
    return body.replace(api_key.encode(), b"[redacted]") if api_key else body


def retry_after_seconds(value: str | None) -> float | None:
    """Read a `Retry-After` header, in seconds or as a date; None if there is none that can be read."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
