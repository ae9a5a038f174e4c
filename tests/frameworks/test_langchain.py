"""LangChain: chains, bound tools, structured output, streams and batches; its agent; over chat and over responses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

import agentlightning as agl
from tests.frameworks.engine import Json, calculator, numbers, offered
from tests.frameworks.harness import run_agent

pytest.importorskip("langchain_openai", reason="langchain-openai is not installed: make test-frameworks")
agents = pytest.importorskip("langchain.agents", reason="langchain is not installed: make test-frameworks")

from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage  # noqa: E402 -- after the skip
from langchain_core.output_parsers import StrOutputParser  # noqa: E402
from langchain_core.prompts import ChatPromptTemplate  # noqa: E402
from langchain_core.tools import tool  # noqa: E402
from langchain_openai import ChatOpenAI  # noqa: E402

SAID = ["It is 42, no doubt.", "It is 72, no doubt."]


class Product(BaseModel):
    """An answer that can be parsed."""

    a: int
    b: int
    value: int


PRODUCTS = [Product(a=6, b=7, value=42), Product(a=8, b=9, value=72)]


@tool
def multiply(a: int, b: int) -> int:
    """Return a times b."""
    return a * b


def model_of(llm: agl.LLM, **settings: Any) -> ChatOpenAI:
    return ChatOpenAI(model=llm.model, base_url=llm.get_base_url(), api_key=llm.api_key, **settings)


def product(request: Json) -> str | Json:
    """A model that answers in the form that it was told, be it a format or a tool."""
    found = numbers(request)
    answer = {**found, "value": found["a"] * found["b"]}
    if "Product" in offered(request):
        function = {"name": "Product", "arguments": json.dumps(answer)}
        return {"content": None, "tool_calls": [{"id": "call_p", "type": "function", "function": function}]}
    assert request["response_format"]["json_schema"]["schema"]["required"] == ["a", "b", "value"]
    return json.dumps(answer)


@agl.rollout
def chain(task: str, llm: agl.LLM) -> str:
    prompt = ChatPromptTemplate.from_messages([("system", "Guess."), ("human", "{question}")])
    return (prompt | model_of(llm, temperature=0.2) | StrOutputParser()).invoke({"question": task})


def test_a_chain_is_one_call() -> None:
    assert [one.output for one in run_agent(chain, lambda _: "a large number")] == ["a large number"] * 2


@agl.rollout
def bound_tools(task: str, llm: agl.LLM) -> str:
    model = model_of(llm).bind_tools([multiply])
    messages: list[Any] = [HumanMessage(task)]
    while True:
        message = model.invoke(messages)
        messages.append(message)
        if not message.tool_calls:
            return message.text
        messages += [multiply.invoke(call) for call in message.tool_calls]


def test_bound_tools_are_one_row() -> None:
    results = run_agent(bound_tools)
    assert [one.output for one in results] == SAID
    assert [len(one.record.samples) for one in results] == [1, 1]


@agl.rollout
async def streams(task: str, llm: agl.LLM) -> tuple[list[str], list[Any], int]:
    model = model_of(llm, stream_usage=True).bind_tools([multiply])
    messages: list[Any] = [HumanMessage(task)]
    first: Any = None
    async for chunk in model.astream(messages):
        first = chunk if first is None else first + chunk
    assert isinstance(first, AIMessageChunk)
    messages += [first, *[ToolMessage(str(multiply.invoke(c["args"])), tool_call_id=c["id"]) for c in first.tool_calls]]
    chunks = [chunk async for chunk in model.astream(messages)]
    used = sum(chunk.usage_metadata["total_tokens"] for chunk in chunks if chunk.usage_metadata)
    return [chunk.text for chunk in chunks], [call["args"] for call in first.tool_calls], used


def test_streams_arrive_piece_by_piece_and_are_one_row() -> None:
    for result, answer in zip(run_agent(streams), SAID, strict=True):
        words, arguments, used = result.output
        assert "".join(words) == answer
        assert len([word for word in words if word]) == len(answer.split())
        assert arguments == [numbers(result.exchanges[0].request)]
        assert used == result.exchanges[1].reply["usage"]["total_tokens"]
        assert len(result.record.samples) == 1


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_parsed(method: str) -> None:
    @agl.rollout
    def structured(task: str, llm: agl.LLM) -> Any:
        return model_of(llm).with_structured_output(Product, method=method).invoke(task)

    assert [one.output for one in run_agent(structured, product)] == PRODUCTS


@agl.rollout
def batch(task: str, llm: agl.LLM) -> list[str]:
    answers = model_of(llm).batch([f"{task} Answer in {language}." for language in ("French", "Greek", "Finnish")])
    return [answer.text for answer in answers]


def test_a_batch_is_a_row_for_each_call() -> None:
    def model(request: Json) -> str:
        return f"Said in {request['messages'][-1]['content'].rsplit(' ', 1)[1]}"

    for result in run_agent(batch, model, in_order=False):
        assert result.output == ["Said in French.", "Said in Greek.", "Said in Finnish."]
        assert len(result.record.samples) == 3


@agl.rollout
def over_responses(task: str, llm: agl.LLM) -> str:
    model = model_of(llm, use_responses_api=True).bind_tools([multiply])
    messages: list[Any] = [HumanMessage(task)]
    while True:
        message = model.invoke(messages)
        messages.append(message)
        if not message.tool_calls:
            return message.text
        messages += [multiply.invoke(call) for call in message.tool_calls]


def test_bound_tools_over_responses_are_one_row() -> None:
    results = run_agent(over_responses, direct=False)
    assert [one.output for one in results] == SAID
    assert [len(one.record.samples) for one in results] == [1, 1]


@agl.rollout
async def agent(task: str, llm: agl.LLM) -> str:
    graph = agents.create_agent(model_of(llm), tools=[multiply], system_prompt="Use the tool.")
    state = await graph.ainvoke({"messages": [HumanMessage(task)]})
    return state["messages"][-1].text


def test_its_agent_is_one_row() -> None:
    results = run_agent(agent)
    assert [one.output for one in results] == SAID
    assert [len(one.record.samples) for one in results] == [1, 1]


@agl.rollout
def structured_agent(task: str, llm: agl.LLM) -> Any:
    graph = agents.create_agent(model_of(llm), tools=[multiply], response_format=Product)
    return graph.invoke({"messages": [HumanMessage(task)]})["structured_response"]


def test_its_agent_answers_in_a_form_after_using_a_tool() -> None:
    def model(request: Json) -> str | Json:
        return product(request) if request["messages"][-1]["role"] == "tool" else calculator(request)

    assert [one.output for one in run_agent(structured_agent, model)] == PRODUCTS
