"""AgentOps without its service, with the token ids that it would otherwise drop.

Unless `enable_agentops_service()` was called before, `agentops.init` makes no connection: no log-in, no exporter, no
metrics, no upload of the program's output. Its decorators, sessions and instrumentors work unchanged; their spans are
sent to the tracer provider of the program.

With LangChain, chains keep their names and graphs are recorded once. LangChain passes the name of a chain as a keyword
argument, which AgentOps ignores: every chain would be `unknown_chain`, and adapters would find no agent. LangGraph uses
the same callbacks, so its own instrumentor would record every node twice.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any, cast

from opentelemetry import trace as trace_api

from agentlightning.instrumentation.dialects import ReplyTokens, token_attributes
from agentlightning.instrumentation.patching import Original, Patch
from agentlightning.types import Attributes

logger = logging.getLogger(__name__)

_STREAMS = "agentops.instrumentation.providers.openai.stream_wrapper"
_TOKENS = "_agentlightning_tokens"
_service_enabled = False


def enable_agentops_service(enabled: bool = True) -> None:
    """Set whether AgentOps may send to its service (needs a key). Call it before the first `agentops.init`."""
    global _service_enabled
    _service_enabled = enabled


def agentops_service_enabled() -> bool:
    """Return whether AgentOps may send to its service."""
    return _service_enabled


def instrument_agentops() -> bool:
    """Apply the patches; if this version of AgentOps does not support them, log an error and return False."""
    if not _applied(_OFFLINE, "AgentOps could not be patched and may send to its service"):
        return False
    if not _applied(_REPLIES, "AgentOps could not be patched; its spans have no token ids"):
        _OFFLINE.restore()
        return False
    return True


def uninstrument_agentops() -> None:
    """Undo one `instrument_agentops`."""
    _REPLIES.restore()
    _OFFLINE.restore()


def instrument_agentops_langchain() -> bool:
    """Patch the LangChain handler of AgentOps; if it does not support the patch, log an error and return False."""
    return _applied(_LANGCHAIN, "The LangChain handler of AgentOps could not be patched")


def uninstrument_agentops_langchain() -> None:
    """Undo one `instrument_agentops_langchain`."""
    _LANGCHAIN.restore()


def _applied(patch: Patch, failure: str) -> bool:
    try:
        patch.apply()
    except (ImportError, AttributeError) as error:
        logger.error("%s: %s", failure, error)
        return False
    return True


# --- the service -------------------------------------------------------------------------------------------------


def _without_setup(original: Original) -> Original:
    """Replace the setup, in which AgentOps creates a provider, exporters and a meter, and replaces `print`."""

    @functools.wraps(original)
    def setup_telemetry(*args: object, **kwargs: object) -> object:
        if _service_enabled:
            return original(*args, **kwargs)
        return trace_api.get_tracer_provider(), None

    return setup_telemetry


def _without_log_in(original: Original) -> Original:
    @functools.wraps(original)
    def _start_auth_task(client: object, api_key: str) -> None:
        if _service_enabled:
            original(client, api_key)

    return _start_auth_task


def _without_requests(original: Original) -> object:
    """Replace the client for all other requests; a class method of AgentOps."""

    async def async_request(cls: Any, *args: object, **kwargs: object) -> object:
        return await original(*args, **kwargs) if _service_enabled else {}

    return classmethod(async_request)


_OFFLINE = Patch(
    ("agentops.sdk.core", "setup_telemetry", _without_setup),
    ("agentops.client.client", "Client._start_auth_task", _without_log_in),
    ("agentops.client.http.http_client", "HttpClient.async_request", _without_requests),
)


# --- token ids ---------------------------------------------------------------------------------------------------


def _with_tokens(original: Original) -> Original:
    """Add token ids to AgentOps's attributes of a call and its reply."""

    @functools.wraps(original)
    def handle_chat_attributes(
        args: object = None, kwargs: object = None, return_value: object = None, span: object = None
    ) -> Attributes:
        parse = getattr(return_value, "parse", None)  # of a raw HTTP response of the client library
        reply = parse() if callable(parse) and hasattr(return_value, "http_response") else return_value
        attributes = cast(Attributes, original(args=args, kwargs=kwargs, return_value=reply, span=span))
        return {**attributes, **token_attributes(reply)} if reply is not None else attributes

    return handle_chat_attributes


def _collecting_tokens(original: Original) -> Original:
    @functools.wraps(original)
    def _process_chunk(stream: object, chunk: object) -> None:
        if not hasattr(stream, _TOKENS):
            setattr(stream, _TOKENS, ReplyTokens())
        getattr(stream, _TOKENS).add(chunk)
        original(stream, chunk)

    return _process_chunk


def _setting_tokens(original: Original) -> Original:
    @functools.wraps(original)
    def _finalize_stream(stream: Any) -> None:
        tokens = getattr(stream, _TOKENS, None)
        if tokens is not None:
            stream._span.set_attributes(tokens.attributes())
        original(stream)

    return _finalize_stream


_REPLIES = Patch(
    (_STREAMS, "handle_chat_attributes", _with_tokens),
    (_STREAMS, "OpenaiStreamWrapper._process_chunk", _collecting_tokens),
    (_STREAMS, "OpenaiStreamWrapper._finalize_stream", _setting_tokens),
    (_STREAMS, "OpenAIAsyncStreamWrapper._process_chunk", _collecting_tokens),
    (_STREAMS, "OpenAIAsyncStreamWrapper._finalize_stream", _setting_tokens),
)


# --- LangChain ----------------------------------------------------------------------------------------------------


def _named(original: Original) -> Original:
    @functools.wraps(original)
    def on_chain_start(
        handler: object, serialized: Mapping[str, object] | None, inputs: object, **kwargs: object
    ) -> object:
        fields = dict(serialized or {})
        name = kwargs.get("name")
        if isinstance(name, str) and name:
            fields.setdefault("name", name)
        fields.setdefault("id", str(kwargs.get("run_id") or fields.get("name") or "unknown"))
        return original(handler, fields, inputs, **kwargs)

    return on_chain_start


_LANGCHAIN = Patch(
    ("agentops.integration.callbacks.langchain.callback", "LangchainCallbackHandler.on_chain_start", _named),
    (
        "agentops.instrumentation",
        "AGENTIC_LIBRARIES",
        lambda libraries: {name: libraries[name] for name in libraries if name != "langgraph"},
    ),
    ("agentops.instrumentation", "TARGET_PACKAGES", lambda names: names - {"langgraph"}),
)
