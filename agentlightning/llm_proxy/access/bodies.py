"""The body of an agent's request: read within its bound, and unpacked within the same bound where it is compressed.

`gzip` and `deflate` are always unpacked; `zstd` from Python 3.14 on or with the package `backports.zstd`, `br` with
`brotli` (1.2 or later), the first that can bound what comes out. Unpacking stops at the first byte beyond the bound.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import os
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from agentlightning.errors import TooLargeError
from agentlightning.llm_proxy.access.limits import shown
from agentlightning.llm_proxy.replies import CallFailed, ClientLeft, busy
from agentlightning.utils.http.auth import Message, Receive, Scope
from agentlightning.utils.http.byte_budget import ClientLeftError, Hold, read_body

_STEP_BYTES = 512 * 1024
"""What is unpacked before other calls get a turn."""


REST_SECONDS = 5.0
"""Time that the rest of a body has to arrive for its digest, when there is no room to keep it."""
_DIGEST_KEY = os.urandom(32)


class DigestedBody:
    """Receives a body and computes its digest, by which a client's retry with the same bytes is recognised.

    The digest has a key of this process, so that nobody can find the words by it.
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


class _Unpacker(Protocol):
    """Unpacks one body, piece by piece."""

    @property
    def ended(self) -> bool:
        """What was packed is complete."""
        ...

    @property
    def left_over(self) -> bool:
        """There is more behind its end."""
        ...

    def step(self, most: int) -> bytes:
        """Return the next piece, of at most about `most` bytes; empty if there is no more of it.

        Raises:
            Exception: it is broken.
        """
        ...


async def body_of(scope: Scope, receive: Receive, hold: Hold, limit: int) -> bytes:
    """Return the request's body, without its content encoding.

    Raises:
        CallFailed: 413, it is larger than `limit` bytes, packed or not; 415, its encoding is not known here; 400, it
            cannot be unpacked; 429, the attempt or the process holds too many bytes.
        ClientLeft: the connection closed before its end.
    """
    try:
        with busy():
            raw = await read_body(scope, receive, hold, limit)
    except TooLargeError:
        raise _too_large(limit) from None
    except ClientLeftError:
        raise ClientLeft from None
    encodings = [value.decode("latin-1") for name, value in scope["headers"] if name == b"content-encoding"]
    encoding = ", ".join(encodings).strip().lower()
    return raw if encoding in ("", "identity") else await _unpacked(raw, encoding, hold, limit)


async def _unpacked(raw: bytes, encoding: str, hold: Hold, limit: int) -> bytes:
    make = _UNPACKERS.get(encoding)
    if make is None:
        text = f"The content encoding {shown(encoding)} is not known here; known: {', '.join(_UNPACKERS)}"
        raise CallFailed(415, text, code="unsupported_encoding")
    unpacker, body = make(raw), bytearray()
    while not unpacker.ended:
        try:
            part = unpacker.step(min(_STEP_BYTES, limit - len(body) + 1))
        except Exception as error:  # boundary: each library has errors of its own
            raise _broken(encoding, str(error)[:200]) from None
        if len(body) + len(part) > limit:
            raise _too_large(limit)
        if not part and not unpacker.ended:
            raise _broken(encoding, f"it ends early, after {len(body)} bytes of content")
        with busy():
            hold.add(len(part))
        body += part
        await asyncio.sleep(0)
    if unpacker.left_over:
        raise _broken(encoding, "something follows its end")
    return bytes(body)


def _too_large(limit: int) -> CallFailed:
    return CallFailed(413, f"The body is larger than the gateway's limit of {limit} bytes", code="body_too_large")


def _broken(encoding: str, why: str) -> CallFailed:
    return CallFailed(400, f"The body cannot be unpacked as {encoding}: {why}", code="invalid_encoding")


class _Zlib:
    """gzip, or deflate with or without the head that the standard asks for and not every client sends."""

    def __init__(self, raw: bytes, bits: int) -> None:
        self._object, self._rest = zlib.decompressobj(bits), raw

    @property
    def ended(self) -> bool:
        return self._object.eof

    @property
    def left_over(self) -> bool:
        return bool(self._object.unused_data)

    def step(self, most: int) -> bytes:
        part = self._object.decompress(self._rest, most)
        self._rest = self._object.unconsumed_tail
        return part


def _deflate(raw: bytes) -> _Unpacker:
    headed = len(raw) >= 2 and raw[0] & 0x0F == 8 and int.from_bytes(raw[:2]) % 31 == 0
    return _Zlib(raw, zlib.MAX_WBITS if headed else -zlib.MAX_WBITS)


class _Zstd:
    def __init__(self, raw: bytes) -> None:
        self._object, self._rest = _library("zstd", "compression.zstd", "backports.zstd").ZstdDecompressor(), raw

    @property
    def ended(self) -> bool:
        return self._object.eof

    @property
    def left_over(self) -> bool:
        return bool(self._object.unused_data)

    def step(self, most: int) -> bytes:
        given, self._rest = self._rest, b""
        return self._object.decompress(given, most)


class _Brotli:
    def __init__(self, raw: bytes) -> None:
        self._object, self._rest = _library("br", "brotli").Decompressor(), raw
        if not hasattr(self._object, "can_accept_more_data"):
            raise _needs("br", "brotli (1.2 or later)")
        self.left_over = False  # the library refuses it

    @property
    def ended(self) -> bool:
        return self._object.is_finished()

    def step(self, most: int) -> bytes:
        given, self._rest = self._rest, b""
        return self._object.process(given, output_buffer_limit=most)


def _library(encoding: str, *names: str) -> Any:
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise _needs(encoding, names[-1])


def _needs(encoding: str, package: str) -> CallFailed:
    text = f"The content encoding {encoding!r} needs the package {package} beside the gateway; gzip needs none"
    return CallFailed(415, text, code="unsupported_encoding")


_UNPACKERS: dict[str, Callable[[bytes], _Unpacker]] = {
    "gzip": lambda raw: _Zlib(raw, 16 + zlib.MAX_WBITS),
    "x-gzip": lambda raw: _Zlib(raw, 16 + zlib.MAX_WBITS),
    "deflate": _deflate,
    "br": _Brotli,
    "zstd": _Zstd,
}
