"""Asks the endpoints that are out whether they are well; sleeps while none is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp

from agentlightning.llm_proxy.balance import Balancer
from agentlightning.llm_proxy.engines import ANTHROPIC, LITELLM_ENGINE, OPENAI, OTHER
from agentlightning.llm_proxy.health import HealthChecks
from agentlightning.llm_proxy.models import Endpoint
from agentlightning.llm_proxy.probe import EngineProbe

_NO_HEALTH_ROUTE = (OPENAI, ANTHROPIC, OTHER)


class HealthWatch:
    """Brings endpoints back. Owned by the serving loop; `run` is a task of whoever made it."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        balancer: Balancer,
        probe: EngineProbe,
        checks: HealthChecks,
        endpoints: Callable[[], list[Endpoint]],
    ) -> None:
        self._session, self._balancer, self._probe = session, balancer, probe
        self._checks, self._endpoints = checks, endpoints

    async def run(self) -> None:
        """Go on until cancelled."""
        while True:
            await self._balancer.some_are_out.wait()
            await asyncio.sleep(self._checks.interval_seconds)
            await asyncio.gather(*(self._look_after(endpoint) for endpoint in self._balancer.out()))

    async def _look_after(self, endpoint: Endpoint) -> None:
        if endpoint not in self._endpoints():
            self._balancer.forget(endpoint)
        elif endpoint.engine == LITELLM_ENGINE:
            return  # there is nobody to ask: a call finds out
        elif await self._is_well(endpoint):
            self._balancer.is_well(endpoint)

    async def _is_well(self, endpoint: Endpoint) -> bool:
        try:
            return await asyncio.wait_for(self._says_well(endpoint), self._checks.timeout_seconds)
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
            return False

    async def _says_well(self, endpoint: Endpoint) -> bool:
        foreign = await self._probe.engine_of(endpoint) in _NO_HEALTH_ROUTE
        url = f"{endpoint.api_base}/models" if foreign else f"{endpoint.root}/health"
        headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
        async with self._session.get(url, headers=headers, allow_redirects=False) as reply:
            return reply.status < 500
