"""Engines spell tokens differently: each is called in its own way, and the agent sees the fields that it requested."""

from __future__ import annotations

import json
import logging
import os
import re
from typing import Any
from urllib.parse import urlsplit

import pytest

from agentlightning.llm_proxy import LLMProxy
from agentlightning.llm_proxy.endpoints import engines
from agentlightning.llm_proxy.endpoints.table import ModelTable
from tests.llm_proxy.agents import Agent, ChatAgent, TextAgent
from tests.llm_proxy.harness import GatewayHarness
from tests.llm_proxy.stub_engines import ANSWER, StubEngine
from tests.stubs.model_server import ModelServer, encode, logprobs_of

COMPLETION, PROMPT = encode(ANSWER), encode("user hi assistant")
OURS = ("prompt_token_ids", "token_ids", "meta_info")
HI: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


def desk_with(speech: str, *, lists_models: bool = True, policies: Any = None, **parameters: Any) -> GatewayHarness:
    """Return a gateway before an engine."""
    with StubEngine(speech, lists_models=lists_models) as engine:  # for its port, which it takes again
        entry = engine.entry("policy", **{"model": "m", **parameters})
    return GatewayHarness(engine, model_list=[entry], policies=policies)


SYSTEMS = {"vllm": "hosted_vllm", "sglang": "sglang", "agentlightning": "agentlightning", "unknown": "hosted_vllm"}


@pytest.mark.parametrize("engine", SYSTEMS)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", [ChatAgent, TextAgent])
async def test_a_call_is_recorded_with_its_tokens_and_shown_without_them(
    engine: str, streamed: bool, kind: type[Agent]
) -> None:
    async with desk_with(engine) as harness:
        agent = kind(harness)
        async with agent.client:
            reply = await agent.ask(stream=streamed)
            chunks = [chunk async for chunk in reply] if streamed else [reply]
        shown = json.dumps([chunk.to_dict() for chunk in chunks])
        text = "".join(agent.text_of(chunk) for chunk in chunks) if streamed else shown
        assert ANSWER in text
        assert not [name for name in OURS if re.search(rf'"{name}": [^n]', shown)]
        attributes, call = await agent.recorded()
        assert (call["state"], call["streamed"], call["upstream_tries"]) == ("ok", streamed, 1)
        prompt = PROMPT if kind is ChatAgent else encode("once upon")
        assert (call["prompt_token_ids"], call["completion_token_ids"]) == (prompt, COMPLETION)
        assert call["completion_logprobs"] == logprobs_of(COMPLETION)
        assert attributes["gen_ai.system"] == SYSTEMS[engine]
        refuses_ids_in_streams = engine == "sglang" and kind is ChatAgent
        assert bool(harness.model.calls[0].request.get("stream")) is (streamed and not refuses_ids_in_streams)
        (record,) = [span.attributes for span in await harness.spans(agent.attempt) if span.parent_id]
        assert record["llm.hosted_vllm.prompt_token_ids"] == repr(prompt)  # what readers of the older system look for
        assert f"'token_ids': {COMPLETION!r}" in str(record["llm.hosted_vllm.choices"])


async def test_what_the_agent_asks_for_itself_stays_in_its_reply() -> None:
    async with desk_with("sglang") as harness:
        wishes = {"return_prompt_token_ids": True, "return_meta_info": True, "logprobs": True}
        (choice,) = (await harness.post("/chat/completions", {**HI, **wishes}))[1]["choices"]
        assert choice["prompt_token_ids"] == PROMPT
        assert choice["meta_info"]["output_token_logprobs"][0][1] == COMPLETION[0]
        assert choice["logprobs"]["content"]


async def test_llama_cpp_gives_the_tokens_of_a_chats_answer_but_not_of_its_prompt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with desk_with("llama.cpp") as harness:
        agent = ChatAgent(harness)
        async with agent.client:
            assert not (await agent.ask()).choices[0].logprobs
            chunks = [chunk async for chunk in await agent.ask(stream=True)]
        assert not any(chunk.choices[0].logprobs for chunk in chunks)
        for call in await harness.raw(agent.attempt):
            assert (call["state"], call["completion_token_ids"]) == ("no_tokens", COMPLETION)
            assert call["completion_logprobs"] == logprobs_of(COMPLETION)
            assert "prompt_token_ids" not in call
        assert (await harness.spans(agent.attempt))[0].attributes["gen_ai.system"] == "llama_cpp"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "engine: llama.cpp" in warning
    assert "send the prompt as token ids to 'completions'" in warning


async def test_llama_cpp_is_trainable_where_the_prompt_is_sent_as_token_ids() -> None:
    async with desk_with("llama.cpp") as harness:
        status, _ = await harness.post("/completions", {"model": "policy", "prompt": PROMPT})
        assert status == 200
        (call,) = await harness.raw()
        assert (call["state"], call["prompt_token_ids"], call["completion_token_ids"]) == ("ok", PROMPT, COMPLETION)


