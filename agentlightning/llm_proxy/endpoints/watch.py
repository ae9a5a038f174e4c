"""Requests of the gateway to servers other than calls: identification of the engine, and health checks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Self

import aiohttp

from agentlightning.llm_proxy.dialects import CHAT
from agentlightning.llm_proxy.dialects.json_values import objects, read_json
from agentlightning.llm_proxy.endpoints.balancer import Balancer, HealthChecks
from agentlightning.llm_proxy.endpoints.engines import (
    ANTHROPIC,
    ENGINES,
    LITELLM_ENGINE,
    OPENAI,
    OTHER,
    Engine,
    engine_of_owners,
)
from agentlightning.llm_proxy.endpoints.models import ModelEndpoint

logger = logging.getLogger(__name__)

_SECONDS = 1.0
"""Seconds to wait for the response; without one the engine is treated as unknown."""
_AGAIN_SECONDS = 10.0
"""Seconds after which a server that did not respond is queried again."""
_LARGEST = 1024 * 1024
_NO_HEALTH_ROUTE = (OPENAI, ANTHROPIC, OTHER)


class EndpointWatch:
    """Identifies the engines of endpoints and brings back those that are out. Owned by the serving loop."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        balancer: Balancer,
        checks: HealthChecks,
        endpoints: Callable[[], list[ModelEndpoint]],
    ) -> None:
        self._session, self._balancer, self._checks, self._endpoints = session, balancer, checks, endpoints
        self._engines: dict[ModelEndpoint, Engine] = {}
        self._silent: dict[ModelEndpoint, float] = {}
        """Time of the next request; monotonic clock."""
        self._asking: dict[ModelEndpoint, asyncio.Task[Engine]] = {}

    @asynccontextmanager
    async def watching(self) -> AsyncGenerator[Self]:
        """Request the engines' names, without waiting for the responses, and watch endpoints that are out."""
        for endpoint in self._endpoints():
            if self._known_engine(endpoint) is None:
                self._ask(endpoint)
        watching = asyncio.ensure_future(self._check_those_out())
        try:
            yield self
        finally:
            tasks: list[asyncio.Task[Any]] = [watching, *self._asking.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # --- engines -------------------------------------------------------------------------------------------------

    async def engine_of(self, endpoint: ModelEndpoint) -> Engine:
        """Return the engine, and request it if necessary; `OTHER` if the server does not report it."""
        return self._known_engine(endpoint) or await asyncio.shield(self._ask(endpoint))

    def _known_engine(self, endpoint: ModelEndpoint) -> Engine | None:
        if endpoint.engine is not None:
            return ENGINES[endpoint.engine]
        if endpoint in self._engines:
            return self._engines[endpoint]
        if not {"chat/completions", "completions"} & set(endpoint.dialects):
            return ANTHROPIC if "messages" in endpoint.dialects else OTHER
        return OTHER if self._silent.get(endpoint, 0.0) > time.monotonic() else None

    def _ask(self, endpoint: ModelEndpoint) -> asyncio.Task[Engine]:
        if endpoint not in self._asking:
            self._asking[endpoint] = asyncio.ensure_future(self._read_engine(endpoint))
        return self._asking[endpoint]

    async def _read_engine(self, endpoint: ModelEndpoint) -> Engine:
        try:
            async with self._get(endpoint, f"{endpoint.api_base}/models", _SECONDS) as reply:
                body = bytearray()
                async for chunk in reply.content.iter_any():
                    body += chunk
                    if len(body) > _LARGEST:
                        break
            models = objects((read_json(bytes(body)) or {}).get("data"))
            engine = engine_of_owners(model.get("owned_by") for model in models)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            logger.debug("the model server %s did not list its models (%s)", endpoint.label, type(error).__name__)
            self._silent[endpoint] = time.monotonic() + _AGAIN_SECONDS
            return OTHER
        finally:
            self._asking.pop(endpoint, None)
        self._engines[endpoint] = engine
        fields = ", ".join(engine.asks.get("chat/completions", {})) or "nothing"
        logger.info("the model server %s is %s; fields that request tokens: %s", endpoint.label, engine.name, fields)
        return engine

    # --- health --------------------------------------------------------------------------------------------------

    async def _check_those_out(self) -> None:
        while True:
            await self._balancer.some_are_out.wait()
            await asyncio.sleep(self._checks.interval_seconds)
            await asyncio.gather(*(self._check(endpoint) for endpoint in self._balancer.out()))

    async def _check(self, endpoint: ModelEndpoint) -> None:
        if endpoint not in self._endpoints():
            self._balancer.served(endpoint)  # no entry names it any more: its state is forgotten
            return
        if endpoint.engine == LITELLM_ENGINE:
            return  # has no route for it: the next call tries it
        with suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(self._checks.timeout_seconds):
                foreign = await self.engine_of(endpoint) in _NO_HEALTH_ROUTE
                url = f"{endpoint.api_base}/models" if foreign else f"{endpoint.root}/health"
                async with self._get(endpoint, url, self._checks.timeout_seconds) as reply:
                    is_healthy = reply.status < 500
            if is_healthy:
                self._balancer.reported_healthy(endpoint)

    @asynccontextmanager
    async def _get(self, endpoint: ModelEndpoint, url: str, seconds: float) -> AsyncGenerator[aiohttp.ClientResponse]:
        headers = {**CHAT.key_headers(endpoint.api_key), **dict(endpoint.headers)}
        async with asyncio.timeout(seconds), self._session.get(url, headers=headers, allow_redirects=False) as reply:
            yield reply
