"""Engines spell tokens differently: each is asked in its own way, and the agent sees what it asked for, no more."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from agentlightning.llm_proxy import LLMProxy
from agentlightning.types import AttemptedRollout
from tests.llm_proxy.harness import GatewayHarness
from tests.llm_proxy.stub_engines import ANSWER, PROMPT, StubEngine
from tests.stubs.model_server import encode, logprobs_of

COMPLETION = encode(ANSWER)
OURS = ("prompt_token_ids", "token_ids", "meta_info")
HI: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def desk_with(speech: str, *, lists_models: bool = True, **parameters: Any) -> AsyncGenerator[Any, None]:
    async with (
        StubEngine(speech, lists_models=lists_models).serving() as stub,
        GatewayHarness(model_list=[stub.entry(**parameters)]) as harness,
    ):
        yield harness, stub


def client(harness: GatewayHarness, attempt: AttemptedRollout) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=harness.url(attempt, "/v1"), api_key="any", max_retries=0)


async def system_of(harness: GatewayHarness, attempt: AttemptedRollout) -> Any:
    return (await harness.spans(attempt))[0].attributes["gen_ai.system"]


SYSTEMS = {"vllm": "hosted_vllm", "sglang": "sglang", "agentlightning": "agentlightning", "unknown": "hosted_vllm"}


@pytest.mark.parametrize("engine", SYSTEMS)
async def test_a_chat_is_recorded_with_its_tokens_and_shown_without_them(engine: str) -> None:
    async with desk_with(engine) as (harness, _):
        attempt = await harness.attempt()
        status, body = await harness.post(harness.url(attempt), HI)
        assert status == 200
        (choice,) = body["choices"]
        assert choice["message"]["content"] == ANSWER
        assert not choice.get("logprobs")
        assert not [name for name in OURS if choice.get(name) or body.get(name)]
        (call,) = await harness.raw(attempt)
        assert (call["state"], call["upstream_tries"]) == ("ok", 1)
        assert (call["prompt_token_ids"], call["completion_token_ids"]) == (PROMPT, COMPLETION)
        assert call["completion_logprobs"] == logprobs_of(COMPLETION)
        assert await system_of(harness, attempt) == SYSTEMS[engine]
        (record,) = [span.attributes for span in await harness.spans(attempt) if span.name == "raw_gen_ai_request"]
        assert record["llm.hosted_vllm.prompt_token_ids"] == repr(PROMPT)  # what readers of the older system look for
        assert f"'token_ids': {COMPLETION!r}" in str(record["llm.hosted_vllm.choices"])


@pytest.mark.parametrize("engine", SYSTEMS)
async def test_a_stream_is_recorded_with_its_tokens_and_shown_without_them(engine: str) -> None:
    async with desk_with(engine) as (harness, stub):
        attempt = await harness.attempt()
        async with client(harness, attempt) as agent:
            stream = await agent.chat.completions.create(**HI, stream=True)
            chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
        assert not [name for name in OURS for chunk in chunks if name in str(chunk.model_extra)]
        (call,) = await harness.raw(attempt)
        assert (call["state"], call["streamed"], call["upstream_tries"]) == ("ok", True, 1)
        assert (call["prompt_token_ids"], call["completion_token_ids"]) == (PROMPT, COMPLETION)
        assert bool(stub.asked[0].get("stream")) is (engine != "sglang")  # which refuses the ids in streams


@pytest.mark.parametrize("engine", SYSTEMS)
@pytest.mark.parametrize("streamed", [False, True])
async def test_text_completions_are_recorded_with_their_tokens(engine: str, streamed: bool) -> None:
    async with desk_with(engine) as (harness, _):
        attempt = await harness.attempt()
        async with client(harness, attempt) as agent:
            if streamed:
                stream = await agent.completions.create(model="policy", prompt="six", stream=True)
                assert "".join([chunk.choices[0].text async for chunk in stream]) == ANSWER
            else:
                assert (await agent.completions.create(model="policy", prompt="six")).choices[0].text == ANSWER
        (call,) = await harness.raw(attempt)
        assert call["state"] == "ok"
        assert (call["prompt_token_ids"], call["completion_token_ids"]) == (PROMPT, COMPLETION)
        assert call["completion_logprobs"] == logprobs_of(COMPLETION)


async def test_what_the_agent_asks_for_itself_stays_in_its_reply() -> None:
    async with desk_with("sglang") as (harness, _):
        attempt = await harness.attempt()
        wishes = {"return_prompt_token_ids": True, "return_meta_info": True, "logprobs": True}
        (choice,) = (await harness.post(harness.url(attempt), {**HI, **wishes}))[1]["choices"]
        assert choice["prompt_token_ids"] == PROMPT
        assert choice["meta_info"]["output_token_logprobs"][0][1] == COMPLETION[0]
        assert choice["logprobs"]["content"]


async def test_llama_cpp_gives_the_tokens_of_a_chats_answer_but_not_of_its_prompt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with desk_with("llama.cpp") as (harness, _):
        attempt = await harness.attempt()
        for _ in range(2):
            (choice,) = (await harness.post(harness.url(attempt), HI))[1]["choices"]
            assert not choice["logprobs"]
        calls = await harness.raw(attempt)
        assert [call["state"] for call in calls] == ["no_tokens"] * 2
        assert calls[0]["completion_token_ids"] == COMPLETION
        assert calls[0]["completion_logprobs"] == logprobs_of(COMPLETION)
        assert "prompt_token_ids" not in calls[0]
        assert await system_of(harness, attempt) == "llama_cpp"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "it is llama.cpp" in warning
    assert "send the prompt as token ids to 'completions'" in warning


async def test_llama_cpp_streams_are_recorded_with_the_tokens_of_their_answers() -> None:
    async with desk_with("llama.cpp") as (harness, _):
        attempt = await harness.attempt()
        async with client(harness, attempt) as agent:
            chunks = [chunk async for chunk in await agent.chat.completions.create(**HI, stream=True)]
        assert not any(chunk.choices[0].logprobs for chunk in chunks)
        (call,) = await harness.raw(attempt)
        assert (call["state"], call["completion_token_ids"]) == ("no_tokens", COMPLETION)


async def test_llama_cpp_is_trainable_where_the_prompt_is_sent_as_token_ids() -> None:
    async with desk_with("llama.cpp") as (harness, _):
        attempt = await harness.attempt()
        status, _ = await harness.post(harness.url(attempt, "/completions"), {"model": "policy", "prompt": PROMPT})
        assert status == 200
        (call,) = await harness.raw(attempt)
        assert (call["state"], call["prompt_token_ids"], call["completion_token_ids"]) == ("ok", PROMPT, COMPLETION)


async def test_a_provider_is_not_asked_for_what_it_does_not_know(caplog: pytest.LogCaptureFixture) -> None:
    async with desk_with("openai", model="openai/gpt") as (harness, stub):
        attempt = await harness.attempt()
        assert (await harness.post(harness.url(attempt), HI))[0] == 200
        assert set(stub.asked[0]) == {"model", "messages"}
        assert await harness.states(attempt) == ["no_tokens"]
        assert await system_of(harness, attempt) == "openai"
    assert ["its API has none" in record.getMessage() for record in caplog.records] == [True]


async def test_an_entry_may_say_what_serves_it() -> None:
    async with desk_with("sglang", lists_models=False, engine="sglang") as (harness, _):
        attempt = await harness.attempt()
        await harness.post(harness.url(attempt), HI)
        assert await harness.states(attempt) == ["ok"]


async def test_an_engine_that_does_not_list_its_models_is_asked_as_vllm_is() -> None:
    async with desk_with("vllm", lists_models=False) as (harness, stub):
        attempt = await harness.attempt()
        await harness.post(harness.url(attempt), HI)
        assert stub.asked[0]["return_token_ids"] is True
        assert await harness.states(attempt) == ["ok"]


async def test_sglang_streams_at_once_for_a_policy_that_is_not_trained() -> None:
    async with StubEngine("sglang").serving() as stub:
        policies: Any = {"reference": {"kind": "frozen"}}
        async with GatewayHarness(model_list=[stub.entry()], policies=policies) as harness:
            attempt = await harness.attempt()
            async with client(harness, attempt) as agent:
                stream = await agent.chat.completions.create(**HI, stream=True)
                assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == ANSWER
            (asked,) = stub.asked
            assert asked["stream"] is True


def test_an_unknown_engine_is_named_at_construction() -> None:
    with pytest.raises(ValueError, match=r"litellm_params\.engine must be one of .*; did you mean 'sglang'\?"):
        LLMProxy(model_list=[StubEngine("sglang").entry(api_base="http://127.0.0.1:1/v1", engine="sglng")])
