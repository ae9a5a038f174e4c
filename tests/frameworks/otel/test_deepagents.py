"""deepagents: an agent with a sub-agent, whose spans of OpenInference name both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import agentlightning as agl
from tests.frameworks.engine import Json, calculator, call, last, offered, said
from tests.frameworks.harness import run_agent

pytest.importorskip("deepagents", reason="deepagents is not installed: make test-frameworks")

from deepagents import create_deep_agent
from langchain_openai import ChatOpenAI
from openinference.instrumentation.langchain import LangChainInstrumentor


@pytest.fixture
def instrumented() -> Iterator[None]:
    LangChainInstrumentor().instrument()
    yield
    LangChainInstrumentor().uninstrument()


def multiply(a: int, b: int) -> int:
    """Return a times b."""
    return a * b


def deep_agent(llm: agl.LLM, name: str | None = "chief") -> Any:
    model = ChatOpenAI(model=llm.model, base_url=llm.get_base_url(), api_key=llm.api_key)
    expert = {"name": "expert", "description": "multiplies", "system_prompt": "EXPERT", "tools": [multiply]}
    return create_deep_agent(model, system_prompt="CHIEF", subagents=[expert], name=name)


@agl.rollout
async def agent(task: str, llm: agl.LLM) -> str:
    return (await deep_agent(llm).ainvoke({"messages": [("user", task)]}))["messages"][-1].text


@agl.rollout
def blocking(task: str, llm: agl.LLM) -> str:
    return deep_agent(llm).invoke({"messages": [("user", task)]})["messages"][-1].text


@agl.rollout
async def streamed(task: str, llm: agl.LLM) -> str:
    parts = deep_agent(llm).astream({"messages": [("user", task)]}, stream_mode="messages")
    texts = [part.text async for part, _ in parts if part.type == "AIMessageChunk"]
    return "".join(texts)


def model(request: Json) -> str | Json:
    """The chief gives its task to the expert."""
    if "multiply" in offered(request):
        return calculator(request)
    if last(request)["role"] == "tool":
        return f"The expert says: {said(last(request))}"
    return call("task", description=said(last(request)), subagent_type="expert")


@pytest.mark.parametrize("agent", [agent, blocking, streamed], ids=["async", "sync", "streamed"])
def test_an_agent_and_its_sub_agent_have_their_names(agent: Any, instrumented: None) -> None:
    for one in run_agent(agent, model, direct=False):
        assert [name for name, _ in one.agents("^chief$")] == ["chief"] * 2
        assert [name for name, _ in one.agents("^expert$")] == ["expert"] * 2
        assert all("EXPERT" in words for _, words in one.agents("^expert$"))
        assert [len(row.call_ids) for row in one.record.samples] == [2, 2]


def test_a_chief_without_a_name_has_none(instrumented: None) -> None:
    @agl.rollout
    def nameless(task: str, llm: agl.LLM) -> str:
        return deep_agent(llm, None).invoke({"messages": [("user", task)]})["messages"][-1].text

    for one in run_agent(nameless, model, direct=False):
        assert [name for name, _ in one.agents()] == ["*", "expert", "expert", "*"]
