"""Entries that name a provider and no address, as LiteLLM's lists do."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

import pytest

from agentlightning.llm_proxy.endpoints import providers
from agentlightning.llm_proxy.endpoints.table import ModelTable
from tests.llm_proxy.harness import GatewayHarness
from tests.stubs.model_server import ModelServer


def entry(model: str, **parameters: Any) -> Any:
    return {"model_name": "policy", "litellm_params": {"model": model, **parameters}}


@pytest.fixture(autouse=True)
def _no_provider_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY"):
        monkeypatch.delenv(variable, raising=False)


def stub_at(provider: str, monkeypatch: pytest.MonkeyPatch) -> ModelServer:
    """Return a server for whose address the provider's is taken."""
    with ModelServer() as model:
        monkeypatch.setitem(providers.ADDRESSES, provider, model.base_url)
    return model  # the harness opens the same port again


@pytest.mark.parametrize("provider", [name for name in providers.ADDRESSES if name != "anthropic"])
async def test_a_provider_is_asked_at_its_address_with_the_key(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stub_at(provider, monkeypatch)
    monkeypatch.setenv("SOME_KEY", "sk-of-the-provider")
    model_list = [entry(f"{provider}/org/gpt-4o", api_key="os.environ/SOME_KEY")]
    async with GatewayHarness(model, model_list=model_list) as harness:
        status, _ = await harness.ask(await harness.attempt())
        assert status == 200
    (call,) = model.calls
    assert (call.request["model"], call.headers["authorization"]) == ("org/gpt-4o", "Bearer sk-of-the-provider")


async def test_anthropic_is_asked_in_its_own_dialect(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stub_at("anthropic", monkeypatch)
    async with GatewayHarness(model, model_list=[entry("anthropic/claude", api_key="sk-of-anthropic")]) as harness:
        attempt = await harness.attempt()
        said = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
        assert (await harness.post(harness.url(attempt, "/v1/messages"), said))[0] == 200
    assert (model.calls[0].path, model.calls[0].headers["x-api-key"]) == ("/v1/messages", "sk-of-anthropic")


def test_every_address_is_one_that_only_the_provider_can_answer() -> None:
    for address in providers.ADDRESSES.values():
        parts = urlsplit(address)
        assert (parts.scheme, parts.query, parts.username) == ("https", "", None)
        assert not address.endswith("/")


def test_an_address_that_is_given_is_the_one_and_leaves_the_name_of_the_model_alone() -> None:
    (endpoint,) = ModelTable([entry("deepseek/chat", api_base="http://127.0.0.1:8000/v1")]).all_endpoints
    assert (endpoint.api_base, endpoint.model) == ("http://127.0.0.1:8000/v1", "deepseek/chat")


@pytest.mark.parametrize("variable", ["OPENAI_BASE_URL", "OPENAI_API_BASE"])
async def test_the_address_of_openai_may_stand_in_the_environment_and_then_needs_no_key(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ModelServer() as model:
        monkeypatch.setenv(variable, model.base_url)
    async with GatewayHarness(model, model_list=[entry("openai/gpt-4o")]) as harness:
        assert (await harness.ask(await harness.attempt()))[0] == 200
    (call,) = model.calls
    assert (call.request["model"], call.headers.get("authorization")) == ("gpt-4o", None)


@pytest.mark.parametrize("provider", ["openai", "groq"])
async def test_a_key_that_an_entry_does_not_give_is_the_environments_and_stays_there(
    provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stub_at(provider, monkeypatch)
    variable = f"{provider.upper()}_API_KEY"
    monkeypatch.setenv(variable, "sk-of-the-environment")
    async with GatewayHarness(model, model_list=[entry(f"{provider}/m")]) as harness:
        assert (await harness.ask(await harness.attempt()))[0] == 200
    assert model.calls[0].headers["authorization"] == "Bearer sk-of-the-environment"
    assert os.environ[variable] == "sk-of-the-environment"


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("OPENAI_BASE_URL", "localhost", r"api_base \(from the environment\) must be a URL such as"),
        ("OPENAI_BASE_URL", "http://user:pw-planted@h/v1", r"api_base \(from the environment\) must not hold a user"),
        ("OPENAI_API_KEY", "pw-planted\r\nX-A: b", r"api_key \(from the environment\) holds what no HTTP header can"),
    ],
)
def test_what_the_environment_says_is_checked_and_not_shown(
    variable: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=said) as caught:
        ModelTable([entry("openai/gpt-4o")])
    assert "planted" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "parameters", "said"),
    [
        ("openai/gpt-4o", {}, "api_key is missing: .*/api.openai.com.* write 'api_key': 'os.environ/OPENAI_API_KEY'"),
        ("azure/gpt-4o", {"api_key": "k"}, "api_base is missing: with 'azure/' .*openai.azure.com/openai/v1"),
        ("hosted_vllm/policy", {}, "api_base is missing; only a model that names one of these .*openai/, anthropic/"),
        ("gpt-4o", {"api_key": "k"}, "api_base is missing; .*engine='litellm'"),
    ],
)
def test_an_entry_that_cannot_be_reached_says_what_is_missing(model: str, parameters: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ModelTable([entry(model, **parameters)])
