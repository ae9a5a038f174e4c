"""Haystack: generators in pipelines, agents with tools, streams, structured output; over chat and responses."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

import pytest
from pydantic import BaseModel

import agentlightning as agl
from tests.frameworks.engine import Json, both_ways, calculator, numbers, said, thinking, thoughts
from tests.frameworks.harness import run_agent

pytest.importorskip("haystack", reason="haystack-ai is not installed: make test-frameworks")

from haystack import Pipeline
from haystack.components.agents import Agent
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret

SAID = ["It is 42, no doubt.", "It is 72, no doubt."]


class Product(BaseModel):
    """The answer."""

    a: int
    b: int
    value: int


PRODUCTS = [Product(a=6, b=7, value=42), Product(a=8, b=9, value=72)]


@tool
def multiply(a: Annotated[int, "one number"], b: Annotated[int, "another"]) -> int:
    """Return a times b."""
    return a * b


def over_chat(llm: agl.LLM, **more: Any) -> Any:
    key = Secret.from_token(llm.api_key or "none")
    return OpenAIChatGenerator(api_key=key, model=llm.model, api_base_url=llm.get_base_url(), **more)


def over_responses(llm: agl.LLM, **more: Any) -> Any:
    key = Secret.from_token(llm.api_key or "none")
    return OpenAIResponsesChatGenerator(api_key=key, model=llm.model, api_base_url=llm.get_base_url(), **more)


both = pytest.mark.parametrize("model_of", [over_chat, over_responses], ids=["chat", "responses"])


@both
@pytest.mark.parametrize("answer", [calculator, both_ways], ids=["one", "two at once"])
def test_an_agent_with_a_tool_is_one_row(model_of: Any, answer: Any) -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> str:
        helper = Agent(chat_generator=model_of(llm), tools=[multiply], system_prompt="Use the tool.")
        return helper.run(messages=[ChatMessage.from_user(task)])["last_message"].text

    results = run_agent(agent, answer, direct=model_of is over_chat)
    wanted = SAID if answer is calculator else ["It is 42 and 42.", "It is 72 and 72."]
    assert [one.output for one in results] == wanted
    assert [len(one.exchanges) for one in results] == [2, 2]
    assert [len(one.record.samples) for one in results] == [1, 1]


@both
def test_thoughts_come_back_over_responses_only(model_of: Any) -> None:
    """So says the guide; a change of the library is welcome, and then a change of the guide."""

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> str:
        helper = Agent(chat_generator=model_of(llm), tools=[multiply])
        return helper.run(messages=[ChatMessage.from_user(task)])["last_message"].text

    kept = model_of is over_responses
    for one, answer in zip(run_agent(agent, thinking, direct=False), SAID, strict=True):
        assert one.output == answer
        assert thoughts(one.exchanges[1].request) == ["Thought 1." if kept else None]
        assert len(one.record.samples) == (1 if kept else 2)


@both
def test_a_streamed_agent_gives_its_words(model_of: Any) -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> list[str]:
        words: list[str] = []

        async def hear(chunk: Any) -> None:
            words.append(chunk.content)

        helper = Agent(chat_generator=model_of(llm), tools=[multiply], streaming_callback=hear)
        done = await helper.run_async(messages=[ChatMessage.from_user(task)])
        assert "".join(words).endswith(done["last_message"].text)
        return [done["last_message"].text, len([word for word in words if word])]

    for one, answer in zip(run_agent(agent, direct=model_of is over_chat), SAID, strict=True):
        assert one.output[0] == answer
        assert one.output[1] >= len(answer.split())
        assert [exchange.request.get("stream") for exchange in one.exchanges] == [True, True]
        assert len(one.record.samples) == 1


def test_structured_output() -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> Product:
        generator = over_chat(llm, generation_kwargs={"response_format": Product})
        return Product.model_validate_json(generator.run([ChatMessage.from_user(task)])["replies"][0].text)

    def model(request: Json) -> str:
        assert request["response_format"]["type"] == "json_schema"
        given = numbers(request)
        return json.dumps({**given, "value": given["a"] * given["b"]})

    assert [one.output for one in run_agent(agent, model)] == PRODUCTS


def test_a_pipeline() -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> str:
        pipeline = Pipeline()
        template = [ChatMessage.from_system("Be brief."), ChatMessage.from_user("{{ question }}")]
        pipeline.add_component("prompt", ChatPromptBuilder(template=template, required_variables=["question"]))
        pipeline.add_component("model", over_chat(llm))
        pipeline.connect("prompt.prompt", "model.messages")
        return pipeline.run({"prompt": {"question": task}})["model"]["replies"][0].text

    results = run_agent(agent, lambda _: "It is what it is.")
    assert [one.output for one in results] == ["It is what it is."] * 2


@pytest.mark.parametrize("way", ["gather", "pipeline"])
def test_calls_side_by_side_are_each_a_row(way: str) -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> list[str]:
        asked = {
            name: [ChatMessage.from_system(f"You are {name}."), ChatMessage.from_user(task)] for name in ("Ada", "Emmy")
        }
        if way == "gather":
            helpers = [over_chat(llm).run_async(messages) for messages in asked.values()]
            return [done["replies"][0].text for done in await asyncio.gather(*helpers)]
        pipeline = Pipeline()
        for name in asked:
            pipeline.add_component(name, over_chat(llm))
        done = await pipeline.run_async({name: {"messages": messages} for name, messages in asked.items()})
        return [done[name]["replies"][0].text for name in asked]

    def model(request: Json) -> str:
        return f"{said(request['messages'][0]).split()[-1]} agrees."

    for result in run_agent(agent, model, in_order=False):
        assert result.output == ["Ada. agrees.", "Emmy. agrees."]
        assert len(result.record.samples) == 2
