"""AutoGen AgentChat: an assistant with tools, teams, handoffs, streams; its own spans show whose call it is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import agentlightning as agl
from tests.frameworks.engine import Json, call, last, numbers, offered, said
from tests.frameworks.harness import TaskResult
from tests.frameworks.suite import PARSED, TOOL_LOOP, WORDS, Product, Promise, address, keeps, multiply, needs

needs("autogen_agentchat", "autogen-agentchat")
needs("autogen_ext.models.openai", "autogen-ext[openai]")

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import TextMentionTermination
from autogen_agentchat.messages import ModelClientStreamingChunkEvent
from autogen_agentchat.teams import RoundRobinGroupChat, Swarm
from autogen_ext.models.openai import OpenAIChatCompletionClient

ABLE: dict[str, Any] = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}


@asynccontextmanager
async def client_of(llm: agl.LLM) -> AsyncIterator[OpenAIChatCompletionClient]:
    client = OpenAIChatCompletionClient(model=llm.model, **address(llm), model_info={**ABLE, "family": "unknown"})
    yield client
    await client.close()


def speakers(result: TaskResult) -> list[str]:
    """Return the owner of each call, by the agent's span that is next above it."""
    agents = [[name for name in above if name.startswith("invoke_agent ")] for above in result.above_calls()]
    return [names[-1].removeprefix("invoke_agent ") for names in agents]


def below_its_own_span(result: TaskResult) -> None:
    assert speakers(result) == ["helper", "helper"]
    (tool,), (agent,) = result.named("execute_tool multiply"), result.named("invoke_agent helper")
    assert tool.parent_id == agent.span_id


@keeps(TOOL_LOOP, also=below_its_own_span)
async def test_an_assistant_with_a_tool(task: str, llm: agl.LLM) -> str:
    async with client_of(llm) as client:
        helper = AssistantAgent(
            "helper", client, tools=[multiply], max_tool_iterations=3, system_message="Use the tool."
        )
        return (await helper.run(task=task)).messages[-1].to_text()


@keeps(WORDS, rows=None)
async def test_an_assistant_that_streams(task: str, llm: agl.LLM) -> Json:
    async with client_of(llm) as client:
        helper = AssistantAgent("helper", client, tools=[multiply], reflect_on_tool_use=True, model_client_stream=True)
        messages: list[Any] = [message async for message in helper.run_stream(task=task)]
    words = [message.content for message in messages if isinstance(message, ModelClientStreamingChunkEvent)]
    return {"words": words, "text": messages[-1].messages[-1].to_text()}


@keeps(PARSED)
async def test_an_output_type(task: str, llm: agl.LLM) -> Product:
    async with client_of(llm) as client:
        helper = AssistantAgent("helper", client, output_content_type=Product)
        return (await helper.run(task=task)).messages[-1].content


def draft(request: Json) -> str:
    """A writer who needs two goes, and a critic who sees it."""
    turn = sum(message["role"] == "assistant" for message in request["messages"])
    if "write" in said(request["messages"][0]):
        return ["A first draft.", "A better draft."][turn]
    return ["Try again.", "I APPROVE."][turn]


def members_told_apart(result: TaskResult) -> None:
    assert speakers(result) == ["writer", "critic"] * 2
    own = agl.TracerTraceToTriplet(agent_match="^writer$").adapt(result.spans)
    replies = [exchange.reply["choices"][0]["token_ids"] for exchange in result.exchanges]
    assert [triplet.response["token_ids"] for triplet in own] == replies[::2]


DRAFTS = [["A first draft.", "Try again.", "A better draft.", "I APPROVE."]] * 2


@keeps(Promise("members told apart", draft, DRAFTS, [2, 2], also=members_told_apart))
async def test_a_team(task: str, llm: agl.LLM) -> list[str]:
    async with client_of(llm) as client:
        writer = AssistantAgent("writer", client, system_message="You write.")
        critic = AssistantAgent("critic", client, system_message="You judge. Say APPROVE if it is good.")
        approved = TextMentionTermination("APPROVE", sources=["critic"])
        chat = RoundRobinGroupChat([writer, critic], termination_condition=approved)
        return [message.to_text() for message in (await chat.run(task=task)).messages[1:]]


def hand_over(request: Json) -> str | Json:
    if "transfer_to_expert" in offered(request):
        return call("transfer_to_expert")
    if said(last(request)).isdigit():
        return f"It is {said(last(request))}. DONE"
    return call("multiply", 1, **numbers(request))


def on_both_sides(result: TaskResult) -> None:
    assert speakers(result) == ["front", "expert", "expert"]


DONE = [("expert", "It is 42. DONE"), ("expert", "It is 72. DONE")]


@keeps(Promise("handoff", hand_over, DONE, also=on_both_sides))
async def test_a_swarm(task: str, llm: agl.LLM) -> tuple[str, str]:
    async with client_of(llm) as client:
        front = AssistantAgent("front", client, handoffs=["expert"], system_message="Hand over.")
        role = "Multiply. Say DONE at the end."
        expert = AssistantAgent("expert", client, tools=[multiply], reflect_on_tool_use=True, system_message=role)
        result = await Swarm([front, expert], termination_condition=TextMentionTermination("DONE")).run(task=task)
        return result.messages[-1].source, result.messages[-1].to_text()
