"""Haystack: generators in pipelines, agents with tools, streams, structured output; over chat and responses."""

from __future__ import annotations

import asyncio
from typing import Any

import agentlightning as agl
from tests.frameworks import suite
from tests.frameworks.engine import Json
from tests.frameworks.harness import TaskResult
from tests.frameworks.suite import SAID, Maker, Product, Promise, keeps, multiply, needs

needs("haystack", "haystack-ai")

from haystack import Pipeline
from haystack.components.agents import Agent
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret


def told(llm: agl.LLM, **more: Any) -> Json:
    key = Secret.from_token(llm.api_key or "unused")
    return {"api_key": key, "model": llm.model, "api_base_url": llm.get_base_url(), **more}


def over_chat(llm: agl.LLM, **more: Any) -> Any:
    return OpenAIChatGenerator(**told(llm, **more))


def over_responses(llm: agl.LLM) -> Any:
    return OpenAIResponsesChatGenerator(**told(llm))


DIALECTS = {"chat": over_chat, "responses": over_responses}


def agent_of(generator: Any, **more: Any) -> Agent:
    return Agent(chat_generator=generator, tools=[tool(multiply)], system_prompt="Use the tool.", **more)


def with_tool(task: str, llm: agl.LLM, model_of: Maker) -> str:
    return agent_of(model_of(llm)).run(messages=[ChatMessage.from_user(task)])["last_message"].text


test_an_agent_with_a_tool = keeps(suite.TOOL_LOOP, suite.SEVERAL_TOOLS, on=DIALECTS)(with_tool)
test_thoughts_over_chat = keeps(suite.THOUGHTS_DROPPED, on={"chat": over_chat})(with_tool)
test_thoughts_over_responses = keeps(suite.THOUGHTS_KEPT, on={"responses": over_responses})(with_tool)


def all_are_streamed(result: TaskResult) -> None:
    assert [exchange.request.get("stream") for exchange in result.exchanges] == [True, True]


@keeps(Promise("words", outputs=SAID, rows=[2], also=all_are_streamed), on=DIALECTS)
async def test_a_streamed_agent_gives_its_words(task: str, llm: agl.LLM, model_of: Maker) -> str:
    words: list[str] = []

    async def hear(chunk: Any) -> None:
        words.append(chunk.content)

    helper = agent_of(model_of(llm), streaming_callback=hear)
    answer = (await helper.run_async(messages=[ChatMessage.from_user(task)]))["last_message"].text
    assert "".join(words).endswith(answer)
    assert len([word for word in words if word]) >= len(answer.split())
    return answer


@keeps(suite.PARSED)
def test_structured_output(task: str, llm: agl.LLM) -> Product:
    generator = over_chat(llm, generation_kwargs={"response_format": Product})
    return Product.model_validate_json(generator.run([ChatMessage.from_user(task)])["replies"][0].text)


@keeps(suite.ONE_CALL)
def test_a_pipeline(task: str, llm: agl.LLM) -> str:
    pipeline = Pipeline()
    template = [ChatMessage.from_system("Be brief."), ChatMessage.from_user("{{ question }}")]
    pipeline.add_component("prompt", ChatPromptBuilder(template=template, required_variables=["question"]))
    pipeline.add_component("model", over_chat(llm))
    pipeline.connect("prompt.prompt", "model.messages")
    return pipeline.run({"prompt": {"question": task}})["model"]["replies"][0].text


@keeps(suite.SIDE_BY_SIDE, on={"gather": "gather", "pipeline": "pipeline"})
async def test_calls_side_by_side(task: str, llm: agl.LLM, way: str) -> list[str]:
    conversations = {
        name: [ChatMessage.from_system(f"You are {name}."), ChatMessage.from_user(task)] for name in ("Ada", "Emmy")
    }
    if way == "gather":
        helpers = [over_chat(llm).run_async(messages) for messages in conversations.values()]
        return [done["replies"][0].text for done in await asyncio.gather(*helpers)]
    pipeline = Pipeline()
    for name in conversations:
        pipeline.add_component(name, over_chat(llm))
    done = await pipeline.run_async({name: {"messages": messages} for name, messages in conversations.items()})
    return [done[name]["replies"][0].text for name in conversations]
