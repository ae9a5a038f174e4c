"""Agno: tools, streams, agents side by side and in teams, whose spans of OpenInference name the agents."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import agentlightning as agl
from tests.frameworks.engine import Json, calculator, call, last, offered, said
from tests.frameworks.harness import run_agent

pytest.importorskip("agno", reason="agno is not installed: make test-frameworks")

from agno.agent import Agent
from agno.models.openai import OpenAILike
from agno.team import Team
from openinference.instrumentation.agno import AgnoInstrumentor

SAID = ["It is 42, no doubt.", "It is 72, no doubt."]
WORKERS = [f"worker{number}" for number in range(3)]


@pytest.fixture
def instrumented() -> Iterator[None]:
    AgnoInstrumentor().instrument()
    yield
    AgnoInstrumentor().uninstrument()


def multiply(a: int, b: int) -> int:
    """Return a times b."""
    return a * b


def model_of(llm: agl.LLM) -> OpenAILike:
    return OpenAILike(id=llm.model, base_url=llm.get_base_url(), api_key=llm.api_key)


def agent_of(llm: agl.LLM, name: str | None, **more: Any) -> Agent:
    told = {"tools": [multiply], "system_message": f"You are {name}.", **more}
    return Agent(model=model_of(llm), name=name, **told)


@agl.rollout
def solver(task: str, llm: agl.LLM) -> str:
    return agent_of(llm, "solver").run(task).content


@agl.rollout
async def streamed_solver(task: str, llm: agl.LLM) -> str:
    events = agent_of(llm, "solver").arun(task, stream=True)
    return "".join([event.content async for event in events if event.event == "RunContent"])


@agl.rollout
async def workers(task: str, llm: agl.LLM) -> list[str]:
    done = await asyncio.gather(*(agent_of(llm, name).arun(task) for name in WORKERS))
    return [one.content for one in done]


@pytest.mark.parametrize("agent", [solver, streamed_solver], ids=["plain", "streamed"])
def test_a_tool_loop_is_one_row(agent: Any) -> None:
    results = run_agent(agent)
    assert [one.output for one in results] == SAID
    assert [[len(row.call_ids) for row in one.record.samples] for one in results] == [[2], [2]]
    assert [one.agents() for one in results] == [[("*", "You are solver.")] * 2] * 2


@pytest.mark.parametrize("agent", [solver, streamed_solver], ids=["plain", "streamed"])
def test_instrumented_each_call_is_one_call_with_its_agents_name(agent: Any, instrumented: None) -> None:
    for one in run_agent(agent):
        assert one.agents("^solver$") == [("solver", "You are solver.")] * 2
        assert len(one.record.calls) == 2


def test_agents_side_by_side_have_their_names(instrumented: None) -> None:
    for one in run_agent(workers, in_order=False):
        assert len(one.record.calls) == 6
        assert sorted(one.agents()) == sorted((name, f"You are {name}.") for name in WORKERS for _ in range(2))
        assert one.agents("^worker2$") == [("worker2", "You are worker2.")] * 2


def test_a_team_and_its_member_have_their_names(instrumented: None) -> None:
    def model(request: Json) -> str | Json:
        if "multiply" in offered(request):
            return calculator(request)
        if last(request)["role"] == "tool":
            return "The expert has said it."
        return call("delegate_task_to_member", member_id="expert", task=said(last(request)))

    @agl.rollout
    async def team(task: str, llm: agl.LLM) -> str:
        expert = agent_of(llm, "expert", id="expert")
        chair = Team([expert], model=model_of(llm), name="chair", system_message="You are chair.")
        return (await chair.arun(task)).content

    for one in run_agent(team, model, direct=False):
        assert one.output == "The expert has said it."
        assert one.agents("^expert$") == [("expert", "You are expert.")] * 2
        assert one.agents("^chair$") == [("chair", "You are chair.")] * 2


def test_an_agent_without_a_name_has_none(instrumented: None) -> None:
    @agl.rollout
    def nameless(task: str, llm: agl.LLM) -> str:
        return agent_of(llm, None).run(task).content

    assert [one.agents() for one in run_agent(nameless)] == [[("*", "You are None.")] * 2] * 2