async def test_a_provider_is_not_asked_for_what_it_does_not_know(caplog: pytest.LogCaptureFixture) -> None:
    async with desk_with("openai", model="openai/gpt") as harness:
        assert (await harness.post("/chat/completions", HI))[0] == 200
        assert set(harness.model.calls[0].request) == {"model", "messages"}
        assert await harness.states() == ["no_tokens"]
        assert (await harness.spans())[0].attributes["gen_ai.system"] == "openai"
    assert ["its API has none" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(("engine", "settings"), [("sglang", {"engine": "sglang"}), ("vllm", {})])
async def test_an_engine_that_lists_no_models_is_asked_as_its_entry_says_or_as_vllm_is(
    engine: str, settings: dict[str, Any]
) -> None:
    async with desk_with(engine, lists_models=False, **settings) as harness:
        await harness.post("/chat/completions", HI)
        assert await harness.states() == ["ok"]
        assert ("return_prompt_token_ids" in harness.model.calls[0].request) == (engine == "sglang")


async def test_sglang_streams_at_once_for_a_policy_that_is_not_trained() -> None:
    async with desk_with("sglang", policies={"reference": {"kind": "frozen"}}) as harness:
        agent = ChatAgent(harness)
        async with agent.client:
            assert "".join([piece async for piece in agent.pieces()]) == ANSWER
        (call,) = harness.model.calls
        assert call.request["stream"] is True


def test_an_unknown_engine_is_named_at_construction() -> None:
    with pytest.raises(ValueError, match=r"litellm_params\.engine must be one of .*; did you mean 'sglang'\?"):
        LLMProxy(model_list=[StubEngine("sglang").entry("policy", api_base="http://127.0.0.1:1/v1", engine="sglng")])


# --- entries that name a provider and no address, as LiteLLM's lists do -----------------------------------------------


def entry(model: str, **parameters: Any) -> Any:
    return {"model_name": "policy", "litellm_params": {"model": model, **parameters}}


@pytest.fixture(autouse=True)
def _no_provider_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY"):
        monkeypatch.delenv(variable, raising=False)


def stub_at(provider: str, monkeypatch: pytest.MonkeyPatch) -> ModelServer:
    """Return a server whose address stands for the provider's."""
    with ModelServer() as model:
        monkeypatch.setitem(engines.ADDRESSES, provider, model.base_url)
    return model  # the harness opens the same port again


@pytest.mark.parametrize("provider", [name for name in engines.ADDRESSES if name != "anthropic"])
async def test_a_provider_is_asked_at_its_address_with_the_key(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stub_at(provider, monkeypatch)
    monkeypatch.setenv("SOME_KEY", "sk-of-the-provider")
    model_list = [entry(f"{provider}/org/gpt-4o", api_key="os.environ/SOME_KEY")]
    async with GatewayHarness(model, model_list=model_list) as harness:
        status, _ = await harness.ask()
        assert status == 200
    (call,) = model.calls
    assert (call.request["model"], call.headers["authorization"]) == ("org/gpt-4o", "Bearer sk-of-the-provider")


async def test_anthropic_is_asked_in_its_own_dialect(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stub_at("anthropic", monkeypatch)
    async with GatewayHarness(model, model_list=[entry("anthropic/claude", api_key="sk-of-anthropic")]) as harness:
        body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
        assert (await harness.post("/v1/messages", body))[0] == 200
    assert (model.calls[0].path, model.calls[0].headers["x-api-key"]) == ("/v1/messages", "sk-of-anthropic")


def test_every_address_is_one_that_only_the_provider_can_answer() -> None:
    for address in engines.ADDRESSES.values():
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
        assert (await harness.ask())[0] == 200
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
        assert (await harness.ask())[0] == 200
    assert model.calls[0].headers["authorization"] == "Bearer sk-of-the-environment"
    assert os.environ[variable] == "sk-of-the-environment"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("OPENAI_BASE_URL", "localhost", r"api_base \(from the environment\) must be a URL such as"),
        ("OPENAI_BASE_URL", "http://user:pw-planted@h/v1", r"api_base \(from the environment\) must not contain"),
        ("OPENAI_API_KEY", "pw-planted\r\nX-A: b", r"api_key \(from the environment\) cannot be sent in an HTTP"),
    ],
)
def test_what_the_environment_says_is_checked_and_not_shown(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=message) as caught:
        ModelTable([entry("openai/gpt-4o")])
    assert "planted" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "parameters", "message"),
    [
        ("openai/gpt-4o", {}, "api_key is missing: .*/api.openai.com.* Set 'api_key': 'os.environ/OPENAI_API_KEY'"),
        ("azure/gpt-4o", {"api_key": "k"}, "api_base is missing: for 'azure/' .*openai.azure.com/openai/v1"),
        ("hosted_vllm/policy", {}, "api_base is missing; it can be omitted only for .*openai/, anthropic/"),
        ("gpt-4o", {"api_key": "k"}, "api_base is missing; .*engine='litellm'"),
    ],
)
def test_an_entry_that_cannot_be_reached_says_what_is_missing(model: str, parameters: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelTable([entry(model, **parameters)])
