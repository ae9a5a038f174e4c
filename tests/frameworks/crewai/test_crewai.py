"""CrewAI: agents with tools, crews of several, streams, output types, crews side by side; over chat and responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from tests.frameworks import suite
from tests.frameworks.engine import Json, both_ways, call, numbers, said
from tests.frameworks.harness import TaskResult
from tests.frameworks.suite import SAID, Product, Promise, address, in_form, keeps, multiply, needs

crewai = needs("crewai")
tools = needs("crewai.tools", "crewai")


@pytest.fixture(autouse=True)
def _files_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREWAI_STORAGE_DIR", str(tmp_path))


multiplier = tools.tool("multiply")(multiply)


def agent_of(llm: agl.LLM, role: str = "helper", own: Any = (), **more: Any) -> Any:
    settings = {"role": role, "goal": "Answer.", "backstory": "You are brief.", "tools": list(own)}
    model = crewai.LLM(model=f"openai/{llm.model}", **address(llm), **more)
    return crewai.Agent(**settings, llm=model, verbose=False)


def task_of(agent: Any, task: str, **more: Any) -> Any:
    return crewai.Task(description=task, expected_output="A sentence.", agent=agent, **more)


def crew_of(*tasks: Any) -> Any:
    return crewai.Crew(agents=[task.agent for task in tasks], tasks=list(tasks), verbose=False)


def question(request: Json) -> Json:
    """Return the request as if it began with the message that has the numbers."""
    questions = [message for message in request["messages"] if message["role"] == "user" and " times " in said(message)]
    return {**request, "messages": [*questions[:1], *request["messages"]]}


def multiplying(request: Json) -> str | Json:
    results = [said(message).strip() for message in request["messages"] if message["role"] == "tool"]
    return f"It is {results[0]}, no doubt." if results else call("multiply", **numbers(question(request)))


def thinking(request: Json) -> Json:
    answer = multiplying(request)
    return {**({"content": answer} if isinstance(answer, str) else answer), "reasoning_content": "Thought."}


def as_asked(streamed: bool) -> Any:
    def check(result: TaskResult) -> None:
        assert [bool(exchange.request.get("stream")) for exchange in result.exchanges] == [streamed] * 2

    return check


async def with_tool(task: str, llm: agl.LLM, model: Json) -> str:
    return (await crew_of(task_of(agent_of(llm, own=[multiplier], **model), task)).kickoff_async()).raw


LOOP = suite.TOOL_LOOP.but(model=multiplying, rows=None)
DIALECTS = {"chat": {"api": "completions"}, "responses": {"api": "responses"}}
test_a_crew_of_one = keeps(LOOP, on=DIALECTS, also=as_asked(False))(with_tool)
test_a_crew_that_streams = keeps(LOOP, on={"chat": {**DIALECTS["chat"], "stream": True}}, also=as_asked(True))(
    with_tool
)
test_thoughts = keeps(suite.THOUGHTS_DROPPED, on=DIALECTS, model=thinking)(with_tool)


def first_of_both_ways(request: Json) -> str | Json:
    is_called = any(message["role"] == "tool" for message in request["messages"])
    return multiplying(request) if is_called else both_ways(question(request))


test_several_tool_calls_at_once = keeps(
    suite.SEVERAL_TOOLS, on={"chat": {}}, model=first_of_both_ways, outputs=SAID, rows=None
)(with_tool)


@keeps(suite.ONE_CALL, direct=False)
def test_a_stream_of_responses_without_tools(task: str, llm: agl.LLM) -> str:
    """With tools CrewAI loses what it reads: it collects the calls of such a stream and returns its text, "" here."""
    return crew_of(task_of(agent_of(llm, stream=True, api="responses"), task)).kickoff().raw


def reviewing(request: Json) -> str:
    return "Reviewed." if "reviewer" in str(request["messages"][0]) else "It is a product."


def goes_on(result: TaskResult) -> None:
    assert len(result.exchanges) == 2
    assert "It is a product." in str(result.exchanges[1].request["messages"])


@keeps(Promise("crew of two", reviewing, ["Reviewed."] * 2, also=goes_on))
async def test_a_crew_of_two_where_one_goes_on_from_the_other(task: str, llm: agl.LLM) -> str:
    first = task_of(agent_of(llm, "writer"), task)
    second = task_of(agent_of(llm, "reviewer"), f"Review the answer to: {task}", context=[first])
    return (await crew_of(first, second).kickoff_async()).raw


@keeps(suite.PARSED, on={"task": "task", "agent": "agent"}, model=lambda request: in_form(question(request)), rows=None)
def test_an_output_type(task: str, llm: agl.LLM, way: str) -> Product:
    helper = agent_of(llm)
    if way == "agent":
        return helper.kickoff(task, response_format=Product).pydantic
    return crew_of(task_of(helper, task, output_pydantic=Product)).kickoff().pydantic


def agreeing(request: Json) -> str:
    return f"{'Ada' if 'Ada' in str(request['messages']) else 'Emmy'} agrees."


AGREED = Promise("side by side", agreeing, [["Ada agrees.", "Emmy agrees."]] * 2, in_order=False)


@keeps(AGREED, rows=[1, 1])
async def test_crews_side_by_side(task: str, llm: agl.LLM) -> list[str]:
    crew = crew_of(task_of(agent_of(llm), f"You are {{name}}. {task}"))
    return [one.raw for one in await crew.kickoff_for_each_async([{"name": "Ada"}, {"name": "Emmy"}])]


@keeps(AGREED, rows=[1, 1, 1])
async def test_tasks_side_by_side(task: str, llm: agl.LLM) -> list[str]:
    tasks = [task_of(agent_of(llm, name), task, async_execution=True) for name in ("Ada", "Emmy")]
    last = task_of(agent_of(llm, "Ada, the chair"), f"Conclude: {task}", context=tasks)
    return [one.raw for one in (await crew_of(*tasks, last).kickoff_async()).tasks_output[:2]]
