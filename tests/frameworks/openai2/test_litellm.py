"""LiteLLM as a client library: tools, streams, parallel calls, structured output; over chat, responses and messages."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import BaseModel

import agentlightning as agl
from tests.frameworks.engine import Json, calculator, numbers, said, thinking, thoughts
from tests.frameworks.harness import run_agent

litellm = pytest.importorskip("litellm", reason="litellm is not installed: make test-frameworks")

SAID = ["It is 42, no doubt.", "It is 72, no doubt."]
TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


class Product(BaseModel):
    """An answer that can be parsed."""

    a: int
    b: int
    value: int


def told(llm: agl.LLM, **more: Any) -> Json:
    return {"model": f"openai/{llm.model}", "api_base": llm.get_base_url(), "api_key": llm.api_key, **more}


def answered(messages: list[Any], message: Any) -> None:
    """Add an answer, and the result of each tool call in it."""
    messages.append(message)
    for call in message.tool_calls or []:
        given = json.loads(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(given["a"] * given["b"])})


def tool_loop(asked: Json, task: str) -> str:
    messages: list[Any] = [{"role": "user", "content": task}]
    while True:
        message = litellm.completion(**asked, messages=messages, tools=[TOOL]).choices[0].message
        answered(messages, message)
        if not message.tool_calls:
            return message.content


@agl.rollout
def plain(task: str, llm: agl.LLM) -> str:
    return tool_loop(told(llm), task)


@agl.rollout
async def streamed(task: str, llm: agl.LLM) -> str:
    messages: list[Any] = [{"role": "user", "content": task}]
    while True:
        asked = told(llm, messages=messages, tools=[TOOL], stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in await litellm.acompletion(**asked)]
        message = litellm.stream_chunk_builder(chunks).choices[0].message
        answered(messages, message)
        if not message.tool_calls:
            words = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
            assert len([word for word in words if word]) == len(message.content.split())
            return message.content


@pytest.mark.parametrize("agent", [plain, streamed], ids=["plain", "streamed"])
def test_a_tool_loop_is_one_row(agent: Any) -> None:
    results = run_agent(agent)
    assert [one.output for one in results] == SAID
    assert [len(one.exchanges) for one in results] == [2, 2]
    assert [len(one.record.samples) for one in results] == [1, 1]


@pytest.mark.parametrize("prefix", ["openai", "hosted_vllm", "anthropic"])
def test_thoughts_come_back_with_the_turn(prefix: str) -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> str:
        return tool_loop({**told(llm), "model": f"{prefix}/{llm.model}"}, task)

    for one, answer in zip(run_agent(agent, thinking, direct=False), SAID, strict=True):
        assert one.output == answer
        assert thoughts(one.exchanges[1].request) == ["Thought 1."]
        assert len(one.record.samples) == 1


def in_form(request: Json) -> str | Json:
    if not request.get("response_format"):
        return calculator(request)
    found = numbers(request)
    return json.dumps({**found, "value": found["a"] * found["b"]})


def test_structured_output_is_parsed() -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> Product:
        messages = [{"role": "user", "content": task}]
        reply = litellm.completion(**told(llm, messages=messages, response_format=Product))
        return Product.model_validate_json(reply.choices[0].message.content)

    results = run_agent(agent, in_form)
    assert [one.output.value for one in results] == [42, 72]
    assert {one.exchanges[0].request["response_format"]["type"] for one in results} == {"json_schema"}


@pytest.mark.parametrize("way", ["gather", "threads", "batch"])
def test_calls_side_by_side_are_told_apart(way: str) -> None:
    def asked(task: str, llm: agl.LLM, name: str) -> Json:
        system = {"role": "system", "content": f"You are {name}."}
        return told(llm, messages=[system, {"role": "user", "content": task}])

    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> list[str]:
        wanted = [asked(task, llm, name) for name in ("Ada", "Emmy", "Grace")]
        if way == "gather":
            replies = await asyncio.gather(*(litellm.acompletion(**one) for one in wanted))
        elif way == "threads":
            with ThreadPoolExecutor() as pool:
                replies = list(pool.map(lambda one: litellm.completion(**one), wanted))
        else:
            lists = [one["messages"] for one in wanted]
            replies = await asyncio.to_thread(litellm.batch_completion, **{**wanted[0], "messages": lists})
        return [reply.choices[0].message.content for reply in replies]

    def model(request: Json) -> str:
        return f"{said(request['messages'][0]).split()[-1]} agrees."

    for result in run_agent(agent, model, in_order=False):
        assert result.output == ["Ada. agrees.", "Emmy. agrees.", "Grace. agrees."]
        assert len(result.record.samples) == 3


def test_responses_and_messages_are_captured() -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> list[str]:
        reply = await litellm.aresponses(**told(llm, input=task))
        over_messages = {**told(llm), "model": f"anthropic/{llm.model}"}
        message = await litellm.acompletion(**over_messages, messages=[{"role": "user", "content": task}])
        return [reply.output[-1].content[0].text, message.choices[0].message.content]

    results = run_agent(agent, lambda _: "It is what it is.", direct=False)
    assert [one.output for one in results] == [["It is what it is."] * 2] * 2


def test_a_cache_of_the_library_hides_calls_and_no_cache_is_its_default() -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> str:
        messages = [{"role": "user", "content": task}]
        return [litellm.completion(**told(llm, messages=messages)).choices[0].message.content for _ in "ab"][-1]

    assert litellm.cache is None
    assert [len(one.exchanges) for one in run_agent(agent, lambda _: "Yes.")] == [2, 2]
