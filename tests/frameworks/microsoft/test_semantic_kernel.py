"""Semantic Kernel: its chat agent and its kernel, its responses agent; tools, streams, threads, parsed answers."""

from __future__ import annotations

import asyncio
import json
import warnings
from typing import Any

import pytest
from pydantic import BaseModel

import agentlightning as agl
from tests.frameworks.engine import Json, both_ways, calculator, last, numbers, said
from tests.frameworks.harness import run_agent

openai = pytest.importorskip("openai", reason="openai is not installed: make test-frameworks")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it overrides a method of pydantic's that is to go
    pytest.importorskip("semantic_kernel", reason="semantic-kernel is not installed: make test-frameworks")
    from semantic_kernel import Kernel
    from semantic_kernel.agents import (
        ChatCompletionAgent,
        ChatHistoryAgentThread,
        OpenAIResponsesAgent,
        ResponsesAgentThread,
    )
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
    from semantic_kernel.functions import KernelArguments, kernel_function

SAID = ["It is 42, no doubt.", "It is 72, no doubt."]


class Product(BaseModel):
    """An answer that can be parsed."""

    a: int
    b: int
    value: int


PRODUCTS = [Product(a=6, b=7, value=42), Product(a=8, b=9, value=72)]


class Arithmetic:
    """A plugin."""

    @kernel_function
    def multiply(self, a: int, b: int) -> str:
        """Return a times b."""
        return str(a * b)


def client_of(llm: agl.LLM) -> Any:
    return openai.AsyncOpenAI(base_url=llm.get_base_url(), api_key=llm.api_key)


def service_of(llm: agl.LLM) -> Any:
    return OpenAIChatCompletion(ai_model_id=llm.model, async_client=client_of(llm))


def over_chat(llm: agl.LLM, **settings: Any) -> tuple[Any, Any]:
    agent = ChatCompletionAgent(
        service=service_of(llm), name="helper", instructions="Use the tool.", plugins=[Arithmetic()], **settings
    )
    return agent, ChatHistoryAgentThread()


def over_responses(llm: agl.LLM, **settings: Any) -> tuple[Any, Any]:
    client = client_of(llm)
    agent = OpenAIResponsesAgent(
        ai_model_id=llm.model,
        client=client,
        name="helper",
        instructions="Use the tool.",
        plugins=[Arithmetic()],
        **settings,
    )
    return agent, ResponsesAgentThread(client=client, enable_store=agent.store_enabled)


def over_responses_without_store(llm: agl.LLM) -> tuple[Any, Any]:
    return over_responses(llm, store_enabled=False)


each = pytest.mark.parametrize(
    "maker",
    [over_chat, over_responses, over_responses_without_store],
    ids=["chat", "responses", "responses-without-store"],
)


def as_plugin(answer: str | Json) -> str | Json:
    """Name the tool as the library does: plugin and function."""
    if not isinstance(answer, str):
        for made in answer["tool_calls"]:
            made["function"]["name"] = "Arithmetic-multiply"
    return answer


def helper_of(maker: Any) -> Any:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> str:
        helper, thread = maker(llm)
        return str((await helper.get_response(task, thread=thread)).message)

    return agent


@each
def test_an_agent_with_a_tool_is_one_row(maker: Any) -> None:
    results = run_agent(helper_of(maker), lambda request: as_plugin(calculator(request)), direct=maker is over_chat)
    assert [one.output for one in results] == SAID
    assert [len(one.exchanges) for one in results] == [2, 2]
    assert [len(one.record.samples) for one in results] == [1, 1]


@each
def test_several_tool_calls_at_once_are_one_row(maker: Any) -> None:
    results = run_agent(helper_of(maker), lambda request: as_plugin(both_ways(request)), direct=maker is over_chat)
    assert [one.output for one in results] == ["It is 42 and 42.", "It is 72 and 72."]
    assert [len(one.record.samples) for one in results] == [1, 1]


