"""The gateway harness, ready to use."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from tests.llm_proxy.agents import Agent
from tests.llm_proxy.harness import GatewayHarness
from tests.stubs.model_server import ModelServer


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGL_TOKEN", raising=False)
    monkeypatch.delenv("AGL_INSECURE", raising=False)


@pytest.fixture
async def harness() -> AsyncGenerator[GatewayHarness, None]:
    async with GatewayHarness() as ready:
        yield ready


@pytest.fixture
async def agent(request: pytest.FixtureRequest, harness: GatewayHarness) -> AsyncGenerator[Agent, None]:
    """An attempt with the client library that the module names, as `AGENT`."""
    made: Agent = request.module.AGENT(harness)
    async with made.client:
        yield made


@pytest.fixture
async def two() -> AsyncGenerator[tuple[GatewayHarness, ModelServer], None]:
    """A gateway with two servers of its model: its own and the other one."""
    with ModelServer() as second:
        async with GatewayHarness() as harness:
            harness.proxy.update_model_list([harness.model.entry("policy"), second.entry("policy")])
            yield harness, second
