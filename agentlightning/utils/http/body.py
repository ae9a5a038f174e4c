"""The body of a request, read with a bound on its size and within the byte budget."""

from __future__ import annotations

from agentlightning.errors import BadRequestError, TooLargeError
from agentlightning.utils.http.auth import Message, Receive, Scope
from agentlightning.utils.http.byte_budget import CLIENT_BYTES, PROCESS, UNCOUNTED_BYTES, ByteBudget, Hold

MAX_BODY_BYTES = 32 * 1024 * 1024


class ClientLeftError(BadRequestError):
    """The client closed the connection before it was answered."""


def client_hold(scope: Scope, budget: ByteBudget = PROCESS) -> Hold:
    """Return the hold of a request whose owner is the address it comes from."""
    client = scope.get("client")
    return budget.hold(client[0] if client else None, CLIENT_BYTES)


async def read_body(scope: Scope, receive: Receive, hold: Hold, limit: int = MAX_BODY_BYTES) -> bytes:
    """Return the body; its bytes are counted in `hold`, which the caller closes at the end of the work.

    Raises:
        TooLargeError: it is, or is said to be, larger than `limit` bytes.
        BusyError: the budget has no room for it.
        ClientLeftError: the connection closed before its end.
    """
    check_length(scope, limit)
    return await read_on(await receive(), receive, hold, limit)


def check_length(scope: Scope, limit: int) -> None:
    """Refuse a body that is said to be larger than the limit, before any of it is read.

    Raises:
        TooLargeError: it is.
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
    """Return the error of a body that is larger than the limit."""
    return TooLargeError(f"The body is larger than {limit} bytes; send it in smaller parts")
