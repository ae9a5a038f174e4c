"""Which engine serves an endpoint: asked once, before its first call, by the list of its models."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

import aiohttp

from agentlightning.llm_proxy.dialects.base import objects, read_json
from agentlightning.llm_proxy.engines import ANTHROPIC, ENGINES, OTHER, Engine, engine_of_owners
from agentlightning.llm_proxy.models import Endpoint

logger = logging.getLogger(__name__)

_SECONDS = 1.0
"""A server that does not answer in this time is asked as one that is not known."""
_AGAIN_SECONDS = 10.0
"""After so long a server that did not answer is asked once more."""
_LARGEST = 1024 * 1024


class EngineProbe:
    """What is known of the engines. Owned by the serving loop, within one session."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._known: dict[Endpoint, Engine] = {}
        self._silent: dict[Endpoint, float] = {}
        """When to ask again; monotonic clock."""
        self._asking: dict[Endpoint, asyncio.Task[Engine]] = {}

    def begin(self, endpoints: Iterable[Endpoint]) -> None:
        """Ask these servers, without waiting for what they say."""
        for endpoint in endpoints:
            if endpoint not in self._asking and self._told(endpoint) is None:
                self._asking[endpoint] = asyncio.ensure_future(self._ask(endpoint))

    async def close(self) -> None:
        """End the questions that are still open."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def engine_of(self, endpoint: Endpoint) -> Engine:
        """Return the engine, asking for it if need be; `OTHER` where the server does not tell."""
        told = self._told(endpoint)
        if told is not None:
            return told
        self.begin([endpoint])
        return await asyncio.shield(self._asking[endpoint])

    def _told(self, endpoint: Endpoint) -> Engine | None:
        if endpoint.engine is not None:
            return ENGINES[endpoint.engine]
        if endpoint in self._known:
            return self._known[endpoint]
        if not {"chat/completions", "completions"} & set(endpoint.dialects):
            return ANTHROPIC if "messages" in endpoint.dialects else OTHER
        return OTHER if self._silent.get(endpoint, 0.0) > time.monotonic() else None

    async def _ask(self, endpoint: Endpoint) -> Engine:
        headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
        try:
            engine = await asyncio.wait_for(self._listed(endpoint, headers), _SECONDS)
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            logger.debug("the model server %s does not list its models (%s)", endpoint.label, type(error).__name__)
            self._silent[endpoint] = time.monotonic() + _AGAIN_SECONDS
            return OTHER
        finally:
            self._asking.pop(endpoint, None)
        self._known[endpoint] = engine
        asked = ", ".join(engine.asks.get("chat/completions", {})) or "nothing"
        logger.info("the model server %s is %s; for tokens it is asked by: %s", endpoint.label, engine.name, asked)
        return engine

    async def _listed(self, endpoint: Endpoint, headers: dict[str, str]) -> Engine:
        url = f"{endpoint.api_base}/models"
        async with self._session.get(url, headers=headers, allow_redirects=False) as reply:
            body = bytearray()
            async for chunk in reply.content.iter_any():
                body += chunk
                if len(body) > _LARGEST:
                    break
            models = objects((read_json(bytes(body)) or {}).get("data"))
            return engine_of_owners(model.get("owned_by") for model in models)
