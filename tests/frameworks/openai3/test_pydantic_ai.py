"""pydantic-ai: tools, output types, streams, agents side by side, thoughts; over chat, responses and messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import BaseModel

import agentlightning as agl
from tests.frameworks.engine import (
    Json,
    both_ways,
    calculator,
    call,
    calls,
    last,
    numbers,
    offered,
    said,
    thinking,
    thoughts,
)
from tests.frameworks.harness import run_agent

pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed: make test-frameworks")

from pydantic_ai import Agent, ModelRetry, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

SAID = ["It is 42, no doubt.", "It is 72, no doubt."]
Maker = Callable[[agl.LLM], Any]


class Product(BaseModel):
    """The answer."""

    a: int
    b: int
    value: int


PRODUCTS = [Product(a=6, b=7, value=42), Product(a=8, b=9, value=72)]


def over_chat(llm: agl.LLM) -> Any:
    return OpenAIChatModel(llm.model, provider=OpenAIProvider(base_url=llm.get_base_url(), api_key=llm.api_key))


def over_responses(llm: agl.LLM) -> Any:
    return OpenAIResponsesModel(llm.model, provider=OpenAIProvider(base_url=llm.get_base_url(), api_key=llm.api_key))


def over_messages(llm: agl.LLM) -> Any:
    return AnthropicModel(llm.model, provider=AnthropicProvider(base_url=llm.get_base_url(), api_key=llm.api_key))


DIALECTS = {"chat": over_chat, "responses": over_responses, "messages": over_messages}
each_dialect = pytest.mark.parametrize("model_of", DIALECTS.values(), ids=DIALECTS)


def multiply(a: int, b: int) -> int:
    """Return a times b."""
    return a * b


@each_dialect
@pytest.mark.parametrize("answer", [calculator, both_ways], ids=["one", "two at once"])
def test_an_agent_with_a_tool_is_one_row(model_of: Maker, answer: Any) -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> str:
        helper = Agent(model_of(llm), tools=[multiply], instructions="Use the tool.")
        return (await helper.run(task)).output

    results = run_agent(agent, answer, direct=model_of is over_chat)
    wanted = SAID if answer is calculator else ["It is 42 and 42.", "It is 72 and 72."]
    assert [one.output for one in results] == wanted
    assert [len(one.exchanges) for one in results] == [2, 2]
    assert [len(one.record.samples) for one in results] == [1, 1]


@each_dialect
def test_a_streamed_run_gives_its_words(model_of: Maker) -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> list[str]:
        helper = Agent(model_of(llm), tools=[multiply], instructions="Use the tool.")
        async with helper.run_stream(task) as running:
            return [word async for word in running.stream_text(delta=True, debounce_by=None)]

    results = run_agent(agent, direct=model_of is over_chat)
    for one, answer in zip(results, SAID, strict=True):
        assert "".join(one.output) == answer
        assert len([word for word in one.output if word]) == len(answer.split())
        assert [exchange.request.get("stream") for exchange in one.exchanges] == [True, True]
        assert len(one.record.samples) == 1


def in_form(request: Json) -> str | Json:
    given = numbers(request)
    wanted = {**given, "value": given["a"] * given["b"]}
    return call(offered(request).pop(), **wanted) if offered(request) else json.dumps(wanted)


@each_dialect
@pytest.mark.parametrize("kind", [ToolOutput, NativeOutput, PromptedOutput], ids=lambda kind: kind.__name__)
def test_an_output_type(model_of: Maker, kind: Any) -> None:
    if kind is NativeOutput and model_of is over_messages:
        pytest.skip("pydantic-ai allows a schema over messages for the models of the vendor only")

    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> Product:
        return (await Agent(model_of(llm), output_type=kind(Product)).run(task)).output

    assert [one.output for one in run_agent(agent, in_form, direct=model_of is over_chat)] == PRODUCTS


def test_an_output_that_is_refused_is_asked_again_in_one_row() -> None:
    def model(request: Json) -> str:
        return "Certainly 42." if "Without" in said(last(request)) else "I am sure that it is 42."

    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> str:
        helper = Agent(over_chat(llm))

        @helper.output_validator
        def brief(text: str) -> str:
            if len(text.split()) > 3:
                raise ModelRetry("Without the introduction, please.")
            return text

        return (await helper.run(task)).output

    results = run_agent(agent, model)
    assert [one.output for one in results] == ["Certainly 42."] * 2
    assert [len(one.record.samples) for one in results] == [1, 1]


def test_agents_side_by_side_and_an_agent_as_a_tool() -> None:
    def model(request: Json) -> str | Json:
        if "ask" not in offered(request):
            return f"{said(request['messages'][0]).split()[-1]} agrees."
        results = [said(message) for message in request["messages"] if message["role"] == "tool"]
        return f"Asked: {results[0].strip()}" if results else calls(("ask", {"name": "Grace"}))

    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> list[str]:
        async def ask(name: str) -> str:
            """Ask somebody."""
            return (await Agent(over_chat(llm), system_prompt=f"You are {name}.").run(task)).output

        chair = Agent(over_chat(llm), tools=[ask], system_prompt="Ask.")
        outputs = await asyncio.gather(ask("Ada"), ask("Emmy"), chair.run(task))
        return [*outputs[:2], outputs[2].output]

    for result in run_agent(agent, model, in_order=False):
        assert result.output == ["Ada. agrees.", "Emmy. agrees.", "Asked: Grace. agrees."]
        assert sorted(len(row.call_ids) for row in result.record.samples) == [1, 1, 1, 2]


@pytest.mark.parametrize("dialect", ["messages", "responses", "chat"])
def test_thoughts_come_back_with_the_turn(dialect: str) -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> tuple[str, list[str]]:
        settings: Any = {
            "messages": {"anthropic_thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 4096},
            "responses": {"openai_reasoning_summary": "auto"},
            "chat": {},
        }[dialect]
        helper = Agent(DIALECTS[dialect](llm), tools=[multiply], model_settings=settings)
        done = await helper.run(task)
        parts = [part for message in done.all_messages() for part in message.parts]
        own = [part for part in parts if isinstance(part, ThinkingPart)]
        return done.output, [part.content or str(part.provider_details) for part in own]

    for one, answer in zip(run_agent(agent, thinking, direct=False), SAID, strict=True):
        output, (first, second) = one.output
        assert output == answer
        assert "Thought 1." in first
        assert "Thought 3." in second
        assert thoughts(one.exchanges[1].request) == ["Thought 1."]


@pytest.fixture
def instrumented() -> Iterator[None]:
    Agent.instrument_all()
    yield
    Agent.instrument_all(False)


@each_dialect
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
def test_instrumented_agents_side_by_side_and_as_tools_have_their_names(
    model_of: Maker, streamed: bool, instrumented: None
) -> None:
    def model(request: Json) -> str | Json:
        if "ask" not in offered(request):
            return "It is 42."
        results = [said(message) for message in request["messages"] if message["role"] == "tool"]
        return "Grace says that it is 42." if results else calls(("ask", {"name": "grace"}))

    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> list[str]:
        async def run(helper: Agent[None, str]) -> str:
            if not streamed:
                return (await helper.run(task)).output
            async with helper.run_stream(task) as running:
                return await running.get_output()

        async def ask(name: str) -> str:
            """Ask somebody."""
            return await run(Agent(model_of(llm), system_prompt=f"You are {name}.", name=name))

        chair = Agent(model_of(llm), tools=[ask], system_prompt="You are chair.", name="chair")
        return list(await asyncio.gather(ask("ada"), ask("emmy"), run(chair)))

    for result in run_agent(agent, model, in_order=False, direct=False):
        assert len(result.record.calls) == 5
        names = ["ada", "chair", "chair", "emmy", "grace"]
        assert sorted(result.agents()) == [(name, f"You are {name}.") for name in names]
        assert result.agents("^ada$") == [("ada", "You are ada.")]
