"""Agno: tools, streams, agents side by side and in teams, whose spans of OpenInference name the agents."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import agentlightning as agl
from tests.frameworks import suite
from tests.frameworks.suite import WORKERS, address, asking, keeps, multiply, needs

needs("agno")

from agno.agent import Agent
from agno.models.openai import OpenAILike
from agno.team import Team
from openinference.instrumentation.agno import AgnoInstrumentor


@pytest.fixture
def instrumented() -> Iterator[None]:
    AgnoInstrumentor().instrument()
    yield
    AgnoInstrumentor().uninstrument()


with_names = pytest.mark.usefixtures("instrumented")


def model_of(llm: agl.LLM) -> OpenAILike:
    return OpenAILike(id=llm.model, **address(llm))


def agent_of(llm: agl.LLM, name: str | None, **more: Any) -> Agent:
    settings = {"tools": [multiply], "system_message": f"You are {name}.", **more}
    return Agent(model=model_of(llm), name=name, **settings)


async def solver(task: str, llm: agl.LLM, streamed: bool) -> str:
    if not streamed:
        return (await asyncio.to_thread(agent_of(llm, "solver").run, task)).content
    events = agent_of(llm, "solver").arun(task, stream=True)
    return "".join([event.content async for event in events if event.event == "RunContent"])


WAYS = {"plain": False, "streamed": True}
test_a_tool_loop = keeps(suite.TOOL_LOOP, on=WAYS, names=["*"] * 2)(solver)
test_an_instrumented_tool_loop = with_names(keeps(suite.NAMED_LOOP, on=WAYS)(solver))


@with_names
@keeps(suite.NAMED_WORKERS)
async def test_agents_side_by_side(task: str, llm: agl.LLM) -> list[str]:
    done = await asyncio.gather(*(agent_of(llm, name).arun(task) for name in WORKERS))
    return [one.content for one in done]


@with_names
@keeps(
    suite.ASKED,
    model=asking("delegate_task_to_member", "task", member_id="expert"),
    outputs=None,
    rows=None,
    names=["chair", "expert", "expert", "chair"],
    direct=False,
)
async def test_a_team_and_its_member(task: str, llm: agl.LLM) -> str:
    expert = agent_of(llm, "expert", id="expert")
    chair = Team([expert], model=model_of(llm), name="chair", system_message="You are chair.")
    answer = (await chair.arun(task)).content
    assert answer.startswith("The expert says: ")
    return answer


@with_names
@keeps(suite.TOOL_LOOP, names=["*"] * 2)
def test_an_agent_without_a_name(task: str, llm: agl.LLM) -> str:
    return agent_of(llm, None).run(task).content
