"""Model servers that only LiteLLM can reach: a chat completion through its library, with our types.

The library is configured to try once: the gateway handles retries, limits and the record. In its calls, settings
(address and key) and fields of a request are in one namespace, so only known request fields are accepted from the
agent.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any, Final

from agentlightning.llm_proxy.dialects.chat import DONE
from agentlightning.llm_proxy.dialects.json_values import json_bytes, read_json
from agentlightning.llm_proxy.endpoints.engines import litellm_library
from agentlightning.llm_proxy.endpoints.models import ModelEndpoint
from agentlightning.llm_proxy.sse import frame_of
from agentlightning.llm_proxy.upstream.provider_keys import secrets_of
from agentlightning.llm_proxy.upstream.response import NOT_BEGUN, BrokenStreamError, UpstreamResponse, UpstreamStream
from agentlightning.utils.backoff import retry_after_seconds

logger = logging.getLogger(__name__)

_REQUEST = (
    *("model", "messages", "stream", "stream_options", "n", "stop", "user", "seed", "max_tokens"),
    *("max_completion_tokens", "temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("logprobs", "top_logprobs", "response_format", "tools", "tool_choice", "parallel_tool_calls", "functions"),
    *("function_call", "modalities", "audio", "prediction", "reasoning_effort", "thinking", "verbosity"),
)
_UNREACHED: Final = {
    "aiohttp": ("ClientConnectionError",),
    "botocore": ("HTTPClientError",),
    "httpcore": ("NetworkError", "TimeoutException"),
    "httpx": ("NetworkError", "TimeoutException", "ProtocolError"),
    "httpx2": ("NetworkError", "TimeoutException", "ProtocolError"),
    "litellm": ("Timeout",),
    "openai": ("APIConnectionError",),
    "requests": ("ConnectionError", "Timeout"),
}
"""Errors of a failed connection, by package. LiteLLM's `APIConnectionError` is excluded: it wraps any error."""
_SHOWN_CHARS: Final = 1000


async def ask_litellm(endpoint: ModelEndpoint, body: bytes, limit: int) -> UpstreamResponse | UpstreamStream:
    """Make one chat completion; `body` is that of a call to a server, and `limit` is in bytes of the reply."""
    extra: dict[str, Any] = json.loads(endpoint.extra_body)
    request = {name: value for name, value in (read_json(body) or {}).items() if name not in extra}
    for name in request:
        if name not in _REQUEST:
            text = f"{name!r} is not supported: the gateway does not pass this field on to the provider of this model"
            fields = {"message": text, "type": "invalid_request_error", "param": name, "code": "unsupported_value"}
            return UpstreamResponse(400, json_bytes({"error": fields}))
    options: dict[str, Any] = json.loads(endpoint.options)
    settings = {"api_base": endpoint.api_base or None, "api_key": endpoint.api_key, **options}
    settings |= {"extra_headers": dict(endpoint.headers)} if endpoint.headers else {}
    settings |= {"extra_body": extra} if extra else {}
    try:
        litellm: Any = await asyncio.to_thread(litellm_library)
        reply = await litellm.acompletion(**{**request, **settings, "model": endpoint.model, "max_retries": 0})
        if request.get("stream"):
            close = getattr(reply, "aclose", lambda: None)
            stream = UpstreamStream(_frames_of(reply, endpoint), endpoint, limit, close)
            return stream if await stream.begin() else NOT_BEGUN
    except Exception as error:  # boundary: an error of the library may hold the provider's answer
        return _failed_response(error, endpoint)
    body, hid_key = secrets_of(endpoint).hide(json_bytes(reply.model_dump(mode="json", exclude_none=True)))
    return UpstreamResponse(200, body, hid_key=hid_key)


