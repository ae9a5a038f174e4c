"""Google ADK with LiteLLM: tools, streams, agents side by side, sub-agents and agents as tools; its spans too."""

from __future__ import annotations

import asyncio
from typing import Any

import agentlightning as agl
from tests.frameworks import suite
from tests.frameworks.engine import Json, call, offered, said
from tests.frameworks.harness import TASKS, TaskResult
from tests.frameworks.suite import WORKERS, Product, Promise, asking, keeps, multiply, needs

needs("google.adk", "google-adk")

from google.adk.agents import LlmAgent, RunConfig
from google.adk.agents.run_config import StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.adk.tools.agent_tool import AgentTool
from google.genai import types

SAID = ['It is {"result": 42}, no doubt.', 'It is {"result": 72}, no doubt.']
SETTINGS = {
    "default": {},
    "with words": {
        "OTEL_SEMCONV_STABILITY_OPT_IN": "gen_ai_latest_experimental",
        "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "SPAN_ONLY",
    },
    "older": {"ADK_TELEMETRY_SCHEMA_VERSION_OPT_IN": "1"},
}


def agent_of(llm: agl.LLM, name: str = "solver", **more: Any) -> LlmAgent:
    model = LiteLlm(model=f"openai/{llm.model}", api_base=llm.get_base_url(), api_key=llm.api_key or "unused")
    settings = {"instruction": f"You are {name}.", "tools": [multiply], **more}
    return LlmAgent(name=name, model=model, **settings)


async def events_of(agent: LlmAgent, task: str, **more: Any) -> list[Any]:
    runner = InMemoryRunner(agent=agent, app_name="app")
    session = await runner.session_service.create_session(app_name="app", user_id="user")
    message = types.Content(role="user", parts=[types.Part(text=task)])
    events = runner.run_async(user_id="user", session_id=session.id, new_message=message, **more)
    return [event async for event in events]


def text_of(event: Any) -> str:
    parts = event.content.parts if event.content and event.content.parts else []
    return "".join(part.text or "" for part in parts)


async def ask(agent: LlmAgent, task: str) -> str:
    return text_of([event for event in await events_of(agent, task) if event.is_final_response()][-1])


def seen_by_both(result: TaskResult) -> None:
    assert {call.spans.seen_by for call in result.record.calls if call.spans} == {"both"}


@keeps(*suite.NAMED_LOOP.under(SETTINGS), outputs=SAID, also=seen_by_both)
async def test_a_tool_loop(task: str, llm: agl.LLM) -> str:
    return await ask(agent_of(llm), task)


@keeps(suite.TOOL_LOOP, outputs=SAID)
async def test_a_stream_gives_the_words_as_they_come(task: str, llm: agl.LLM) -> str:
    events = await events_of(agent_of(llm), task, run_config=RunConfig(streaming_mode=StreamingMode.SSE))
    words = [text_of(event) for event in events if event.partial and text_of(event)]
    assert len(words) > 1
    return "".join(words)


@keeps(suite.PARSED)
async def test_structured_output(task: str, llm: agl.LLM) -> Product:
    return Product.model_validate_json(await ask(agent_of(llm, tools=[], output_schema=Product), task))


# --- several agents --------------------------------------------------------------------------------------------------


@keeps(*suite.NAMED_WORKERS.under(SETTINGS))
async def test_agents_side_by_side(task: str, llm: agl.LLM) -> list[str]:
    return await asyncio.gather(*(ask(agent_of(llm, name), task) for name in WORKERS))


def handing_over(request: Json) -> str | Json:
    if "transfer_to_agent" in offered(request) and "You are boss." in said(request["messages"][0]):
        return call("transfer_to_agent", agent_name="expert")
    return "It is 42."


@keeps(Promise("handoff", handing_over, ["It is 42."], names=["boss", "expert"], tasks=TASKS[:1]))
async def test_a_handoff_to_a_sub_agent(task: str, llm: agl.LLM) -> str:
    expert = agent_of(llm, "expert", description="Knows the answer.", tools=[])
    return await ask(agent_of(llm, "boss", tools=[], sub_agents=[expert]), task)


@keeps(
    suite.ASKED,
    model=asking("helper", "request"),
    outputs=None,
    names=["boss", "helper", "helper", "boss"],
    tasks=TASKS[:1],
)
async def test_an_agent_as_a_tool_of_another_one(task: str, llm: agl.LLM) -> str:
    helper = agent_of(llm, "helper", description="Answers a question.")
    return await ask(agent_of(llm, "boss", tools=[AgentTool(helper)]), task)
