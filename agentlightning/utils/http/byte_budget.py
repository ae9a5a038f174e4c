"""Reads the bodies of requests up to a limit, and limits the bytes that a process holds at a time: in total and for
each owner. All servers of a process share one budget, `PROCESS`, since they share its memory.

Bytes are counted from their arrival until the work on them is done: the read part of an incomplete body, the unpacked
form of a compressed body, and a reply that is kept until it is recorded. A request beyond the budget is rejected with
429 and `Retry-After`, and its bytes are released. `HttpBounds.arrival_seconds` ends connections that send very slowly.
A body of one piece up to `UNCOUNTED_BYTES` is not counted; the limits of connections and calls apply to it.
"""

from __future__ import annotations

import os
import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from types import TracebackType
from typing import Self

from agentlightning.errors import BadRequestError, BusyError, TooLargeError
from agentlightning.utils.http.auth import Message, Receive, Scope

PROCESS_BYTES = 512 * 1024 * 1024
"""Limit of a process: sixteen bodies of the largest size."""
CLIENT_BYTES = 256 * 1024 * 1024
"""Limit of one address that calls a store, an engine or any server other than the gateway."""
ATTEMPT_BYTES = 128 * 1024 * 1024
"""Limit of one attempt at the gateway: four bodies of the largest size."""
UNCOUNTED_BYTES = 64 * 1024
MAX_BODY_BYTES = 32 * 1024 * 1024
_STEP_BYTES = 512 * 1024
"""Number of bytes unpacked at a time."""
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""Content encodings, and zlib's window bits for each."""
_MEMBERS = 1024
"""Maximum number of members of a gzip body, which usually has one."""


class UnsupportedMediaError(BadRequestError):
    """The form or the encoding of a body is not supported (HTTP 415)."""

    http_status = 415


class ClientLeftError(BadRequestError):
    """The client closed the connection before it got a response."""


class ByteBudget:
    """Counts the held bytes. May be used from any thread."""

    def __init__(self, total: int = PROCESS_BYTES) -> None:
        self.total = total
        self._lock = threading.Lock()
        self._by_owner: Counter[Hashable] = Counter()
        self._held = 0
        _budgets.add(self)

    @property
    def held(self) -> int:
        """Number of bytes held now."""
        return self._held

    def hold(self, owner: Hashable, share: int) -> Hold:
        """Return an empty hold; all holds of its owner together may take `share` bytes."""
        return Hold(self, owner, share)

    def add(self, owner: Hashable, share: int, size: int) -> None:
        """Count bytes of an owner.

        Raises:
            BusyError: they exceed a limit; then nothing is counted.
        """
        with self._lock:
            if self._held + size > self.total:
                raise BusyError("Too many large requests are in progress; retry later")
            if self._by_owner[owner] + size > share:
                text = f"Requests of one sender may hold at most {share} bytes at a time; retry when others have ended"
                raise BusyError(text)
            self._held += size
            self._by_owner[owner] += size

    def give_back(self, owner: Hashable, size: int) -> None:
        """Release bytes of an owner."""
        with self._lock:
            self._held -= size
            self._by_owner[owner] -= size
            if self._by_owner[owner] <= 0:
                del self._by_owner[owner]

    def forget(self) -> None:
        """Reset the budget in a forked child, which has none of its parent's requests."""
        self._lock, self._held = threading.Lock(), 0
        self._by_owner.clear()