async def _frames_of(chunks: AsyncIterator[Any], endpoint: ModelEndpoint) -> AsyncGenerator[bytes, None]:
    """Yield the library's chunks as frames."""
    try:
        async for chunk in chunks:
            yield frame_of(json_bytes(chunk.model_dump(mode="json", exclude_none=True)))
    except Exception as error:  # boundary: an error of the library may hold the provider's answer
        words = type(error).__name__ if _was_not_reached(error) else _reason(error, endpoint)
        raise BrokenStreamError(words) from error
    yield frame_of(DONE)


async def close_litellm() -> None:
    """Close the library's connections, which belong to the loop that created them."""
    litellm: Any = sys.modules.get("litellm")
    if litellm is not None:
        await litellm.close_litellm_async_clients()
        litellm.in_memory_llm_clients_cache.flush_cache()


def _failed_response(error: BaseException, endpoint: ModelEndpoint) -> UpstreamResponse:
    """Return an error of the library as a response: the provider's status, or the reason why there is none.

    The library gives nearly every error a status and the name of a connection error, even errors in its own code.
    Therefore the cause is examined.
    """
    error = next(_causes(error))
    status: Any = getattr(error, "status_code", None)
    name = type(error).__name__
    missing = next((cause for cause in _causes(error) if isinstance(cause, ImportError)), None)
    if missing is not None:
        reason = _words(missing, endpoint)
        text = f"LiteLLM needs another package, {reason}. Install it: pip install 'agl-framework[litellm]'"
        logger.error("LiteLLM cannot call %r: %s", endpoint.model, reason)
        return UpstreamResponse(failure="not_asked", detail=text)
    if _was_not_reached(error):
        logger.warning("the provider of %r did not respond to LiteLLM (%s)", endpoint.model, name)
        return UpstreamResponse(failure="unreachable", detail=name)
    if not isinstance(status, int) or not 400 <= status < 600 or name == "APIConnectionError":
        reason = _reason(error, endpoint)
        logger.error("LiteLLM failed before it had a response for %r: %s", endpoint.model, reason)
        return UpstreamResponse(failure="not_asked", detail=f"LiteLLM failed: {reason}")
    fields = {
        "error": {"message": str(getattr(error, "message", error)), "type": name, "param": None, "code": str(status)}
    }
    headers: Any = getattr(getattr(error, "response", None), "headers", None) or {}
    after = retry_after_seconds(headers.get("retry-after"))
    return UpstreamResponse(status, _without_secrets(json_bytes(fields), endpoint), after)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the library's error and its causes, outermost first."""
    ids: set[int] = set()
    cause: BaseException | None = error.__cause__ if isinstance(error, BrokenStreamError) else error
    while cause is not None and id(cause) not in ids:
        ids.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def _was_not_reached(error: BaseException) -> bool:
    """True if a connection failed or timed out, by the exception of the package that opened it."""
    for cause in _causes(error):
        package = _package(type(cause))
        for kind in type(cause).__mro__:
            names = _UNREACHED.get(_package(kind), ())
            if kind in (ConnectionError, TimeoutError) or (_package(kind) == package and kind.__name__ in names):
                return True
    return False


def _package(kind: type[BaseException]) -> str:
    return kind.__module__.split(".")[0]


def _reason(error: BaseException, endpoint: ModelEndpoint) -> str:
    """Return the text of the error that caused all others."""
    *_, innermost = _causes(error)
    return _words(innermost, endpoint)


def _words(error: BaseException, endpoint: ModelEndpoint) -> str:
    """Return the text of an error, without keys and addresses."""
    text = f"{type(error).__name__}: {error}".encode("utf-8", "replace")
    return _without_secrets(text, endpoint).decode("utf-8", "replace")[:_SHOWN_CHARS]  # half a key is not recognised


def _without_secrets(body: bytes, endpoint: ModelEndpoint) -> bytes:
    text, _ = secrets_of(endpoint).hide(body)
    return text.replace(endpoint.api_base.encode(), endpoint.label.encode()) if endpoint.api_base else text
