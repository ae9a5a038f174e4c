"""OpenInference: several instrumentations at once, each call still one call with its agent's name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import agentlightning as agl
from tests.frameworks.harness import run_agent
from tests.frameworks.suite import NAMED_WORKERS, WORKERS, address, multiply, needs, rollout_of

needs("openinference.instrumentation.openai", "openinference")

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI
from openinference.instrumentation.langchain import LangChainInstrumentor
from openinference.instrumentation.openai import OpenAIInstrumentor
from openinference.instrumentation.openai_agents import OpenAIAgentsInstrumentor


@pytest.fixture
def instrument(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.delenv("OPENAI_AGENTS_DISABLE_TRACING")
    set_tracing_disabled(False)
    with ExitStack() as ends:

        def on(*instrumentors: Any) -> None:
            for instrumentor in instrumentors:
                made = instrumentor()
                made.instrument()
                ends.callback(made.uninstrument)

        yield on
    set_tracing_disabled(True)


async def langchain(task: str, llm: agl.LLM, streamed: bool = False) -> list[str]:
    model = ChatOpenAI(model=llm.model, **address(llm))

    async def ask(name: str) -> str:
        agent = create_agent(model, [tool(multiply)], system_prompt=f"You are {name}.", name=name)
        inputs = {"messages": [("user", task)]}
        if not streamed:
            return (await agent.ainvoke(inputs))["messages"][-1].text
        parts = agent.astream(inputs, stream_mode="messages")
        return "".join([part.text async for part, _ in parts if part.type == "AIMessageChunk"])

    return await asyncio.gather(*map(ask, WORKERS))


async def streamed_langchain(task: str, llm: agl.LLM) -> list[str]:
    return await langchain(task, llm, streamed=True)


async def openai_agents(task: str, llm: agl.LLM) -> list[str]:
    model = OpenAIChatCompletionsModel(llm.model, AsyncOpenAI(**address(llm)))

    async def ask(name: str) -> str:
        agent = Agent(name=name, model=model, tools=[function_tool(multiply)], instructions=f"You are {name}.")
        return (await Runner.run(agent, task)).final_output

    return await asyncio.gather(*map(ask, WORKERS))


@pytest.mark.parametrize("client_too", [True, False])
@pytest.mark.parametrize(
    ("agent", "instrumentor"),
    [
        (langchain, LangChainInstrumentor),
        (streamed_langchain, LangChainInstrumentor),
        (openai_agents, OpenAIAgentsInstrumentor),
    ],
)
def test_a_call_is_one_call_with_its_agents_name(
    agent: Any, instrumentor: Any, client_too: bool, instrument: Any
) -> None:
    instrument(*([OpenAIInstrumentor] if client_too else []), instrumentor)
    NAMED_WORKERS.but(direct=False).check(rollout_of(agent))


def test_the_client_alone_tells_no_agent_and_adds_no_call(instrument: Any) -> None:
    instrument(OpenAIInstrumentor)
    for result in run_agent(rollout_of(langchain), in_order=False, direct=False):
        assert {call.spans.matched_by for call in result.record.calls if call.spans} == {"response_id"}
        assert [name for name, _ in result.agents()] == ["*"] * 6