@each
def test_only_remembered_responses_give_thoughts_back_to_the_model(maker: Any) -> None:
    def model(request: Json) -> Json:
        answer = as_plugin(calculator(request))
        return {"reasoning_content": "Let me see.", **({"content": answer} if isinstance(answer, str) else answer)}

    for result in run_agent(helper_of(maker), model, direct=False):
        (said_before,) = [m for m in result.exchanges[1].request["messages"] if m["role"] == "assistant"]
        assert said_before.get("reasoning_content") == ("Let me see." if maker is over_responses else None)
        assert len(result.record.samples) == (1 if maker is over_responses else 2)


@each
def test_a_streamed_run_gives_its_words_and_is_one_row(maker: Any) -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> list[str]:
        helper, thread = maker(llm)
        return [str(piece.message) async for piece in helper.invoke_stream(task, thread=thread)]

    results = run_agent(agent, lambda request: as_plugin(calculator(request)), direct=maker is over_chat)
    for result, answer in zip(results, SAID, strict=True):
        words = [word for word in result.output if word]
        assert "".join(words) == answer
        assert len(words) == len(answer.split())
        assert len(result.record.samples) == 1


@each
def test_a_thread_keeps_the_conversation(maker: Any) -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> list[str]:
        helper, thread = maker(llm)
        first = await helper.get_response(task, thread=thread)
        then = await helper.get_response("And why?", thread=first.thread)
        return [str(first.message), str(then.message)]

    def model(request: Json) -> str | Json:
        return "It is so." if said(last(request)) == "And why?" else as_plugin(calculator(request))

    results = run_agent(agent, model, direct=maker is over_chat)
    assert [one.output for one in results] == [[answer, "It is so."] for answer in SAID]
    assert [len(one.exchanges) for one in results] == [3, 3]
    rows = 2 if maker is over_responses_without_store else 1  # it leaves the call of the tool out of the history
    assert [len(one.record.samples) for one in results] == [rows, rows]


def product(request: Json) -> str:
    """A model that answers in the form that it was told; fails if it was told none."""
    assert request["response_format"]["json_schema"]["schema"]["required"] == ["a", "b", "value"]
    found = numbers(request)
    return json.dumps({**found, "value": found["a"] * found["b"]})


def test_structured_output_over_chat_is_parsed() -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> Product:
        arguments = KernelArguments(settings=OpenAIChatPromptExecutionSettings(response_format=Product))
        helper = ChatCompletionAgent(
            service=service_of(llm), name="helper", instructions="Multiply.", arguments=arguments
        )
        return Product.model_validate_json(str((await helper.get_response(task)).message))

    assert [one.output for one in run_agent(agent, product)] == PRODUCTS


def test_structured_output_over_responses_is_parsed() -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> Product:
        wanted = OpenAIResponsesAgent.configure_response_format(Product)
        helper = OpenAIResponsesAgent(ai_model_id=llm.model, client=client_of(llm), text=wanted)
        return Product.model_validate_json(str((await helper.get_response(task)).message))

    assert [one.output for one in run_agent(agent, product, direct=False)] == PRODUCTS


def test_prompts_of_a_kernel_side_by_side_are_each_a_row() -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> list[str]:
        kernel = Kernel(services=service_of(llm))

        async def ask(style: str) -> str:
            arguments = KernelArguments(question=task, style=style)
            return str(await kernel.invoke_prompt("{{$question}} Answer {{$style}}.", arguments=arguments))

        return list(await asyncio.gather(*map(ask, ("tersely", "in verse", "in French", "at length"))))

    def model(request: Json) -> str:
        return f"You asked: {said(last(request))}"

    for result in run_agent(agent, model, in_order=False):
        assert [answer.rsplit(" ", 1)[1] for answer in result.output] == ["tersely.", "verse.", "French.", "length."]
        assert len(result.record.samples) == 4
