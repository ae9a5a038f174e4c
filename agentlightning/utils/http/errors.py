"""The response to a failed request: `{"detail": ..., "error_type": ...}`, a status, and one log line.

The detail is for the sender of the request. It never has a traceback and does not describe failures of the server,
which are logged once with the traceback.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from agentlightning.base.terminal import shortened
from agentlightning.errors import WIRE_ERRORS, AgentLightningError, BusyError, DamagedRecordError

logger = logging.getLogger(__name__)

MAX_DETAIL = 2000
"""Maximum number of characters of an error message in a response; ids and values in it may be as long as a body."""
_MAX_WRONG_VALUES = 20
"""Number of invalid values of a body to list."""
_RETRY_SECONDS = 1
_PLAIN_ERRORS: dict[type[Exception], int] = {
    NotImplementedError: 501,
    OverflowError: 400,
    TypeError: 400,
    ValueError: 400,
}
"""Standard errors that a request may cause, with their statuses."""


class WrongShapeError(Exception):
    """Raised when a request has values that the operation does not accept; the cause names them."""

    def __init__(self, cause: ValidationError, place: str) -> None:
        super().__init__(str(cause.title))
        self.cause = cause
        self.place = place
        """Place of the values: `body`, `query` or `arguments`."""


class ErrorReply(NamedTuple):
    """The response to a failed request."""

    status: int
    body: bytes
    extra: tuple[tuple[bytes, bytes], ...] = ()
    """Headers in addition to content type and length."""

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """All headers in the form of ASGI."""
        length = str(len(self.body)).encode()
        return [(b"content-type", b"application/json"), (b"content-length", length), *self.extra]

    async def send(self, send: Callable[[MutableMapping[str, Any]], Awaitable[None]]) -> None:
        """Send the response through ASGI."""
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})

    def closing(self) -> ErrorReply:
        """Return the same response, as the last one of its connection."""
        return self._replace(extra=(*self.extra, (b"connection", b"close")))


def error_body(detail: object, error_type: str) -> bytes:
    """Return the JSON form of an error."""
    return json.dumps({"detail": detail, "error_type": error_type}, default=str).encode()


def refusal(status: int, detail: str, error_type: str) -> ErrorReply:
    """Return a rejection; with a `Retry-After` if the status allows a retry."""
    later = ((b"retry-after", str(_RETRY_SECONDS).encode()),) if status in (429, 503) else ()
    return ErrorReply(status, error_body(_cut(detail), error_type), later)


def failure(error: Exception) -> ErrorReply:
    """Return the response to a request that failed because of an error of the server; the log has the details."""
    return ErrorReply(500, error_body("Internal server error", type(error).__name__))


def describe_error(error: Exception, request: str) -> ErrorReply:
    """Return the response to a failed request, and log it: one line, or the traceback for an error of the server."""
    if isinstance(error, ValidationError):  # by the store, which made a value of its own out of an argument
        error = WrongShapeError(error, "arguments")
    if isinstance(error, WrongShapeError):
        details = _wrong_values(error)
        logger.info("%s: 422, invalid values: %.200s", request, details)
        return ErrorReply(422, error_body(details, "ValidationError"))
    status, name = 500, type(error).__name__
    if isinstance(error, AgentLightningError):
        status = error.http_status
        name = next((name for name, cls in WIRE_ERRORS.items() if isinstance(error, cls)), "RuntimeError")
    elif kind := next((kind for kind in _PLAIN_ERRORS if isinstance(error, kind)), None):
        status, name = _PLAIN_ERRORS[kind], kind.__name__
    if status == 500 and not isinstance(error, DamagedRecordError):  # which the store has logged
        logger.error("%s failed", request, exc_info=error)
        return failure(error)
    text = _cut(str(error))
    logger.info("%s: %d %s, %.200r", request, status, name, text)
    reply = refusal(status, text, name)
    if isinstance(error, BusyError):
        return reply._replace(extra=((b"retry-after", str(max(1, round(error.retry_after))).encode()),))
    return reply


def _wrong_values(error: WrongShapeError) -> list[dict[str, Any]]:
    count = error.cause.error_count()
    if count > _MAX_WRONG_VALUES * 50:  # describing each would cost more than the body did
        return [{"type": "too_many_errors", "loc": (error.place,), "msg": f"{count} values are invalid"}]
    details: list[Any] = list(error.cause.errors(include_url=False, include_input=False, include_context=False))
    for detail in details[:_MAX_WRONG_VALUES]:
        detail["loc"] = (error.place, *(_cut(part, 100) if isinstance(part, str) else part for part in detail["loc"]))
        detail["msg"] = _cut(detail["msg"])
    return details[:_MAX_WRONG_VALUES]


def _cut(text: str, limit: int = MAX_DETAIL) -> str:
    return shortened(text, limit)
