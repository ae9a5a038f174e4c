"""The OpenAI Agents SDK: tools, handoffs, agents as tools, an output type, streams; over chat and over responses."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

import agentlightning as agl
from tests.frameworks.engine import Json, both_ways, calculator, call, last, numbers, offered, said
from tests.frameworks.harness import run_agent

openai = pytest.importorskip("openai", reason="openai is not installed: make test-frameworks")
agents = pytest.importorskip("agents", reason="openai-agents is not installed: make test-frameworks")

SAID = ["It is 42, no doubt.", "It is 72, no doubt."]


class Product(BaseModel):
    """An answer that can be parsed."""

    a: int
    b: int
    value: int


PRODUCTS = [Product(a=6, b=7, value=42), Product(a=8, b=9, value=72)]


def over_chat(llm: agl.LLM) -> Any:
    client = openai.AsyncOpenAI(base_url=llm.get_base_url(), api_key=llm.api_key)
    return agents.OpenAIChatCompletionsModel(model=llm.model, openai_client=client)


def over_responses(llm: agl.LLM) -> Any:
    client = openai.AsyncOpenAI(base_url=llm.get_base_url(), api_key=llm.api_key)
    return agents.OpenAIResponsesModel(model=llm.model, openai_client=client)


both = pytest.mark.parametrize("model_of", [over_chat, over_responses], ids=["chat", "responses"])
Maker = Callable[[agl.LLM], Any]


def multiply(a: int, b: int) -> int:
    """Return a times b."""
    return a * b


def helper_of(model_of: Maker) -> Any:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> str:
        tools = [agents.function_tool(multiply)]
        helper = agents.Agent(name="Helper", instructions="Use the tool.", tools=tools, model=model_of(llm))
        return (await agents.Runner.run(helper, task)).final_output

    return agent


@both
def test_an_agent_with_a_tool_is_one_row(model_of: Maker) -> None:
    results = run_agent(helper_of(model_of), direct=model_of is over_chat)
    assert [one.output for one in results] == SAID
    assert [len(one.exchanges) for one in results] == [2, 2]
    assert [len(one.record.samples) for one in results] == [1, 1]


@both
def test_several_tool_calls_at_once_are_one_row(model_of: Maker) -> None:
    results = run_agent(helper_of(model_of), both_ways, direct=model_of is over_chat)
    assert [one.output for one in results] == ["It is 42 and 42.", "It is 72 and 72."]
    assert [len(one.record.samples) for one in results] == [1, 1]


def triage(request: Json) -> str | Json:
    """A model that hands over to the mathematician, who multiplies with his tool."""
    if "transfer_to_mathematician" in offered(request):
        return call("transfer_to_mathematician")
    return calculator(request) if said(last(request)).isdigit() else call("multiply", 1, **numbers(request))


@both
def test_a_handoff_is_captured_on_both_sides(model_of: Maker) -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> tuple[str, str]:
        tools = [agents.function_tool(multiply)]
        expert = agents.Agent(name="Mathematician", instructions="Multiply.", tools=tools, model=model_of(llm))
        front = agents.Agent(name="Front", instructions="Hand over.", handoffs=[expert], model=model_of(llm))
        result = await agents.Runner.run(front, task)
        return result.last_agent.name, result.final_output

    results = run_agent(agent, triage, direct=model_of is over_chat)
    assert [one.output for one in results] == [("Mathematician", answer) for answer in SAID]
    assert [len(one.exchanges) for one in results] == [3, 3]
    for one in results:
        instructions = [said(exchange.request["messages"][0]) for exchange in one.exchanges]
        assert instructions == ["Hand over.", "Multiply.", "Multiply."]
        assert [len(row.call_ids) for row in one.record.samples] == [1, 2]


@both
def test_an_agent_as_a_tool_of_another_is_a_row_of_its_own(model_of: Maker) -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> str:
        tools = [agents.function_tool(multiply)]
        expert = agents.Agent(name="Mathematician", instructions="Multiply.", tools=tools, model=model_of(llm))
        tool = expert.as_tool(tool_name="ask_mathematician", tool_description="Ask for a product.")
        front = agents.Agent(name="Front", instructions="Ask.", tools=[tool], model=model_of(llm))
        return (await agents.Runner.run(front, task)).final_output

    def model(request: Json) -> str | Json:
        if "ask_mathematician" not in offered(request):
            return calculator(request)
        if last(request)["role"] == "tool":
            return f"The mathematician says: {said(last(request))}"
        return call("ask_mathematician", input=said(last(request)))

    results = run_agent(agent, model, direct=model_of is over_chat)
    assert [one.output for one in results] == [f"The mathematician says: {answer}" for answer in SAID]
    assert [[len(row.call_ids) for row in one.record.samples] for one in results] == [[2, 2], [2, 2]]


@both
def test_an_output_type_is_parsed(model_of: Maker) -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> Product:
        helper = agents.Agent(name="Helper", instructions="Multiply.", output_type=Product, model=model_of(llm))
        return (await agents.Runner.run(helper, task)).final_output

    def model(request: Json) -> str:
        assert request["response_format"]["json_schema"]["schema"]["required"] == ["a", "b", "value"]
        found = numbers(request)
        return json.dumps({**found, "value": found["a"] * found["b"]})

    assert [one.output for one in run_agent(agent, model, direct=model_of is over_chat)] == PRODUCTS


@both
def test_a_streamed_run_gives_its_words_and_is_one_row(model_of: Maker) -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> tuple[list[str], str, int]:
        tools = [agents.function_tool(multiply)]
        helper = agents.Agent(
            name="Helper",
            instructions="Use the tool.",
            tools=tools,
            model=model_of(llm),
            model_settings=agents.ModelSettings(include_usage=True),
        )
        result = agents.Runner.run_streamed(helper, task)
        words = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        return words, result.final_output, result.context_wrapper.usage.total_tokens

    for task_result, answer in zip(run_agent(agent, direct=model_of is over_chat), SAID, strict=True):
        words, final, used = task_result.output
        assert "".join(words) == final == answer
        assert len([word for word in words if word]) == len(answer.split())
        assert used == sum(exchange.reply["usage"]["total_tokens"] for exchange in task_result.exchanges)
        assert len(task_result.record.samples) == 1


def test_a_session_keeps_the_conversation_in_one_row() -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> str:
        helper = agents.Agent(name="Helper", instructions="Be brief.", model=over_responses(llm))
        session = agents.SQLiteSession("conversation")
        await agents.Runner.run(helper, task, session=session)
        return (await agents.Runner.run(helper, "And why?", session=session)).final_output

    results = run_agent(agent, lambda request: f"Answer {len(request['messages'])}.", direct=False)
    assert [one.output for one in results] == ["Answer 4."] * 2
    assert [len(one.record.samples) for one in results] == [1, 1]
