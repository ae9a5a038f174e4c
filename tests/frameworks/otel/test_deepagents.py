"""deepagents: an agent with a sub-agent, whose spans of OpenInference name both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import agentlightning as agl
from tests.frameworks.suite import ASKED, address, asking, keeps, multiply, needs

needs("deepagents")

from deepagents import create_deep_agent
from langchain_openai import ChatOpenAI
from openinference.instrumentation.langchain import LangChainInstrumentor

pytestmark = pytest.mark.usefixtures("instrumented")

DELEGATED = ASKED.but(model=asking("task", "description", subagent_type="expert"), outputs=None, direct=False)


@pytest.fixture
def instrumented() -> Iterator[None]:
    LangChainInstrumentor().instrument()
    yield
    LangChainInstrumentor().uninstrument()


def deep_agent(llm: agl.LLM, name: str | None = "chief") -> Any:
    model = ChatOpenAI(model=llm.model, **address(llm))
    expert = {"name": "expert", "description": "multiplies", "system_prompt": "You are expert.", "tools": [multiply]}
    return create_deep_agent(model, system_prompt="You are chief.", subagents=[expert], name=name)


@keeps(DELEGATED, on={way: way for way in ("async", "sync", "streamed")}, names=["chief", "expert", "expert", "chief"])
async def test_an_agent_and_its_sub_agent(task: str, llm: agl.LLM, way: str) -> str:
    agent, inputs = deep_agent(llm), {"messages": [("user", task)]}
    if way == "streamed":
        parts = agent.astream(inputs, stream_mode="messages")
        return "".join([part.text async for part, _ in parts if part.type == "AIMessageChunk"])
    return (await agent.ainvoke(inputs) if way == "async" else agent.invoke(inputs))["messages"][-1].text


@keeps(DELEGATED, names=["*", "expert", "expert", "*"])
def test_a_chief_without_a_name(task: str, llm: agl.LLM) -> str:
    return deep_agent(llm, None).invoke({"messages": [("user", task)]})["messages"][-1].text
