"""Messages and caught exceptions that an agent adds to its trace for people to read."""

from __future__ import annotations

from collections.abc import Mapping

from agentlightning.emitter.annotation import OK, send
from agentlightning.semconv import AGL_EXCEPTION, AGL_MESSAGE, LightningSpanAttributes
from agentlightning.tracer.base import get_active_tracer
from agentlightning.types import SpanLike
from agentlightning.utils.otel import flatten_attributes, format_exception_attributes, sanitize_attributes

BODY = LightningSpanAttributes.MESSAGE_BODY.value


def emit_message(message: str, attributes: Mapping[str, object] | None = None, propagate: bool = True) -> None:
    """Add a text to the trace.

    Raises:
        TypeError: it is not a string.
        RuntimeError: no tracer is active and `propagate` is true.
    """
    if not isinstance(message, str):
        raise TypeError(f"Message must be a string, got: {type(message).__name__}. Use emit_object for other values.")
    payload = {BODY: message, **sanitize_attributes(flatten_attributes(attributes or {}))}
    send(get_active_tracer() if propagate else None, AGL_MESSAGE, payload, None, propagate)


def get_message_value(span: SpanLike) -> str | None:
    """Return the text of a message span; None if it has none.

    Raises:
        TypeError: the body is not a string.
    """
    body = (span.attributes or {}).get(BODY)
    if body is not None and not isinstance(body, str):
        raise TypeError(f"Message body must be a string, got: {type(body).__name__}")
    return body


def emit_exception(
    exception: BaseException, attributes: Mapping[str, object] | None = None, propagate: bool = True
) -> None:
    """Add type, message and stack trace of an exception to the trace. The span itself has status OK.

    Raises:
        TypeError: it is not an exception.
        RuntimeError: no tracer is active and `propagate` is true.
    """
    if not isinstance(exception, BaseException):
        raise TypeError(f"Expected an exception, got: {type(exception).__name__}")
    values = sanitize_attributes(flatten_attributes(attributes or {}))
    payload = {**format_exception_attributes(exception), **values}
    send(get_active_tracer() if propagate else None, AGL_EXCEPTION, payload, OK, propagate)
