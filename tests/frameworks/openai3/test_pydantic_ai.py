"""pydantic-ai: tools, output types, streams, agents side by side, thoughts; over chat, responses and messages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import agentlightning as agl
from tests.frameworks import suite
from tests.frameworks.engine import Json, calls, last, offered, said
from tests.frameworks.suite import SAID, Maker, Product, Promise, address, keeps, multiply, needs

needs("pydantic_ai", "pydantic-ai")

from pydantic_ai import Agent, ModelRetry, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


def over_chat(llm: agl.LLM) -> Any:
    return OpenAIChatModel(llm.model, provider=OpenAIProvider(**address(llm)))


def over_responses(llm: agl.LLM) -> Any:
    return OpenAIResponsesModel(llm.model, provider=OpenAIProvider(**address(llm)))


def over_messages(llm: agl.LLM) -> Any:
    return AnthropicModel(llm.model, provider=AnthropicProvider(**address(llm)))


DIALECTS = {"chat": over_chat, "responses": over_responses, "messages": over_messages}


@keeps(suite.TOOL_LOOP, suite.SEVERAL_TOOLS, on=DIALECTS)
async def test_an_agent_with_a_tool(task: str, llm: agl.LLM, model_of: Maker) -> str:
    return (await Agent(model_of(llm), tools=[multiply], instructions="Use the tool.").run(task)).output


@keeps(suite.WORDS, on=DIALECTS)
async def test_a_streamed_run(task: str, llm: agl.LLM, model_of: Maker) -> list[str]:
    helper = Agent(model_of(llm), tools=[multiply], instructions="Use the tool.")
    async with helper.run_stream(task) as running:
        return [word async for word in running.stream_text(delta=True, debounce_by=None)]


KINDS = {
    f"{dialect} {kind.__name__}": (model_of, kind)
    for dialect, model_of in DIALECTS.items()
    for kind in (ToolOutput, NativeOutput, PromptedOutput)
    # pydantic-ai allows a schema over messages for the models of the vendor only
    if (dialect, kind) != ("messages", NativeOutput)
}


@keeps(suite.PARSED, on=KINDS)
async def test_an_output_type(task: str, llm: agl.LLM, way: tuple[Maker, Any]) -> Product:
    model_of, kind = way
    return (await Agent(model_of(llm), output_type=kind(Product)).run(task)).output


def wordy_at_first(request: Json) -> str:
    return "Certainly 42." if "Without" in said(last(request)) else "I am sure that it is 42."


@keeps(Promise("asked again", wordy_at_first, ["Certainly 42."] * 2, [2]))
async def test_an_output_that_is_refused_is_asked_again(task: str, llm: agl.LLM) -> str:
    helper = Agent(over_chat(llm))

    @helper.output_validator
    def brief(text: str) -> str:
        if len(text.split()) > 3:
            raise ModelRetry("Without the introduction, please.")
        return text

    return (await helper.run(task)).output


@keeps(
    suite.THOUGHTS_KEPT, on=DIALECTS, rows=None, outputs=[(answer, ["Thought  1.", "Thought  3."]) for answer in SAID]
)
async def test_thoughts(task: str, llm: agl.LLM, model_of: Maker) -> tuple[str, list[str]]:
    settings: Any = {
        over_messages: {"anthropic_thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 4096},
        over_responses: {"openai_reasoning_summary": "auto"},
        over_chat: {},
    }[model_of]
    done = await Agent(model_of(llm), tools=[multiply], model_settings=settings).run(task)
    parts = [part for message in done.all_messages() for part in message.parts if isinstance(part, ThinkingPart)]
    contents = [part.content or str(part.provider_details) for part in parts]
    return done.output, [f"Thought  {number}." for number in (1, 3) if f"Thought  {number}." in contents[number // 2]]


@pytest.fixture
def instrumented() -> Iterator[None]:
    Agent.instrument_all()
    yield
    Agent.instrument_all(False)


def chaired(request: Json) -> str | Json:
    """The chair asks grace, and says what she says; the others agree in their names."""
    if "ask" not in offered(request):
        return f"{said(request['messages'][0]).split()[-1]} agrees."
    results = [said(message) for message in request["messages"] if message["role"] == "tool"]
    return f"Asked: {results[0].strip()}" if results else calls(("ask", {"name": "grace"}))


TEAM = Promise(
    "team",
    chaired,
    [["ada. agrees.", "emmy. agrees.", "Asked: grace. agrees."]] * 2,
    [1, 1, 1, 2],
    in_order=False,
)
NAMED_TEAM = TEAM.but(rows=None, names=["ada", "chair", "chair", "emmy", "grace"], direct=False)


async def team(task: str, llm: agl.LLM, way: tuple[Maker, bool]) -> list[str]:
    """Agents side by side, one of which has another as its tool."""
    model_of, streamed = way

    async def run(helper: Agent[None, str]) -> str:
        if not streamed:
            return (await helper.run(task)).output
        async with helper.run_stream(task) as running:
            return await running.get_output()

    async def ask(name: str) -> str:
        """Ask a colleague."""
        return await run(Agent(model_of(llm), system_prompt=f"You are {name}.", name=name))

    chair = Agent(model_of(llm), tools=[ask], system_prompt="You are chair.", name="chair")
    return list(await asyncio.gather(ask("ada"), ask("emmy"), run(chair)))


test_a_team = keeps(TEAM, on={"chat": (over_chat, False)})(team)
WAYS = {
    f"{dialect} {'streamed' if streamed else 'plain'}": (model_of, streamed)
    for dialect, model_of in DIALECTS.items()
    for streamed in (False, True)
}
test_an_instrumented_team = pytest.mark.usefixtures("instrumented")(keeps(NAMED_TEAM, on=WAYS)(team))
