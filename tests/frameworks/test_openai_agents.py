"""The OpenAI Agents SDK: tools, handoffs, agents as tools, an output type, streams; over chat and over responses."""

from __future__ import annotations

from typing import Any

import agentlightning as agl
from tests.frameworks import suite
from tests.frameworks.engine import Json, calculator, call, last, numbers, offered, said
from tests.frameworks.harness import TaskResult
from tests.frameworks.suite import SAID, Maker, Product, Promise, address, asking, keeps, multiply, needs

openai = needs("openai")
agents = needs("agents", "openai-agents")


def over_chat(llm: agl.LLM) -> Any:
    return agents.OpenAIChatCompletionsModel(model=llm.model, openai_client=openai.AsyncOpenAI(**address(llm)))


def over_responses(llm: agl.LLM) -> Any:
    return agents.OpenAIResponsesModel(model=llm.model, openai_client=openai.AsyncOpenAI(**address(llm)))


DIALECTS = {"chat": over_chat, "responses": over_responses}


def agent_of(model: Any, name: str = "Helper", instructions: str = "Use the tool.", **more: Any) -> Any:
    own = {"tools": [agents.function_tool(multiply)], **more}
    return agents.Agent(name=name, instructions=instructions, model=model, **own)


@keeps(suite.TOOL_LOOP, suite.SEVERAL_TOOLS, on=DIALECTS)
async def test_an_agent_with_a_tool(task: str, llm: agl.LLM, model_of: Maker) -> str:
    return (await agents.Runner.run(agent_of(model_of(llm)), task)).final_output


def triage(request: Json) -> str | Json:
    """A model that hands over to the mathematician, who multiplies with his tool."""
    if "transfer_to_mathematician" in offered(request):
        return call("transfer_to_mathematician")
    return calculator(request) if said(last(request)).isdigit() else call("multiply", 1, **numbers(request))


def on_both_sides(result: TaskResult) -> None:
    instructions = [said(exchange.request["messages"][0]) for exchange in result.exchanges]
    assert instructions == ["Hand over.", "Multiply.", "Multiply."]


HANDOFF = Promise("handoff", triage, [("Mathematician", answer) for answer in SAID], [1, 2], also=on_both_sides)


@keeps(HANDOFF, on=DIALECTS)
async def test_a_handoff(task: str, llm: agl.LLM, model_of: Maker) -> tuple[str, str]:
    expert = agent_of(model_of(llm), "Mathematician", "Multiply.")
    result = await agents.Runner.run(agent_of(model_of(llm), "Front", "Hand over.", tools=[], handoffs=[expert]), task)
    return result.last_agent.name, result.final_output


@keeps(suite.ASKED, on=DIALECTS, model=asking("ask_mathematician", "input"))
async def test_an_agent_as_a_tool_of_another(task: str, llm: agl.LLM, model_of: Maker) -> str:
    expert = agent_of(model_of(llm), "Mathematician", "Multiply.")
    tool = expert.as_tool(tool_name="ask_mathematician", tool_description="Ask for a product.")
    return (await agents.Runner.run(agent_of(model_of(llm), "Front", "Ask.", tools=[tool]), task)).final_output


@keeps(suite.PARSED, on=DIALECTS)
async def test_an_output_type(task: str, llm: agl.LLM, model_of: Maker) -> Product:
    helper = agent_of(model_of(llm), tools=[], output_type=Product)
    return (await agents.Runner.run(helper, task)).final_output


@keeps(suite.WORDS, on=DIALECTS)
async def test_a_streamed_run(task: str, llm: agl.LLM, model_of: Maker) -> Json:
    settings = agents.ModelSettings(include_usage=True)
    result = agents.Runner.run_streamed(agent_of(model_of(llm), model_settings=settings), task)
    words = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    return {"words": words, "text": result.final_output, "used": result.context_wrapper.usage.total_tokens}


@keeps(suite.CONVERSATION, on={"responses": over_responses})
async def test_a_session(task: str, llm: agl.LLM, model_of: Maker) -> list[str]:
    helper, session = agent_of(model_of(llm)), agents.SQLiteSession("conversation")
    return [
        (await agents.Runner.run(helper, question, session=session)).final_output for question in (task, "And why?")
    ]
