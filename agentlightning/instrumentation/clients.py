"""Spans of the model calls of OpenAI's client library, while a trace is open.

Every method of the library (plain, streamed, asynchronous, parsed, `with_raw_response`, the helpers for streams)
uses the method `request` of the client, which is replaced in the classes `OpenAI` and `AsyncOpenAI` and their
subclasses. The request and the reply are read and passed on unchanged, except for one header: a request to the gateway
names the span in which it is made (`traceparent`), which matches both records of the call. No error here is raised in
the program. Outside of a trace context a call costs one read of a context variable.

A span ends with the reply; for a stream, with its last chunk, or when the program closes it or the trace ends. A stream
that was closed early has the text received so far, and no tokens, because there may be more. A call that another
instrumentation records (OpenInference, OpenTelemetry, AgentOps, Logfire) has no second span. A call through the
gateway, which keeps text and tokens according to its settings, has a span without both: it shows in which span of the
program the call was made. Not covered: bodies that a program reads itself from `with_streaming_response`.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import re
import sys
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final, cast

from opentelemetry import trace as trace_api
from opentelemetry.context import get_value
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from agentlightning.instrumentation.dialects import (
    TOKEN_FIELDS,
    Dialect,
    ReplyTokens,
    dialect_of,
    fields_of,
    reply_attributes,
    request_attributes,
    said_attributes,
)
from agentlightning.instrumentation.patching import OnImport, Original
from agentlightning.tracer.provider import own_provider
from agentlightning.tracer.scope import TraceScope, current_scope
from agentlightning.types import Attributes
from agentlightning.utils.exceptions import message_of, readable
from agentlightning.utils.otel import INSTRUMENTATION_NAME, full_qualified_name, sanitize_attributes
from agentlightning.utils.texts import without_keys

logger = logging.getLogger(__name__)

CALL_SPAN: Final = "openai.chat.completion"
"""Name of the span of a call in any dialect, by which adapters find model calls."""
EMBEDDING_SPAN: Final = "openai.embeddings"
_SUPPRESSED: Final = ("suppress_instrumentation", "suppress_language_model_instrumentation")
_OTHERS_PATCH: Final = {
    "/chat/completions": ("openai.resources.chat.completions", "Completions"),
    "/responses": ("openai.resources.responses", "Responses"),
    "/completions": ("openai.resources.completions", "Completions"),
}
"""Module and class with the `create` that other instrumentations wrap, by the end of the route."""
_TRACE_CONTEXT: Final = TraceContextTextMapPropagator()
_GATEWAY: Final = re.compile(r"/rollout/[^/]+/attempt/[^/]+")
_WORDS: Final = re.compile(r"gen_ai\.(?:prompt|completion)\.\d+\.(?!finish_reason)")


def instrument_clients() -> None:
    """Record the calls of the clients from now on. The package is patched when the program imports it."""
    _OPENAI.apply()


def uninstrument_clients() -> None:
    """Undo one `instrument_clients`."""
    _OPENAI.restore()


def _traced(original: Original) -> Original:
    if _is_wrapped(original):  # OpenInference is active already, and makes the span
        return original

    @functools.wraps(original)
    def request(self: object, cast_to: object, options: Any, *args: Any, **kwargs: Any) -> Any:
        call, options = _begun(self, options)
        if call is None:
            return original(self, cast_to, options, *args, **kwargs)
        with call.current():
            reply = original(self, cast_to, options, *args, **kwargs)
        call.replied(reply)
        return reply

    return request


def _traced_async(original: Original) -> Original:
    if _is_wrapped(original):
        return original

    @functools.wraps(original)
    async def request(self: object, cast_to: object, options: Any, *args: Any, **kwargs: Any) -> Any:
        call, options = _begun(self, options)
        if call is None:
            return await original(self, cast_to, options, *args, **kwargs)
        with call.current():
            reply = await original(self, cast_to, options, *args, **kwargs)
        call.replied(reply)
        return reply

    return request


_OPENAI: Final = OnImport(
    "openai", ("openai", "OpenAI.request", _traced), ("openai", "AsyncOpenAI.request", _traced_async)
)


def _begun(client: object, options: Any) -> tuple[_Call | None, Any]:
    """Return the call that begins here (None for a call without a span), and the options of its request."""
    scope = current_scope()
    if scope is None or not _OPENAI.in_use:
        return None, options
    try:
        url = str(options.url)
        dialect = dialect_of(url)
        if dialect is None or str(options.method).lower() != "post" or any(map(get_value, _SUPPRESSED)):
            return None, options
        words = _GATEWAY.search(f"{getattr(client, 'base_url', '')}{url}") is None
        if _others_record(url, type(client).__name__.startswith("Async")):
            return None, options if words else _naming(options, trace_api.get_current_span())
        name = EMBEDDING_SPAN if dialect.kind == "embedding" else CALL_SPAN
        attributes = sanitize_attributes(request_attributes(dialect, fields_of(options.json_data), words=words))
        span = own_provider().get_tracer(INSTRUMENTATION_NAME).start_span(name, attributes=attributes)
        if not span.is_recording():
            return None, options
        return _Call(span, dialect, scope, words), options if words else _naming(options, span)
    except Exception as error:  # boundary: tracing never changes the behaviour of a program
        logger.debug("A model call was not recorded: %r", error)
        return None, options


def _naming(options: Any, span: trace_api.Span) -> Any:
    """Return options of a request that names a span, unless the program already names one."""
    headers: dict[str, Any] = dict(options.headers or ())
    if any(name.lower() == "traceparent" for name in headers):
        return options
    span_headers: dict[str, str] = {}
    _TRACE_CONTEXT.inject(span_headers, trace_api.set_span_in_context(span))
    return options.model_copy(update={"headers": {**headers, **span_headers}})


def _others_record(url: str, is_async: bool) -> bool:
    """True if another instrumentation creates a span of this call."""
    present: Any = getattr(trace_api.get_current_span(), "attributes", None) or {}
    if (
        present.get("gen_ai.operation.name") in ("chat", "text_completion", "embeddings")
        or present.get("llm.request.type") in ("chat", "completion", "embedding")
        or present.get("openinference.span.kind") in ("LLM", "EMBEDDING")
        or ("request_data" in present and "gen_ai.request.model" in present)
    ):
        return trace_api.get_current_span().is_recording()
    path = url.partition("?")[0].rstrip("/")
    module, name = next((place for route, place in _OTHERS_PATCH.items() if path.endswith(route)), ("", ""))
    owner = getattr(sys.modules.get(module), f"Async{name}" if is_async else name, None)
    create = None if owner is None else inspect.getattr_static(owner, "create", None)
    return _is_wrapped(create)


def _is_wrapped(function: object) -> bool:
    """True for a function that `wrapt` has replaced, as instrumentations do."""
    return "wrapt" in type(function).__module__ or "FunctionWrapper" in type(function).__name__


class _Call:
    """A model call in progress and its span. Ends once, whichever thread or task ends it."""

    def __init__(self, span: trace_api.Span, dialect: Dialect, scope: TraceScope, words: bool) -> None:
        self.span, self._dialect, self._scope, self._words = span, dialect, scope, words
        self._known = False
        """True if the rest of a stream is not read."""
        self._chunks = dialect.stream()
        self._tokens = ReplyTokens()
        self._ended = False

    @contextmanager
    def current(self) -> Generator[None]:
        """Make the span the current one for the request; its exception ends the span."""
        try:
            with trace_api.use_span(self.span, record_exception=False, set_status_on_exception=False):
                yield
        except BaseException as error:  # raised again: an interrupt or a cancellation too ends the span
            self.failed(error)
            raise

    # --- how it ends ---------------------------------------------------------------------------------------------

    def replied(self, reply: Any) -> None:
        """Process the reply of the client: complete, raw, or a stream."""
        try:
            if (raw := getattr(reply, "http_response", None)) is not None:
                self._replied_raw(reply, raw)
            elif _is_stream(reply):
                self._watch(reply)
            else:
                self._end(lambda: reply_attributes(self._dialect, reply))
        except Exception as error:  # boundary, as above
            logger.debug("The reply of a model call was not recorded: %r", error)
            self._end(dict)

    def failed(self, error: BaseException) -> None:
        """Record that the call raised."""

        def described() -> Attributes:
            exception = readable(error)
            kind, message = full_qualified_name(type(exception)), without_keys(message_of(exception))
            self.span.add_event("exception", {"exception.type": kind, "exception.message": message})
            self.span.set_status(trace_api.StatusCode.ERROR, f"{type(exception).__name__}: {message}")
            return said_attributes(self._chunks.as_chat())

        self._end(described)

    def left(self) -> None:
        """Record that a stream was closed before its end: its text so far is kept, without the incomplete tokens."""
        self._end(lambda: said_attributes(self._chunks.as_chat()))

    def _streamed(self) -> None:
        self._end(lambda: {**said_attributes(self._chunks.as_chat()), **self._tokens.attributes()})

    def _end(self, attributes: Callable[[], Mapping[str, Any]]) -> None:
        if self._ended:
            return
        self._ended = True
        self._scope.forget_open(self)
        try:
            values = attributes()
            if not self._words:
                values = {
                    key: value for key, value in values.items() if key not in TOKEN_FIELDS and not _WORDS.match(key)
                }
            self.span.set_attributes(sanitize_attributes(dict(values)))
        except Exception as error:  # boundary, as above
            logger.debug("The outcome of a model call was not recorded: %r", error)
        self.span.end()

    # --- raw replies ---------------------------------------------------------------------------------------------

    def _replied_raw(self, reply: Any, raw: Any) -> None:
        """Process a raw reply, which contains the JSON; that of a stream is processed when the program parses it."""
        if getattr(raw, "is_closed", False):
            self._end(lambda: reply_attributes(self._dialect, json.loads(raw.content)))
            return
        self._scope.remember_open(self, self.left)
        kind = cast(Any, type(reply))
        alive, call = weakref.ref(reply), self

        @functools.wraps(kind.parse)
        def parse(*args: Any, **kwargs: Any) -> Any:
            parsed: Any = kind.parse(alive(), *args, **kwargs)
            if inspect.isawaitable(parsed):
                return _then(parsed, call.parsed)
            call.parsed(parsed)
            return parsed

        reply.parse = parse

    def parsed(self, reply: Any) -> None:
        """Process the parsed value of a raw reply; do nothing when called again."""
        if not self._ended and not getattr(reply, "_agentlightning_watched", False):
            self.replied(reply)

    # --- streams -------------------------------------------------------------------------------------------------

    def _watch(self, stream: Any) -> None:
        inner = stream._iterator
        is_async = hasattr(inner, "__anext__")
        stream._iterator = self._watched_async(inner) if is_async else self._watched(inner)
        stream._agentlightning_watched = True
        kind = cast(Any, type(stream))
        alive, call = weakref.ref(stream), self

        @functools.wraps(kind.close)
        def close() -> Any:
            call.left()
            return kind.close(alive())

        stream.close = close
        self._scope.remember_open(self, self.left)

    @contextmanager
    def _reading(self) -> Generator[None]:
        """End the span when the stream that is read in the body ends, for any reason."""
        try:
            yield
            self._streamed()
        except GeneratorExit:
            self.left()
            raise
        except BaseException as error:  # raised again, as above
            self.failed(error)
            raise

    def _watched(self, inner: Any) -> Generator[Any]:
        try:
            with self._reading():
                for chunk in inner:
                    self._took(chunk)
                    yield chunk
        finally:
            if hasattr(inner, "close"):
                inner.close()

    async def _watched_async(self, inner: Any) -> AsyncGenerator[Any]:
        try:
            with self._reading():
                async for chunk in inner:
                    self._took(chunk)
                    yield chunk
        finally:
            if hasattr(inner, "aclose"):
                await inner.aclose()

    def _took(self, chunk: object) -> None:
        if self._known:
            return
        try:
            fields = fields_of(chunk)
            self._chunks.add(fields)
            if self._words:
                self._tokens.add(fields)
            else:
                self._known = bool(self._chunks.as_chat().get("id"))
        except Exception as error:  # boundary, as above
            logger.debug("A chunk of a model call was not recorded: %r", error)


def _is_stream(reply: Any) -> bool:
    return hasattr(reply, "_iterator") and hasattr(reply, "response") and hasattr(reply, "close")


async def _then(awaited: Any, callback: Callable[[Any], None]) -> Any:
    value = await awaited
    callback(value)
    return value
