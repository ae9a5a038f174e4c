"""OpenInference: several instrumentations at once, each call still one call with its agent's name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import agentlightning as agl
from tests.frameworks.harness import run_agent

pytest.importorskip(
    "openinference.instrumentation.openai", reason="openinference is not installed: make test-frameworks"
)

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI
from openinference.instrumentation.langchain import LangChainInstrumentor
from openinference.instrumentation.openai import OpenAIInstrumentor
from openinference.instrumentation.openai_agents import OpenAIAgentsInstrumentor

WORKERS = [f"worker{number}" for number in range(3)]


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


def multiply(a: int, b: int) -> int:
    """Return a times b."""
    return a * b


@agl.rollout
async def langchain(task: str, llm: agl.LLM) -> list[str]:
    model = ChatOpenAI(model=llm.model, base_url=llm.get_base_url(), api_key=llm.api_key)

    async def ask(name: str) -> str:
        agent = create_agent(model, [tool(multiply)], system_prompt=f"You are {name}.", name=name)
        return (await agent.ainvoke({"messages": [("user", task)]}))["messages"][-1].text

    return await asyncio.gather(*map(ask, WORKERS))


@agl.rollout
async def streamed_langchain(task: str, llm: agl.LLM) -> list[str]:
    model = ChatOpenAI(model=llm.model, base_url=llm.get_base_url(), api_key=llm.api_key)

    async def ask(name: str) -> str:
        agent = create_agent(model, [tool(multiply)], system_prompt=f"You are {name}.", name=name)
        parts = agent.astream({"messages": [("user", task)]}, stream_mode="messages")
        return "".join([part.text async for part, _ in parts if part.type == "AIMessageChunk"])

    return await asyncio.gather(*map(ask, WORKERS))


@agl.rollout
async def openai_agents(task: str, llm: agl.LLM) -> list[str]:
    client = AsyncOpenAI(base_url=llm.get_base_url(), api_key=llm.api_key)
    model = OpenAIChatCompletionsModel(llm.model, client)

    async def ask(name: str) -> str:
        agent = Agent(name=name, model=model, tools=[function_tool(multiply)], instructions=f"You are {name}.")
        return (await Runner.run(agent, task)).final_output

    return await asyncio.gather(*map(ask, WORKERS))


@pytest.mark.parametrize(
    ("agent", "instrumentors"),
    [
        (langchain, [OpenAIInstrumentor, LangChainInstrumentor]),
        (langchain, [LangChainInstrumentor]),
        (streamed_langchain, [OpenAIInstrumentor, LangChainInstrumentor]),
        (streamed_langchain, [LangChainInstrumentor]),
        (openai_agents, [OpenAIInstrumentor, OpenAIAgentsInstrumentor]),
        (openai_agents, [OpenAIAgentsInstrumentor]),
    ],
)
def test_a_call_is_one_call_with_its_agents_name(agent: Any, instrumentors: list[Any], instrument: Any) -> None:
    instrument(*instrumentors)
    for result in run_agent(agent, in_order=False, direct=False):
        assert len(result.record.calls) == 6
        assert sorted(result.agents()) == sorted((name, f"You are {name}.") for name in WORKERS for _ in range(2))
        assert result.agents("^worker2$") == [("worker2", "You are worker2.")] * 2


def test_the_client_alone_tells_no_agent_and_adds_no_call(instrument: Any) -> None:
    instrument(OpenAIInstrumentor)
    for result in run_agent(langchain, in_order=False, direct=False):
        assert {call.spans.matched_by for call in result.record.calls if call.spans} == {"response_id"}
        assert [name for name, _ in result.agents()] == ["*"] * 6
