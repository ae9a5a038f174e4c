"""Google ADK with LiteLLM: tools, streams, agents side by side, sub-agents and agents as tools; its spans too."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import BaseModel

import agentlightning as agl
from tests.frameworks.engine import Json, calculator, call, last, numbers, offered, said
from tests.frameworks.harness import TASKS, run_agent

pytest.importorskip("google.adk", reason="google-adk is not installed: make test-frameworks")

from google.adk.agents import LlmAgent, RunConfig
from google.adk.agents.run_config import StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.adk.tools.agent_tool import AgentTool
from google.genai import types

SAID = ['It is {"result": 42}, no doubt.', 'It is {"result": 72}, no doubt.']
WORKERS = [f"worker{number}" for number in range(3)]
WORDS = {
    "OTEL_SEMCONV_STABILITY_OPT_IN": "gen_ai_latest_experimental",
    "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "SPAN_ONLY",
}
OLDER = {"ADK_TELEMETRY_SCHEMA_VERSION_OPT_IN": "1"}


class Product(BaseModel):
    """An answer that can be parsed."""

    a: int
    b: int
    value: int


def multiply(a: int, b: int) -> int:
    """Return a times b."""
    return a * b


def agent_of(llm: agl.LLM, name: str = "solver", **more: Any) -> LlmAgent:
    model = LiteLlm(model=f"openai/{llm.model}", api_base=llm.get_base_url(), api_key=llm.api_key)
    told = {"instruction": f"You are {name}.", "tools": [multiply], **more}
    return LlmAgent(name=name, model=model, **told)


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


@agl.rollout
async def solver(task: str, llm: agl.LLM) -> str:
    return await ask(agent_of(llm), task)


@pytest.mark.parametrize("settings", [{}, WORDS, OLDER], ids=["default", "with words", "older"])
def test_a_tool_loop_is_one_row_and_each_call_is_one_call(
    settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    results = run_agent(solver)
    assert [one.output for one in results] == SAID
    assert [[len(row.call_ids) for row in one.record.samples] for one in results] == [[2], [2]]
    assert {call.spans.seen_by for one in results for call in one.record.calls if call.spans} == {"both"}
    assert [[name for name, _ in one.agents()] for one in results] == [["solver"] * 2] * 2


def test_a_stream_gives_the_words_as_they_come() -> None:
    @agl.rollout
    async def streamed(task: str, llm: agl.LLM) -> list[str]:
        config = RunConfig(streaming_mode=StreamingMode.SSE)
        events = await events_of(agent_of(llm), task, run_config=config)
        return [text_of(event) for event in events if event.partial and text_of(event)]

    for result, answer in zip(run_agent(streamed), SAID, strict=True):
        assert "".join(result.output) == answer
        assert len(result.output) > 1


def test_structured_output() -> None:
    def model(request: Json) -> str:
        found = numbers(request)
        return json.dumps({**found, "value": found["a"] * found["b"]})

    @agl.rollout
    async def structured(task: str, llm: agl.LLM) -> Product:
        return Product.model_validate_json(await ask(agent_of(llm, tools=[], output_schema=Product), task))

    found = [one.output for one in run_agent(structured, model)]
    assert found == [Product(a=6, b=7, value=42), Product(a=8, b=9, value=72)]


# --- several agents --------------------------------------------------------------------------------------------------


@agl.rollout
async def gathered(task: str, llm: agl.LLM) -> list[str]:
    return await asyncio.gather(*(ask(agent_of(llm, name), task) for name in WORKERS))


@pytest.mark.parametrize("settings", [{}, WORDS, OLDER], ids=["default", "with words", "older"])
def test_agents_side_by_side_have_their_own_calls(settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    for result in run_agent(gathered, in_order=False):
        assert len(result.record.calls) == 6
        assert sorted(name for name, _ in result.agents()) == sorted(WORKERS * 2)
        assert [f"You are {name}." in words for name, words in result.agents()] == [True] * 6
        assert [name for name, _ in result.agents("^worker2$")] == ["worker2"] * 2


def test_a_handoff_to_a_sub_agent() -> None:
    def model(request: Json) -> str | Json:
        if "transfer_to_agent" in offered(request) and "You are boss." in said(request["messages"][0]):
            return call("transfer_to_agent", agent_name="expert")
        return "It is 42."

    @agl.rollout
    async def handed_over(task: str, llm: agl.LLM) -> str:
        expert = agent_of(llm, "expert", description="Knows the answer.", tools=[])
        return await ask(agent_of(llm, "boss", tools=[], sub_agents=[expert]), task)

    for result in run_agent(handed_over, model, tasks=TASKS[:1]):
        assert result.output == "It is 42."
        assert [name for name, _ in result.agents()] == ["boss", "expert"]


def test_an_agent_as_a_tool_of_another_one() -> None:
    def model(request: Json) -> str | Json:
        if "helper" in offered(request) and last(request)["role"] != "tool":
            return call("helper", request=said(last(request)))
        return calculator(request)

    @agl.rollout
    async def with_helper(task: str, llm: agl.LLM) -> str:
        helper = agent_of(llm, "helper", description="Answers a question.")
        return await ask(agent_of(llm, "boss", tools=[AgentTool(helper)]), task)

    for result in run_agent(with_helper, model, tasks=TASKS[:1]):
        assert [name for name, _ in result.agents()] == ["boss", "helper", "helper", "boss"]
        assert [name for name, _ in result.agents("^helper$")] == ["helper", "helper"]
