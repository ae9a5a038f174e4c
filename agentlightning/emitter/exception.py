"""Exceptions that an agent has caught and wants to leave on its trace."""

from __future__ import annotations

from collections.abc import Mapping

from agentlightning.emitter.annotation import OK, send
from agentlightning.semconv import AGL_EXCEPTION
from agentlightning.tracer.base import get_active_tracer
from agentlightning.utils.otel import flatten_attributes, format_exception_attributes, sanitize_attributes


def emit_exception(
    exception: BaseException, attributes: Mapping[str, object] | None = None, propagate: bool = True
) -> None:
    """Leave type, message and stack trace of an exception on the trace. The span itself has status OK.

    Raises:
        TypeError: it is no exception.
        RuntimeError: no tracer is active and `propagate` is true.
    """
    if not isinstance(exception, BaseException):
        raise TypeError(f"Expected an exception, got: {type(exception).__name__}")
    given = sanitize_attributes(flatten_attributes(attributes or {}))
    payload = {**format_exception_attributes(exception), **given}
    send(get_active_tracer() if propagate else None, AGL_EXCEPTION, payload, OK, propagate)
