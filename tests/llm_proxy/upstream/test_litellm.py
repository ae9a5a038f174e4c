"""A provider that is reached through LiteLLM: the real package, and a stub server behind it."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import sys
from collections.abc import AsyncGenerator
from typing import Any

import openai
import pytest

from agentlightning.llm_proxy import LLMProxy
from agentlightning.llm_proxy.endpoints.models import ModelEndpoint
from agentlightning.llm_proxy.endpoints.table import ModelTable
from agentlightning.llm_proxy.upstream.litellm import _SHOWN_CHARS, _words
from tests.llm_proxy.harness import GatewayHarness
from tests.stubs.model_server import Fault, ModelServer

pytestmark = pytest.mark.filterwarnings("ignore")  # the package warns of itself

INSTALLED = importlib.util.find_spec("litellm") is not None
needs_litellm = pytest.mark.skipif(
    not INSTALLED, reason="litellm is not installed: pip install 'agl-framework[litellm]'"
)
PROVIDER_KEY = "sk-provider-planted-0123456789"
HI: Any = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


def entry(**parameters: Any) -> Any:
    return {"model_name": "policy", "litellm_params": {"model": "openai/m", "engine": "litellm", **parameters}}


@pytest.fixture
async def harness() -> AsyncGenerator[GatewayHarness, None]:
    async with GatewayHarness(model_list=[]) as ready:
        if INSTALLED:
            ready.proxy.update_model_list([entry(api_base=ready.model.base_url, api_key=PROVIDER_KEY, timeout=30)])
        yield ready


@pytest.mark.skipif(INSTALLED, reason="litellm is installed")
def test_without_the_package_the_entry_is_refused_with_the_way_to_get_it() -> None:
    with pytest.raises(ValueError, match=r"model_list\[0\].* pip install 'agl-framework\[litellm\]'"):
        LLMProxy(model_list=[entry()])


@needs_litellm
async def test_a_chat_goes_through_litellm_and_is_recorded(harness: GatewayHarness) -> None:
    status, body = await harness.post("/chat/completions", {**HI, "temperature": 0.5})
    assert status == 200
    assert body["choices"][0]["message"]["content"] == "you said hi"
    (call,) = harness.model.calls
    assert call.headers["authorization"] == f"Bearer {PROVIDER_KEY}"
    assert (call.request["model"], call.request["temperature"]) == ("m", 0.5)
    assert await harness.states() == ["no_tokens"]
    assert (await harness.spans())[0].attributes["gen_ai.system"] == "openai"


@needs_litellm
async def test_a_stream_goes_through_litellm_as_it_comes(harness: GatewayHarness) -> None:
    async with openai.AsyncOpenAI(base_url=harness.url("/v1"), api_key="any", max_retries=0) as client:
        stream = await client.chat.completions.create(**HI, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(pieces) == "you said hi"
    assert len([piece for piece in pieces if piece]) == 3
    (call,) = await harness.raw()
    assert (call["state"], call["streamed"]) == ("no_tokens", True)


@needs_litellm
async def test_anthropics_messages_reach_it_by_translation(harness: GatewayHarness) -> None:
    status, body = await harness.post("/messages", {**HI, "max_tokens": 9})
    assert (status, body["content"][0]["text"]) == (200, "you said hi")
    assert (await harness.post("/messages/count_tokens", HI))[0] == 501


@needs_litellm
@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_a_providers_refusal_keeps_its_status_and_shows_no_key(
    harness: GatewayHarness, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    error_body = {"error": {"message": f"no: {PROVIDER_KEY}", "type": "x", "param": None, "code": "y"}}
    harness.model.faults.append(Fault(status, json.dumps(error_body).encode()))
    with caplog.at_level(logging.INFO):
        answer = await harness.post("/chat/completions", HI)
    assert answer[0] == status
    spans = "".join(span.model_dump_json() for span in await harness.spans())
    assert PROVIDER_KEY not in json.dumps(answer) + spans + caplog.text
    assert len(harness.model.calls) == 1


@needs_litellm
@pytest.mark.parametrize("field", ["api_base", "base_url", "api_key", "extra_headers", "mock_response", "fallbacks"])
async def test_an_agent_cannot_say_where_litellm_sends_the_key(harness: GatewayHarness, field: str) -> None:
    status, body = await harness.post("/chat/completions", {**HI, field: "http://127.0.0.1:9/v1"})
    assert (status, body["error"]["param"]) == (400, field)
    assert harness.model.calls == []


@needs_litellm
async def test_a_provider_that_is_busy_is_tried_again_by_the_gateway(harness: GatewayHarness) -> None:
    harness.model.faults.append(Fault(429))
    assert (await harness.post("/chat/completions", HI))[0] == 200
    assert (await harness.raw())[0]["upstream_tries"] == 2


@needs_litellm
async def test_a_provider_that_is_not_there_is_502() -> None:
    async with GatewayHarness(model_list=[entry(api_base="http://127.0.0.1:9/v1", api_key="x")]) as harness:
        assert (await harness.post("/chat/completions", HI))[0] == 502
        assert (await harness.raw())[0]["upstream_tries"] == 4


@needs_litellm
@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"dialects": ["messages"]}, "dialects is not supported"),
        ({"api_base": "nowhere"}, "api_base must be a URL"),
        ({"vertex_credentials": object()}, "the parameters for LiteLLM must be JSON"),
    ],
)
def test_a_wrong_entry_is_named_at_construction(parameters: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LLMProxy(model_list=[entry(**parameters)])


WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL: Any = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}


@needs_litellm
async def test_tools_are_served_plain_and_streamed(harness: GatewayHarness) -> None:
    harness.model.answer = lambda request: {"content": None, "tool_calls": [CALL]}
    arguments: Any = {**HI, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    async with openai.AsyncOpenAI(base_url=harness.url("/v1"), api_key="any", max_retries=0) as client:
        whole = (await client.chat.completions.create(**arguments)).choices[0].message.tool_calls or []
        stream = await client.chat.completions.create(**arguments, stream=True)
        deltas = [c.choices[0].delta.tool_calls or [] async for c in stream if c.choices]
    functions = [call.function for pieces in deltas for call in pieces if call.function]
    assert [(call.id, call.function.name, call.function.arguments) for call in whole] == [
        ("call_1", "weather", '{"city": "Oslo"}')
    ]
    assert ("".join(f.name or "" for f in functions), "".join(f.arguments or "" for f in functions)) == (
        "weather",
        '{"city": "Oslo"}',
    )
    assert {exchange.request["tools"][0]["function"]["name"] for exchange in harness.model.calls} == {"weather"}


@needs_litellm
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_package_that_litellm_lacks_is_named_and_the_call_is_not_repeated(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    for name in [name for name in sys.modules if name.startswith(("mcp", "litellm.proxy", "litellm.responses.mcp"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mcp", None)  # as if it were not installed
    status, body = await harness.post("/chat/completions", {**HI, "tools": [WEATHER], "stream": streamed})
    assert status == 502
    assert "mcp" in body["error"]["message"]
    assert "agl-framework[litellm]" in body["error"]["message"]
    assert "cannot be reached" not in body["error"]["message"]
    assert (await harness.raw())[0]["upstream_tries"] == 1
    assert harness.model.calls == []


@needs_litellm
async def test_a_setting_that_litellm_cannot_work_with_is_told_in_its_words() -> None:
    wrong = {"model_name": "policy", "litellm_params": {"model": "nobody-knows/m", "engine": "litellm", "api_key": "x"}}
    async with GatewayHarness(model_list=[wrong]) as harness:
        status, body = await harness.post("/chat/completions", HI)
        assert 400 <= status < 600
        assert "LLM Provider NOT provided" in body["error"]["message"]
        assert (await harness.raw())[0]["upstream_tries"] == 1


@needs_litellm
async def test_an_error_in_the_library_itself_is_told_in_its_words_and_without_the_key(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    import litellm

    async def broken(**_: object) -> None:
        raise litellm.exceptions.APIConnectionError(f"no field 'x' {PROVIDER_KEY}", "openai", "m")  # as it wraps all

    monkeypatch.setattr(litellm, "acompletion", broken)
    status, body = await harness.post("/chat/completions", HI)
    message = body["error"]["message"]
    assert (status, "no field 'x'" in message, "cannot be reached" in message) == (502, True, False)
    assert PROVIDER_KEY not in message


@needs_litellm
@pytest.mark.parametrize("streamed", [False, True])
async def test_the_settings_of_an_entry_reach_the_provider(harness: GatewayHarness, streamed: bool) -> None:
    settings: Any = {"max_tokens": 33, "extra_headers": {"X-Tenant": "t-1"}, "extra_body": {"top_k": 3, "ours": [1]}}
    harness.proxy.update_model_list(
        [entry(api_base=harness.model.base_url, api_key=PROVIDER_KEY, weight=2, **settings)]
    )
    async with harness.session.post(harness.url(), json={**HI, "stream": streamed}) as reply:
        assert reply.status == 200
        await reply.read()
    (call,) = harness.model.calls
    assert (call.request["max_tokens"], call.request["top_k"], call.request["ours"]) == (33, 3, [1])
    assert call.headers["x-tenant"] == "t-1"
    assert "weight" not in call.request
    assert (await harness.spans())[0].attributes["gen_ai.request.max_tokens"] == 33


@needs_litellm
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_provider_that_is_too_slow_is_left_for_a_fallback(streamed: bool) -> None:
    with ModelServer() as slow, ModelServer() as other:
        entries = [entry(api_base=slow.base_url, api_key="x", timeout=0.3), other.entry("backup")]
        async with GatewayHarness(model_list=entries, fallbacks={"policy": ["backup"]}) as harness:
            (slow.hold_frames(0) if streamed else slow.hold())
            async with harness.session.post(harness.url(), json={**HI, "stream": streamed}) as reply:
                assert reply.status == 200
                assert b"you" in await reply.read()
            assert (len(slow.calls), len(other.calls)) == (1, 1)
            (call,) = await harness.raw()
            assert (call["model"], call["state"]) == ("backup", "ok")


@needs_litellm
async def test_a_provider_that_the_program_registered_with_litellm_is_reached_through_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    litellm: Any = importlib.import_module("litellm")

    class Ours(litellm.CustomLLM):
        async def acompletion(self, *args: Any, **kwargs: Any) -> Any:
            content = f"{kwargs['model']} answers"
            return await litellm.acompletion("openai/x", kwargs["messages"], mock_response=content)

    monkeypatch.setattr(litellm, "custom_provider_map", [{"provider": "our-llm", "custom_handler": Ours()}])
    entries = [{"model_name": "policy", "litellm_params": {"model": "our-llm/tiny"}}]
    async with GatewayHarness(model_list=entries) as harness:
        status, body = await harness.post("/chat/completions", HI)
        assert (status, body["choices"][0]["message"]["content"]) == (200, "tiny answers")
        assert (await harness.spans())[0].attributes["gen_ai.system"] == "our-llm"


@needs_litellm
def test_the_engine_of_an_entry_without_an_address_is_litellm_where_only_that_knows_the_provider() -> None:
    for model, engine in (("bedrock/anthropic.claude", "litellm"), ("cohere/command", "litellm"), ("openai/m", None)):
        parameters = {"model": model, "api_key": "k"}
        (endpoint,) = ModelTable([{"model_name": "policy", "litellm_params": parameters}]).all_endpoints
        assert endpoint.engine == engine
    for model in ("nobody-knows/m", "hosted_vllm/m", "azure/m", "plain"):
        with pytest.raises(ValueError, match="api_base is missing"):
            ModelTable([{"model_name": "policy", "litellm_params": {"model": model}}])


def test_of_a_long_error_no_part_of_the_key_is_shown() -> None:
    endpoint = ModelEndpoint("m", "http://127.0.0.1:1", PROVIDER_KEY)
    for before in range(_SHOWN_CHARS - 2 * len(PROVIDER_KEY), _SHOWN_CHARS + 1):
        message = _words(ValueError("x" * before + PROVIDER_KEY), endpoint)
        assert PROVIDER_KEY[:6] not in message
        assert len(message) <= _SHOWN_CHARS
