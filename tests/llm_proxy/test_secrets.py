"""Planted keys appear in no span, log, error or reply."""

from __future__ import annotations

import pytest

from agentlightning import process_secrets
from agentlightning.llm_proxy import LLMProxy
from tests.llm_proxy.harness import GatewayHarness

PROVIDER_KEY = "sk-provider-planted-0123456789"


def test_a_wrong_model_entry_is_named_without_its_key() -> None:
    entry = {"model_name": "m", "litellm_params": {"model": "m", "api_base": "nowhere", "api_key": PROVIDER_KEY}}
    with pytest.raises(ValueError, match=r"model_list\[0\]\.litellm_params\.api_base") as caught:
        LLMProxy(model_list=[entry])  # pyright: ignore[reportArgumentType] -- the point of the test
    assert PROVIDER_KEY not in str(caught.value)


async def test_a_provider_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PROVIDER_KEY", PROVIDER_KEY)
    async with GatewayHarness() as harness:
        harness.proxy.update_model_list([harness.model.entry("policy", api_key="os.environ/MY_PROVIDER_KEY")])
        await harness.ask(await harness.attempt())
        assert harness.model.calls[0].headers["authorization"] == f"Bearer {PROVIDER_KEY}"
        process_secrets.forget()
        with pytest.raises(ValueError, match="environment variable MY_PROVIDER_KEY, which is not set"):
            harness.proxy.update_model_list([harness.model.entry("policy", api_key="os.environ/MY_PROVIDER_KEY")])
