"""The probe that finds out which engine serves an endpoint: one `GET /models` before its first call."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

import aiohttp

from agentlightning.llm_proxy.dialects import CHAT
from agentlightning.llm_proxy.dialects.json_values import objects, read_json
from agentlightning.llm_proxy.endpoints.engines import ANTHROPIC, ENGINES, OTHER, Engine, engine_of_owners
from agentlightning.llm_proxy.endpoints.models import ModelEndpoint

logger = logging.getLogger(__name__)

_SECONDS = 1.0
"""A server that does not answer in this time is asked as one that is not known."""
_AGAIN_SECONDS = 10.0
"""After so long a server that did not answer is asked once more."""
_LARGEST = 1024 * 1024


class EngineProbe:
    """Knows the engines of endpoints. Owned by the serving loop, within one session."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._known: dict[ModelEndpoint, Engine] = {}
        self._silent: dict[ModelEndpoint, float] = {}
        """When to ask again; monotonic clock."""
        self._asking: dict[ModelEndpoint, asyncio.Task[Engine]] = {}

    def begin(self, endpoints: Iterable[ModelEndpoint]) -> None:
        """Ask these servers, without waiting for what they say."""
        for endpoint in endpoints:
            if endpoint not in self._asking and self._known_engine(endpoint) is None:
                self._asking[endpoint] = asyncio.ensure_future(self._ask(endpoint))

    async def close(self) -> None:
        """End the questions that are still open."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def engine_of(self, endpoint: ModelEndpoint) -> Engine:
        """Return the engine, asking for it if need be; `OTHER` where the server does not tell."""
        known = self._known_engine(endpoint)
        if known is not None:
            return known
        self.begin([endpoint])
        return await asyncio.shield(self._asking[endpoint])

    def _known_engine(self, endpoint: ModelEndpoint) -> Engine | None:
        if endpoint.engine is not None:
            return ENGINES[endpoint.engine]
        if endpoint in self._known:
            return self._known[endpoint]
        if not {"chat/completions", "completions"} & set(endpoint.dialects):
            return ANTHROPIC if "messages" in endpoint.dialects else OTHER
        return OTHER if self._silent.get(endpoint, 0.0) > time.monotonic() else None

    async def _ask(self, endpoint: ModelEndpoint) -> Engine:
        headers = {**CHAT.key_headers(endpoint.api_key), **dict(endpoint.headers)}
        try:
            async with (
                asyncio.timeout(_SECONDS),
                self._session.get(f"{endpoint.api_base}/models", headers=headers, allow_redirects=False) as reply,
            ):
                body = bytearray()
                async for chunk in reply.content.iter_any():
                    body += chunk
                    if len(body) > _LARGEST:
                        break
            models = objects((read_json(bytes(body)) or {}).get("data"))
            engine = engine_of_owners(model.get("owned_by") for model in models)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            logger.debug("the model server %s does not list its models (%s)", endpoint.label, type(error).__name__)
            self._silent[endpoint] = time.monotonic() + _AGAIN_SECONDS
            return OTHER
        finally:
            self._asking.pop(endpoint, None)
        self._known[endpoint] = engine
        asked = ", ".join(engine.asks.get("chat/completions", {})) or "nothing"
        logger.info("the model server %s is %s; for tokens it is asked by: %s", endpoint.label, engine.name, asked)
        return engine