class Hold:
    """The bytes held by one piece of work. Leaving the block, or `close`, releases them."""

    __slots__ = ("_budget", "_owner", "_share", "size")

    def __init__(self, budget: ByteBudget, owner: Hashable, share: int) -> None:
        self._budget, self._owner, self._share = budget, owner, share
        self.size = 0

    def add(self, size: int) -> None:
        """Hold more bytes.

        Raises:
            BusyError: they exceed a limit.
        """
        self._budget.add(self._owner, self._share, size)
        self.size += size

    def add_value(self, size: int) -> None:
        """Hold more bytes for a decoded value; a value beyond the owner's share may use all free bytes.

        Raises:
            BusyError: they exceed a limit.
        """
        self.add(max(0, min(size, self._share - self.size)))

    def close(self) -> None:
        """Release all bytes; may be called twice."""
        size, self.size = self.size, 0
        if size:
            self._budget.give_back(self._owner, size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


_budgets: weakref.WeakSet[ByteBudget] = weakref.WeakSet()
PROCESS = ByteBudget()
"""The budget of this process."""


def _forget_all() -> None:
    for budget in list(_budgets):
        budget.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def client_hold(scope: Scope, budget: ByteBudget = PROCESS) -> Hold:
    """Return the hold of a request; its owner is the client's address."""
    client = scope.get("client")
    return budget.hold(client[0] if client else None, CLIENT_BYTES)


async def read_body(scope: Scope, receive: Receive, hold: Hold, limit: int = MAX_BODY_BYTES) -> bytes:
    """Return the body; its bytes are counted in `hold`, which the caller closes at the end of the work.

    Raises:
        TooLargeError: the body, or its declared length, is larger than `limit` bytes.
        BusyError: the body exceeds the budget.
        ClientLeftError: the connection closed before the end of the body.
    """
    check_length(scope, limit)
    return await read_on(await receive(), receive, hold, limit)


def check_length(scope: Scope, limit: int) -> None:
    """Reject a body with a declared length above the limit, before any of it is read.

    Raises:
        TooLargeError: the declared length is above `limit` bytes.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value[:20]) > limit:
            raise too_large(limit)


async def read_on(message: Message, receive: Receive, hold: Hold, limit: int) -> bytes:
    """Return the body that begins with a message; see `read_body`."""
    body: bytes | bytearray = message.get("body", b"")
    if not message.get("more_body") and len(body) <= UNCOUNTED_BYTES and message["type"] != "http.disconnect":
        if len(body) > limit:
            raise too_large(limit)
        return bytes(body)
    body = bytearray()
    while True:
        if message["type"] == "http.disconnect":
            raise ClientLeftError("The client closed the connection before the end of its request")
        piece: bytes = message.get("body", b"")
        if len(body) + len(piece) > limit:
            raise too_large(limit)
        hold.add(len(piece))
        body += piece
        if not message.get("more_body"):
            return bytes(body)
        message = await receive()


def too_large(limit: int) -> TooLargeError:
    """Return the error for a body that is larger than the limit."""
    return TooLargeError(f"The body is larger than {limit} bytes; send it in smaller parts")


def unpacked_parts(
    body: bytes, encoding: str, limit: int, encodings: Sequence[str] = tuple(_WINDOW_BITS)
) -> Iterator[bytes]:
    """Yield the parts of a body without its content encoding; unpacking stops at the first byte beyond `limit`.

    Raises:
        UnsupportedMediaError: the encoding is not one of `encodings`.
        TooLargeError: the unpacked body has more than `limit` bytes.
        BadRequestError: the body is invalid, is incomplete, or has data after its end.
    """
    if encoding not in encodings:
        known = ", ".join(map(repr, encodings))
        raise UnsupportedMediaError(f"Unsupported Content-Encoding {encoding[:80]!r}, expected {known} or 'identity'")
    bits, size, members, broken = _WINDOW_BITS[encoding], 0, 0, f"Unable to unpack the {encoding} body"
    if encoding == "deflate" and not (len(body) >= 2 and body[0] & 0x0F == 8 and int.from_bytes(body[:2]) % 31 == 0):
        bits = -bits  # without the header that the standard requires and some clients omit
    while body or not members:
        if members == (1 if encoding == "deflate" else _MEMBERS):
            raise BadRequestError(f"{broken}: unexpected data after its end ({members} members)")
        member = zlib.decompressobj(bits)
        while not member.eof:
            try:
                part = member.decompress(body, min(_STEP_BYTES, limit - size + 1))
            except zlib.error as error:
                raise BadRequestError(f"{broken}: {error}") from error
            size, body = size + len(part), member.unconsumed_tail
            if size > limit:
                raise TooLargeError(f"The body unpacks to more than {limit} bytes; send it in smaller parts")
            if not (member.eof or body or part):
                raise BadRequestError(f"{broken}: it is incomplete, with {size} bytes of content")
            yield part
        body, members = member.unused_data, members + 1
