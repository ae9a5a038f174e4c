"""The body of an agent's request: read, and decompressed if necessary, up to one size limit.

Decompression stops at the first byte beyond the limit.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from contextlib import suppress

from agentlightning.errors import BadRequestError, TooLargeError
from agentlightning.llm_proxy.replies import CallFailed, busy
from agentlightning.utils.http.auth import Message, Receive, Scope
from agentlightning.utils.http.byte_budget import (
    Hold,
    UnsupportedMediaError,
    read_body,
    unpacked_parts,
)

REST_SECONDS = 5.0
"""Seconds to wait for the rest of a body that is not kept but needs a digest."""
_DIGEST_KEY = os.urandom(32)


class DigestedBody:
    """Receives a body and computes its digest, which identifies a client's retry with the same bytes.

    The digest is keyed with a secret of this process, so that it cannot be used to guess the text.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive, self._hash = receive, hashlib.blake2b(digest_size=16, key=_DIGEST_KEY)
        self._complete = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._hash.update(message.get("body", b""))
            self._complete = not message.get("more_body")
        return message

    async def receive_rest(self) -> None:
        """Receive the rest without keeping it, if it arrives in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REST_SECONDS):
                while not self._complete and (await self.receive())["type"] != "http.disconnect":
                    pass

    def digest(self) -> str | None:
        """Return the digest in hexadecimal; None if the body did not arrive completely."""
        return self._hash.hexdigest() if self._complete else None


async def body_of(scope: Scope, receive: Receive, hold: Hold, limit: int) -> bytes:
    """Return the request's body, without its content encoding.

    Raises:
        CallFailed: 413, it is larger than `limit` bytes, compressed or not; 415, its encoding is not supported; 400,
            it cannot be decompressed; 429, the attempt or the process holds too many bytes.
        ClientLeftError: the connection closed before its end.
    """
    try:
        with busy():
            raw = await read_body(scope, receive, hold, limit)
    except TooLargeError:
        raise _too_large(limit) from None
    encodings = [value.decode("latin-1") for name, value in scope["headers"] if name == b"content-encoding"]
    encoding = ", ".join(encodings).strip().lower()
    return raw if encoding in ("", "identity") else await _unpacked(raw, encoding, hold, limit)


async def _unpacked(raw: bytes, encoding: str, hold: Hold, limit: int) -> bytes:
    body = bytearray()
    try:
        for part in unpacked_parts(raw, encoding, limit):
            with busy():
                hold.add(len(part))
            body += part
            await asyncio.sleep(0)
    except UnsupportedMediaError as error:
        raise CallFailed(415, str(error), code="unsupported_encoding") from None
    except TooLargeError:
        raise _too_large(limit) from None
    except BadRequestError as error:
        raise CallFailed(400, str(error), code="invalid_encoding") from None
    return bytes(body)


def _too_large(limit: int) -> CallFailed:
    return CallFailed(413, f"The body is larger than the gateway's limit of {limit} bytes", code="body_too_large")
