"""OpenTelemetry helpers: the provider in use, and the attributes of exceptions.

Tags and links are in `utils/links.py`, the encoding of attributes in `utils/attributes.py`; both are exported here.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from opentelemetry import trace as trace_api
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Tracer as SdkTracer

from agentlightning.utils.attributes import (
    check_attributes_sanity,
    filter_and_unflatten_attributes,
    filter_attributes,
    flatten_attributes,
    sanitize_attribute_value,
    sanitize_attributes,
    sanitize_list_attribute_sanity,
    unflatten_attributes,
)
from agentlightning.utils.env import resolve_bool_env_var
from agentlightning.utils.exceptions import message_of, readable
from agentlightning.utils.links import (
    extract_links_from_attributes,
    extract_tags_from_attributes,
    make_link_attributes,
    make_tag_attributes,
    query_linked_spans,
)
from agentlightning.utils.masking import masked

logger = logging.getLogger(__name__)

INSTRUMENTATION_NAME = "agentlightning"
_VARIABLE = "AGL_EMITTER_DEBUG"
_EMITTED = "Emitting span %s: %s"
_SHOWN = 4096
"""Number of characters of a span's attributes that are logged."""

P = TypeVar("P", bound=SpanProcessor)


def full_qualified_name(cls: type[Any]) -> str:
    """Return `module.qualname`, without the module for builtins."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


# --- the provider in use -----------------------------------------------------------------------------------------


def get_tracer_provider(inspect: bool = True) -> trace_api.TracerProvider:
    """Return the global tracer provider; `inspect` logs its processors at DEBUG (see `AGL_EMITTER_DEBUG`).

    Raises:
        RuntimeError: no tracer provider is set.
    """
    provider = trace_api.get_tracer_provider()
    if isinstance(provider, trace_api.ProxyTracerProvider):
        raise RuntimeError(
            "Tracer is not initialized. Cannot emit a meaningful span. "
            "Call tracer.init_worker(...), or set a provider with opentelemetry.trace.set_tracer_provider."
        )
    if not isinstance(provider, TracerProvider):
        logger.error("The tracer provider is not an SDK provider: %s", full_qualified_name(type(provider)))
    elif inspect and emitter_debug():
        for processor in _processors(provider):
            exporter = getattr(processor, "span_exporter", None)
            logger.debug("Tracer provider has %s, exporter %s", type(processor).__name__, type(exporter).__name__)
    return provider


def emitter_debug() -> bool:
    """Return whether to log emitted spans and the provider: `AGL_EMITTER_DEBUG`, else True if this logger is at DEBUG.

    Raises:
        ValueError: the variable is neither true nor false.
    """
    return resolve_bool_env_var(_VARIABLE, fallback=logger.isEnabledFor(logging.DEBUG))


def tell_emitted(source: logging.Logger, name: str, attributes: Mapping[str, object]) -> None:
    """Log an emitted span at DEBUG if enabled. If the variable is set and no handler gets the record, use stderr.

    So `AGL_EMITTER_DEBUG=1` works with any logging configuration of the program.
    """
    has_handler = _is_heard(source)
    if not resolve_bool_env_var(_VARIABLE, fallback=has_handler and logger.isEnabledFor(logging.DEBUG)):
        return
    text = str(masked(attributes))
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
    if has_handler:
        source.debug(_EMITTED, name, shown)
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    handler.handle(source.makeRecord(source.name, logging.DEBUG, __file__, 0, _EMITTED, (name, shown), None))


def _is_heard(source: logging.Logger) -> bool:
    """Return True if a handler gets the DEBUG records of this logger."""
    if not source.isEnabledFor(logging.DEBUG):
        return False
    at: logging.Logger | None = source
    while at is not None:
        if any(handler.level <= logging.DEBUG for handler in at.handlers):
            return True
        at = at.parent if at.propagate else None
    return False


def _processors(provider: TracerProvider) -> tuple[SpanProcessor, ...]:
    chain = getattr(provider, "_active_span_processor", None)
    return tuple(getattr(chain, "_span_processors", ()))


def get_span_processors(provider: trace_api.TracerProvider, processor_type: type[P]) -> list[P]:
    """Return the processors of this type that are attached to the provider."""
    if not isinstance(provider, TracerProvider):
        return []
    return [processor for processor in _processors(provider) if isinstance(processor, processor_type)]


def get_tracer(use_active_span_processor: bool = True) -> trace_api.Tracer:
    """Return the tracer `agentlightning` of the global provider.

    `use_active_span_processor=False` returns a tracer with the same sampler, resource and ids that does not process its
    spans.
    """
    provider = get_tracer_provider()
    if use_active_span_processor or not isinstance(provider, TracerProvider):
        return provider.get_tracer(INSTRUMENTATION_NAME)
    silent = TracerProvider(
        sampler=provider.sampler,
        resource=provider.resource,
        id_generator=provider.id_generator,
        shutdown_on_exit=False,
    )
    return cast(SdkTracer, silent.get_tracer(INSTRUMENTATION_NAME))


# --- exceptions --------------------------------------------------------------------------------------------------


def format_exception_attributes(exception: BaseException) -> dict[str, Any]:
    """Return type, message, `escaped` and, if it has one, the stack trace of an exception as span attributes."""
    exception = readable(exception)
    attributes: dict[str, Any] = {
        "exception.type": type(exception).__name__,
        "exception.message": message_of(exception),
        "exception.escaped": True,
    }
    stack = "".join(traceback.format_exception(type(exception), exception, exception.__traceback__))
    if stack.strip():
        attributes["exception.stacktrace"] = stack
    return attributes


__all__ = [
    "check_attributes_sanity",
    "emitter_debug",
    "tell_emitted",
    "extract_links_from_attributes",
    "extract_tags_from_attributes",
    "filter_and_unflatten_attributes",
    "filter_attributes",
    "flatten_attributes",
    "format_exception_attributes",
    "full_qualified_name",
    "get_span_processors",
    "get_tracer",
    "get_tracer_provider",
    "make_link_attributes",
    "make_tag_attributes",
    "query_linked_spans",
    "sanitize_attribute_value",
    "sanitize_attributes",
    "sanitize_list_attribute_sanity",
    "unflatten_attributes",
]
