"""CrewAI: agents with tools, crews of several, streams, output types, crews side by side; over chat and responses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import agentlightning as agl
from tests.frameworks.engine import Json, call, calls, numbers, offered, said, thoughts
from tests.frameworks.harness import run_agent

crewai = pytest.importorskip("crewai", reason="crewai is not installed: make test-frameworks")
tools = pytest.importorskip("crewai.tools", reason="crewai is not installed: make test-frameworks")


@pytest.fixture(autouse=True)
def _files_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREWAI_STORAGE_DIR", str(tmp_path))


class Product(BaseModel):
    """The answer."""

    a: int
    b: int
    value: int


PRODUCTS = [Product(a=6, b=7, value=42), Product(a=8, b=9, value=72)]
SAID = ["It is 42, no doubt.", "It is 72, no doubt."]


@tools.tool("multiply")
def multiply(a: int, b: int) -> int:
    """Return a times b."""
    return a * b


def model_of(llm: agl.LLM, **more: Any) -> Any:
    return crewai.LLM(model=f"openai/{llm.model}", base_url=llm.get_base_url(), api_key=llm.api_key, **more)


def agent_of(llm: agl.LLM, role: str = "helper", own: Any = (), **more: Any) -> Any:
    settings = {"role": role, "goal": "Answer.", "backstory": "You are brief.", "tools": list(own)}
    return crewai.Agent(**settings, llm=model_of(llm, **more), verbose=False)


def task_of(agent: Any, task: str, **more: Any) -> Any:
    return crewai.Task(description=task, expected_output="A sentence.", agent=agent, **more)


def crew_of(*tasks: Any) -> Any:
    return crewai.Crew(agents=[task.agent for task in tasks], tasks=list(tasks), verbose=False)


def question(request: Json) -> Json:
    """Return the numbers of the first message that has them."""
    return numbers({"messages": [m for m in request["messages"] if m["role"] == "user" and " times " in said(m)]})


def multiplying(request: Json) -> str | Json:
    results = [said(message).strip() for message in request["messages"] if message["role"] == "tool"]
    return f"It is {results[0]}, no doubt." if results else call("multiply", **question(request))


@pytest.mark.parametrize(("dialect", "stream"), [("completions", False), ("completions", True), ("responses", False)])
def test_a_crew_of_one_with_a_tool(dialect: str, stream: bool) -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> str:
        helper = agent_of(llm, own=[multiply], stream=stream, api=dialect)
        return crew_of(task_of(helper, task)).kickoff().raw

    results = run_agent(agent, multiplying, direct=dialect == "completions")
    assert [one.output for one in results] == SAID
    assert [len(one.exchanges) for one in results] == [2, 2]
    assert {bool(exchange.request.get("stream")) for one in results for exchange in one.exchanges} == {stream}


@pytest.mark.parametrize("dialect", ["completions", "responses"])
def test_the_thoughts_of_earlier_turns_are_dropped(dialect: str) -> None:
    """So says the guide; a change of the library is welcome, and then a change of the guide."""

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> str:
        return crew_of(task_of(agent_of(llm, own=[multiply], api=dialect), task)).kickoff().raw

    def model(request: Json) -> Json:
        answer = multiplying(request)
        return {**({"content": answer} if isinstance(answer, str) else answer), "reasoning_content": "Thought."}

    for one, answer in zip(run_agent(agent, model, direct=False), SAID, strict=True):
        assert one.output == answer
        assert thoughts(one.exchanges[1].request) == [None]
        assert len(one.record.samples) == 2


def test_a_stream_of_responses_without_tools() -> None:
    """With tools CrewAI loses what it reads: it collects the calls of such a stream and returns its text, "" here."""

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> str:
        return crew_of(task_of(agent_of(llm, stream=True, api="responses"), task)).kickoff().raw

    results = run_agent(agent, lambda _: "It is what it is.", direct=False)
    assert [one.output for one in results] == ["It is what it is."] * 2


def test_several_tool_calls_at_once() -> None:
    def model(request: Json) -> str | Json:
        given = question(request)
        results = [said(message).strip() for message in request["messages"] if message["role"] == "tool"]
        swapped = {"a": given["b"], "b": given["a"]}
        return f"It is {results[0]}, no doubt." if results else calls(("multiply", given), ("multiply", swapped))

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> str:
        return crew_of(task_of(agent_of(llm, own=[multiply]), task)).kickoff().raw

    assert [one.output for one in run_agent(agent, model)] == SAID


def test_a_crew_of_two_where_one_goes_on_from_the_other() -> None:
    def model(request: Json) -> str:
        return "Reviewed." if "reviewer" in str(request["messages"][0]) else "It is a product."

    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> str:
        first = task_of(agent_of(llm, "writer"), task)
        second = task_of(agent_of(llm, "reviewer"), f"Review the answer to: {task}", context=[first])
        return (await crew_of(first, second).kickoff_async()).raw

    for one in run_agent(agent, model):
        assert one.output == "Reviewed."
        assert len(one.exchanges) == 2
        assert "It is a product." in str(one.exchanges[1].request["messages"])


@pytest.mark.parametrize("way", ["task", "agent"])
def test_an_output_type(way: str) -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> Product:
        helper = agent_of(llm)
        if way == "agent":
            return helper.kickoff(task, response_format=Product).pydantic
        return crew_of(task_of(helper, task, output_pydantic=Product)).kickoff().pydantic

    def model(request: Json) -> str | Json:
        given = question(request)
        wanted = {**given, "value": given["a"] * given["b"]}
        return call(offered(request).pop(), **wanted) if offered(request) else json.dumps(wanted)

    assert [one.output for one in run_agent(agent, model)] == PRODUCTS


@pytest.mark.parametrize("way", ["crews", "tasks"])
def test_agents_side_by_side_are_each_a_row(way: str) -> None:
    def model(request: Json) -> str:
        return f"{'Ada' if 'Ada' in str(request['messages']) else 'Emmy'} agrees."

    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> list[str]:
        if way == "crews":
            crew = crew_of(task_of(agent_of(llm), f"You are {{name}}. {task}"))
            done = await crew.kickoff_for_each_async([{"name": "Ada"}, {"name": "Emmy"}])
            return [one.raw for one in done]
        asked = [task_of(agent_of(llm, name), task, async_execution=True) for name in ("Ada", "Emmy")]
        last = task_of(agent_of(llm, "Ada, the chair"), f"Conclude: {task}", context=asked)
        done = await crew_of(*asked, last).kickoff_async()
        return [one.raw for one in done.tasks_output[:2]]

    for result in run_agent(agent, model, in_order=False):
        assert result.output == ["Ada agrees.", "Emmy agrees."]
        assert len(result.record.samples) == (2 if way == "crews" else 3)
