"""The task that checks the health of endpoints that are out; it sleeps while none is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp

from agentlightning.llm_proxy.endpoints.balancer import Balancer
from agentlightning.llm_proxy.endpoints.engine_probe import EngineProbe
from agentlightning.llm_proxy.endpoints.engines import ANTHROPIC, LITELLM_ENGINE, OPENAI, OTHER
from agentlightning.llm_proxy.endpoints.health import HealthChecks
from agentlightning.llm_proxy.endpoints.models import ModelEndpoint

_NO_HEALTH_ROUTE = (OPENAI, ANTHROPIC, OTHER)


class HealthWatch:
    """Brings endpoints back. Owned by the serving loop; `run` is a task of its creator."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        balancer: Balancer,
        probe: EngineProbe,
        checks: HealthChecks,
        endpoints: Callable[[], list[ModelEndpoint]],
    ) -> None:
        self._session, self._balancer, self._probe = session, balancer, probe
        self._checks, self._endpoints = checks, endpoints

    async def run(self) -> None:
        """Go on until cancelled."""
        while True:
            await self._balancer.some_are_out.wait()
            await asyncio.sleep(self._checks.interval_seconds)
            await asyncio.gather(*(self._check(endpoint) for endpoint in self._balancer.out()))

    async def _check(self, endpoint: ModelEndpoint) -> None:
        if endpoint not in self._endpoints():
            self._balancer.forget(endpoint)
        elif endpoint.engine == LITELLM_ENGINE:
            return  # has no route for it: the next call finds out
        elif await self._is_healthy(endpoint):
            self._balancer.reported_healthy(endpoint)

    async def _is_healthy(self, endpoint: ModelEndpoint) -> bool:
        headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
        try:
            async with asyncio.timeout(self._checks.timeout_seconds):
                foreign = await self._probe.engine_of(endpoint) in _NO_HEALTH_ROUTE
                url = f"{endpoint.api_base}/models" if foreign else f"{endpoint.root}/health"
                async with self._session.get(url, headers=headers, allow_redirects=False) as response:
                    return response.status < 500
        except (TimeoutError, aiohttp.ClientError, OSError):
            return False
