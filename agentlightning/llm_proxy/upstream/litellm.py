"""Model servers that only LiteLLM speaks to: a chat completion through its library, in the forms of our own calls.

The library is loaded when the first such call is made; nothing else of the gateway needs it. It is told to try once:
retries, limits and the record are the gateway's. Its settings (where to, with which key) stand side by side with the
fields of a request in its calls, so only fields that are known to be a request's are taken from the agent.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from typing_extensions import override

from agentlightning.llm_proxy.dialects.chat import DONE
from agentlightning.llm_proxy.dialects.json_values import json_bytes, read_json
from agentlightning.llm_proxy.endpoints.models import ModelEndpoint
from agentlightning.llm_proxy.replies import CallFailed
from agentlightning.llm_proxy.sse import frame_of
from agentlightning.llm_proxy.upstream.provider_keys import Secrets
from agentlightning.llm_proxy.upstream.response import UpstreamResponse, UpstreamStream
from agentlightning.utils.backoff import retry_after_seconds

logger = logging.getLogger(__name__)

_REQUEST = (
    *("model", "messages", "stream", "stream_options", "n", "stop", "user", "seed", "max_tokens"),
    *("max_completion_tokens", "temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("logprobs", "top_logprobs", "response_format", "tools", "tool_choice", "parallel_tool_calls", "functions"),
    *("function_call", "modalities", "audio", "prediction", "reasoning_effort", "thinking", "verbosity"),
)
_UNREACHED = ("APIConnectionError", "APITimeoutError", "Timeout", "ConnectError")
"""Errors of a failed connection; the library's error may be caused by one."""


async def ask_litellm(endpoint: ModelEndpoint, body: bytes, limit: int) -> UpstreamResponse | UpstreamStream:
    """Make one chat completion; `body` is that of a call to a server, and `limit` bounds the reply in bytes."""
    request = read_json(body) or {}
    for name in request:
        if name not in _REQUEST:
            text = f"{name!r} cannot be served: it is no field that is passed on to the provider of this model"
            fields = {"message": text, "type": "invalid_request_error", "param": name, "code": "unsupported_value"}
            return UpstreamResponse(400, json_bytes({"error": fields}))
    litellm: Any = await asyncio.to_thread(_library)
    options: dict[str, Any] = json.loads(endpoint.options)
    settings = {"api_base": endpoint.api_base or None, "api_key": endpoint.api_key, **options}
    try:
        reply = await litellm.acompletion(**{**request, **settings, "model": endpoint.model, "max_retries": 0})
    except Exception as error:  # boundary: whatever the library raises is what the provider answered, if it did
        return _failed_response(error, endpoint)
    if request.get("stream"):
        return LiteLLMStream(reply, endpoint, limit)
    body, hid_key = Secrets(endpoint.secrets).hide(json_bytes(reply.model_dump(mode="json", exclude_none=True)))
    return UpstreamResponse(200, body, hid_key=hid_key)


class LiteLLMStream(UpstreamStream):
    """A stream of the library's chunks."""

    def __init__(self, chunks: AsyncIterator[Any], endpoint: ModelEndpoint, limit: int) -> None:
        super().__init__(endpoint, limit)
        self._chunks = chunks

    @override
    async def close(self) -> None:
        close = getattr(self._chunks, "aclose", None)
        if close is not None:
            await close()

    @override
    async def raw_frames(self) -> AsyncGenerator[bytes, None]:
        size = 0
        try:
            async for chunk in self._chunks:
                frame = frame_of(json_bytes(chunk.model_dump(mode="json", exclude_none=True)))
                size += len(frame)
                if size > self._limit:
                    raise self.broken(f"a stream above {self._limit} bytes")
                yield frame
        except CallFailed:
            raise
        except Exception as error:  # boundary: see `ask_litellm`
            raise self.broken(f"{type(error).__name__} after {size} bytes of the stream") from error
        yield frame_of(DONE)


async def close_litellm() -> None:
    """Close the library's connections, which belong to the loop that they were made on."""
    litellm: Any = sys.modules.get("litellm")
    if litellm is not None:
        await litellm.close_litellm_async_clients()
        litellm.in_memory_llm_clients_cache.flush_cache()


def _library() -> Any:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it fetches a list of prices when imported
    litellm: Any = importlib.import_module("litellm")
    litellm.suppress_debug_info = True
    litellm.telemetry = False
    return litellm


def _failed_response(error: Exception, endpoint: ModelEndpoint) -> UpstreamResponse:
    """Return what the library raised as an answer with the provider's status; without one it could not be reached."""
    status: Any = getattr(error, "status_code", None)
    name = type(error).__name__
    cause: BaseException | None = error
    while cause is not None and type(cause).__name__ not in _UNREACHED:
        cause = cause.__cause__ or cause.__context__
    if cause is not None or not isinstance(status, int) or not 400 <= status < 600:
        logger.warning("the provider of %r gave no answer to LiteLLM (%s)", endpoint.model, name)
        return UpstreamResponse(failure="unreachable", detail=name)
    fields = {
        "error": {"message": str(getattr(error, "message", error)), "type": name, "param": None, "code": str(status)}
    }
    headers: Any = getattr(getattr(error, "response", None), "headers", None) or {}
    after = retry_after_seconds(headers.get("retry-after"))
    body, _ = Secrets(endpoint.secrets).hide(json_bytes(fields))
    return UpstreamResponse(
        status, body.replace(endpoint.api_base.encode(), endpoint.label.encode()) if endpoint.api_base else body, after
    )
