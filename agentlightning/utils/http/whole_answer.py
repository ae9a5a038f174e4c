"""An answer that is whole, written in one piece. ASGI takes it as two messages, of which uvicorn makes two writes: two
system calls, which were a seventh of what a small request costs a server."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from agentlightning.utils.http.auth import Send

_Headers = list[tuple[bytes, bytes]]
_written: tuple[_Headers, bytes] = [], b""
"""The headers that a server sends with each answer, as they were last, and how they are written."""


async def send_whole(send: Send, status: int, media_type: bytes, body: bytes) -> None:
    """Answer with a status and a body."""
    cycle = getattr(send, "__self__", None)
    if isinstance(cycle, RequestResponseCycle) and _can_write(cycle):
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        head = b"content-type: %s\r\ncontent-length: %d\r\n\r\n" % (media_type, len(body))
        cycle.transport.write(b"".join((STATUS_LINE[status], _common_headers(cycle.default_headers), head, body)))
        cycle.message_event.set()
        cycle.on_response()
        return
    form = [(b"content-type", media_type), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": form})
    await send({"type": "http.response.body", "body": body})


def _can_write(cycle: RequestResponseCycle) -> bool:
    """True if this answer is like most: uvicorn would wait for nothing, add nothing and log nothing."""
    return (
        cycle.keep_alive
        and not (cycle.response_started or cycle.disconnected or cycle.flow.write_paused or cycle.access_log)
        and cycle.scope["method"] != "HEAD"
    )


def _common_headers(headers: _Headers) -> bytes:
    global _written
    if _written[0] is not headers:  # uvicorn makes a new list each second, for the date in it
        _written = headers, b"".join(b"%s: %s\r\n" % header for header in headers)
    return _written[1]
