"""The models of the gateway, as the two client libraries list and look them up."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import anthropic
import openai
import pytest

from tests.llm_proxy.harness import GatewayHarness
from tests.stubs.model_server import ModelServer


@pytest.fixture
async def harness() -> AsyncGenerator[GatewayHarness, None]:
    with ModelServer() as model:
        async with GatewayHarness(model_list=[model.entry(name) for name in ("policy", "org/judge")]) as ready:
            yield ready


async def test_openais_client_lists_and_retrieves_models(harness: GatewayHarness) -> None:
    url = harness.url(await harness.attempt(), "/v1")
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["policy", "org/judge"]
        for name in ("policy", "org/judge"):
            assert (await client.models.retrieve(name)).id == name
        with pytest.raises(openai.NotFoundError, match="Did you mean 'policy'"):
            await client.models.retrieve("polcy")


async def test_anthropics_client_lists_and_retrieves_models(harness: GatewayHarness) -> None:
    url = harness.url(await harness.attempt(), "")
    async with anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["policy", "org/judge"]
        assert (await client.models.retrieve("org/judge")).display_name == "org/judge"
