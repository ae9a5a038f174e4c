"""Strands: tools, streams, structured output, agents side by side and as tools; its own spans beside the gateway's."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import agentlightning as agl
from agentlightning.adapter import TracerTraceToTriplet
from tests.frameworks import suite
from tests.frameworks.engine import Json, call, last, offered
from tests.frameworks.harness import TASKS, TaskResult, run_agent
from tests.frameworks.suite import WORKERS, Product, address, asking, keeps, needs, product
from tests.frameworks.suite import multiply as product_of

needs("strands", "strands-agents")

from strands import Agent, tool
from strands.models.openai import OpenAIModel

SAID = ["It is 42, no doubt.\n", "It is 72, no doubt.\n"]
OPT_IN = "OTEL_SEMCONV_STABILITY_OPT_IN"
CONVENTIONS = {"older": {OPT_IN: ""}, "latest": {OPT_IN: "gen_ai_latest_experimental"}}
multiply = tool(product_of)


def model_of(llm: agl.LLM, **more: Any) -> OpenAIModel:
    return OpenAIModel(client_args=address(llm), model_id=llm.model, **more)


def agent_of(llm: agl.LLM, name: str = "solver", **more: Any) -> Agent:
    settings = {"tools": [multiply], "system_prompt": f"You are {name}.", "callback_handler": None, **more}
    return Agent(model=model_of(llm), name=name, **settings)


async def ask(llm: agl.LLM, name: str, task: str) -> str:
    return str(await agent_of(llm, name).invoke_async(task))


def seen_by_both(result: TaskResult) -> None:
    sources = {(call.spans.seen_by, call.spans.matched_by) for call in result.record.calls if call.spans is not None}
    assert sources <= {("both", "traceparent"), ("both", "response_id")}


@keeps(
    *suite.NAMED_LOOP.but(outputs=SAID).under(CONVENTIONS),
    suite.SEVERAL_TOOLS.but(rows=None, outputs=None),
    also=seen_by_both,
)
async def test_a_tool_loop(task: str, llm: agl.LLM) -> str:
    return await ask(llm, "solver", task)


@keeps(suite.TOOL_LOOP, outputs=SAID, rows=None)
def test_without_streams(task: str, llm: agl.LLM) -> str:
    return str(Agent(model=model_of(llm, streaming=False), tools=[multiply], callback_handler=None)(task))


@keeps(suite.TOOL_LOOP, rows=None)
async def test_a_stream_gives_the_words_as_they_come(task: str, llm: agl.LLM) -> str:
    words = [event["data"] async for event in agent_of(llm).stream_async(task) if "data" in event]
    assert len(words) > 1
    return "".join(words)


def in_form_then_done(request: Json) -> str | Json:
    if last(request)["role"] == "tool" and "Product" in offered(request):
        return "Done."
    return call("Product", **product(request))


@keeps(suite.PARSED, model=in_form_then_done, rows=None)
async def test_structured_output(task: str, llm: agl.LLM) -> Product:
    return (await agent_of(llm, tools=[]).invoke_async(task, structured_output_model=Product)).structured_output


# --- several agents --------------------------------------------------------------------------------------------------


@keeps(*suite.NAMED_WORKERS.under(CONVENTIONS))
async def test_agents_gathered(task: str, llm: agl.LLM) -> list[str]:
    return await asyncio.gather(*(ask(llm, name, task) for name in WORKERS))


@keeps(*suite.NAMED_WORKERS.under(CONVENTIONS))
def test_agents_in_threads(task: str, llm: agl.LLM) -> list[str]:
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(copy_context().run, agent_of(llm, name), task) for name in WORKERS]
        return [str(job.result()) for job in jobs]


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


@keeps(
    suite.ASKED,
    model=asking("helper", "question"),
    outputs=None,
    rows=None,
    names=["boss", "helper", "helper", "boss"],
    tasks=TASKS[:1],
)
async def test_an_agent_as_a_tool_of_another_one(task: str, llm: agl.LLM) -> str:
    @tool
    async def helper(question: str) -> str:
        """Answer a question."""
        return await ask(llm, "helper", question)

    return str(await agent_of(llm, "boss", tools=[helper]).invoke_async(task))
