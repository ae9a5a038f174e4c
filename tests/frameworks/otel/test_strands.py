"""Strands: tools, streams, structured output, agents side by side and as tools; its own spans beside the gateway's."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import pytest
from pydantic import BaseModel

import agentlightning as agl
from agentlightning.adapter import TracerTraceToTriplet
from tests.frameworks.engine import Json, both_ways, calculator, call, last, numbers, offered, said
from tests.frameworks.harness import TASKS, TaskResult, run_agent

pytest.importorskip("strands", reason="strands-agents is not installed: make test-frameworks")

from strands import Agent, tool
from strands.models.openai import OpenAIModel

SAID = ["It is 42, no doubt.\n", "It is 72, no doubt.\n"]
WORKERS = [f"worker{number}" for number in range(3)]


class Product(BaseModel):
    """An answer that can be parsed."""

    a: int
    b: int
    value: int


@tool
def multiply(a: int, b: int) -> int:
    """Return a times b."""
    return a * b


def model_of(llm: agl.LLM, **more: Any) -> OpenAIModel:
    client = {"base_url": llm.get_base_url(), "api_key": llm.api_key}
    return OpenAIModel(client_args=client, model_id=llm.model, **more)


def agent_of(llm: agl.LLM, name: str = "solver", **more: Any) -> Agent:
    told = {"tools": [multiply], "system_prompt": f"You are {name}.", "callback_handler": None, **more}
    return Agent(model=model_of(llm), name=name, **told)


@agl.rollout
async def solver(task: str, llm: agl.LLM) -> str:
    return str(await agent_of(llm).invoke_async(task))


def seen_by(results: list[TaskResult]) -> set[tuple[str, str | None]]:
    calls = [call for one in results for call in one.record.calls]
    return {(call.spans.seen_by, call.spans.matched_by) for call in calls if call.spans is not None}


@pytest.mark.parametrize("conventions", ["", "gen_ai_latest_experimental"])
def test_a_tool_loop_is_one_row_and_each_call_is_one_call(conventions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", conventions)
    results = run_agent(solver)
    assert [one.output for one in results] == SAID
    assert [[len(row.call_ids) for row in one.record.samples] for one in results] == [[2], [2]]
    assert seen_by(results) <= {("both", "traceparent"), ("both", "response_id")}
    assert [one.agents() for one in results] == [[("solver", "You are solver.")] * 2] * 2


def test_several_tool_calls_at_once() -> None:
    results = run_agent(solver, both_ways)
    assert [len(one.exchanges) for one in results] == [2, 2]
    assert seen_by(results) <= {("both", "traceparent"), ("both", "response_id")}


def test_without_streams() -> None:
    @agl.rollout
    def plain(task: str, llm: agl.LLM) -> str:
        return str(Agent(model=model_of(llm, streaming=False), tools=[multiply], callback_handler=None)(task))

    assert [one.output for one in run_agent(plain)] == SAID


def test_a_stream_gives_the_words_as_they_come() -> None:
    @agl.rollout
    async def streamed(task: str, llm: agl.LLM) -> list[str]:
        events = agent_of(llm).stream_async(task)
        return [event["data"] async for event in events if "data" in event]

    for result, answer in zip(run_agent(streamed), SAID, strict=True):
        assert "".join(result.output) == answer.strip()
        assert len(result.output) > 1


def test_structured_output() -> None:
    def model(request: Json) -> str | Json:
        if last(request)["role"] == "tool" and "Product" in offered(request):
            return "Done."
        found = numbers(request)
        return call("Product", **found, value=found["a"] * found["b"])

    @agl.rollout
    async def structured(task: str, llm: agl.LLM) -> Product:
        agent = agent_of(llm, tools=[])
        return (await agent.invoke_async(task, structured_output_model=Product)).structured_output

    found = [one.output for one in run_agent(structured, model)]
    assert found == [Product(a=6, b=7, value=42), Product(a=8, b=9, value=72)]


# --- several agents --------------------------------------------------------------------------------------------------


async def ask(llm: agl.LLM, name: str, task: str) -> str:
    return str(await agent_of(llm, name).invoke_async(task))


@agl.rollout
async def gathered(task: str, llm: agl.LLM) -> list[str]:
    return await asyncio.gather(*(ask(llm, name, task) for name in WORKERS))


@agl.rollout
def threaded(task: str, llm: agl.LLM) -> list[str]:
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(copy_context().run, agent_of(llm, name), task) for name in WORKERS]
        return [str(job.result()) for job in jobs]


@pytest.mark.parametrize("agent", [gathered, threaded])
@pytest.mark.parametrize("conventions", ["", "gen_ai_latest_experimental"])
def test_agents_side_by_side_have_their_own_calls(
    agent: Any, conventions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", conventions)
    for result in run_agent(agent, in_order=False):
        assert sorted(result.agents()) == sorted((name, f"You are {name}.") for name in WORKERS for _ in range(2))
        assert result.agents("^worker2$") == [("worker2", "You are worker2.")] * 2
        assert len(result.record.calls) == 6


def test_agents_that_ask_the_same_at_the_same_time_have_their_name_or_none() -> None:
    @agl.rollout
    async def alike(task: str, llm: agl.LLM) -> list[str]:
        models = [model_of(llm, params={"user": name}) for name in WORKERS]
        agents = [
            Agent(model=model, name=name, callback_handler=None) for model, name in zip(models, WORKERS, strict=True)
        ]
        return [str(answer) for answer in await asyncio.gather(*(agent.invoke_async(task) for agent in agents))]

    for result in run_agent(alike, lambda _: "It is what it is.", in_order=False):
        assert len(result.record.calls) == 3
        truth = {each.reply["id"]: each.request["user"] for each in result.exchanges if each.reply}
        named = TracerTraceToTriplet().adapt(result.spans)
        assert all(t.metadata["agent_name"] in ("*", truth[t.metadata["response_id"]]) for t in named)
        explained = TracerTraceToTriplet(agent_match="^worker2$").explain(result.spans)
        assert {truth[each.call.response_id or ""] for each in explained.trainable} <= {"worker2"}
        assert len(explained.trainable) + explained.counts().get("unknown_agent", 0) >= 1


def test_an_agent_as_a_tool_of_another_one() -> None:
    def model(request: Json) -> str | Json:
        if "helper" in offered(request) and last(request)["role"] != "tool":
            return call("helper", question=said(last(request)))
        return calculator(request)

    @agl.rollout
    async def with_helper(task: str, llm: agl.LLM) -> str:
        @tool
        async def helper(question: str) -> str:
            """Answer a question."""
            return await ask(llm, "helper", question)

        return str(await agent_of(llm, "boss", tools=[helper]).invoke_async(task))

    for result in run_agent(with_helper, model, tasks=TASKS[:1]):
        assert [name for name, _ in result.agents()] == ["boss", "helper", "helper", "boss"]
        assert [name for name, _ in result.agents("^helper$")] == ["helper", "helper"]
