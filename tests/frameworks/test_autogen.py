"""AutoGen AgentChat: an assistant with tools, teams, handoffs, streams; its own spans show whose call it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

import agentlightning as agl
from tests.frameworks.engine import Json, call, last, numbers, offered, said
from tests.frameworks.harness import TaskResult, run_agent

pytest.importorskip("autogen_agentchat", reason="autogen-agentchat is not installed: make test-frameworks")
pytest.importorskip("autogen_ext.models.openai", reason="autogen-ext[openai] is not installed: make test-frameworks")

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import TextMentionTermination
from autogen_agentchat.messages import ModelClientStreamingChunkEvent
from autogen_agentchat.teams import RoundRobinGroupChat, Swarm
from autogen_ext.models.openai import OpenAIChatCompletionClient

SAID = ["It is 42, no doubt.", "It is 72, no doubt."]


class Product(BaseModel):
    """An answer that can be parsed."""

    a: int
    b: int
    value: int


async def multiply(a: int, b: int) -> int:
    """Return a times b."""
    return a * b


def client_of(llm: agl.LLM) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(
        model=llm.model,
        base_url=llm.get_base_url(),
        api_key=llm.api_key,
        model_info={
            "vision": False,
            "function_calling": True,
            "json_output": True,
            "structured_output": True,
            "family": "unknown",
        },
    )


def speakers(result: TaskResult) -> list[str]:
    """Return whose call each one is, by the agent's span that is next above it."""
    agents = [[name for name in above if name.startswith("invoke_agent ")] for above in result.above_calls()]
    return [names[-1].removeprefix("invoke_agent ") for names in agents]


@agl.rollout
async def assistant(task: str, llm: agl.LLM) -> str:
    client = client_of(llm)
    helper = AssistantAgent("helper", client, tools=[multiply], max_tool_iterations=3, system_message="Use the tool.")
    result = await helper.run(task=task)
    await client.close()
    return result.messages[-1].to_text()


def test_an_assistant_with_a_tool_is_one_row_below_its_own_span() -> None:
    for result, answer in zip(run_agent(assistant), SAID, strict=True):
        assert result.output == answer
        assert len(result.record.samples) == 1
        assert speakers(result) == ["helper", "helper"]
        (tool,), (agent,) = result.named("execute_tool multiply"), result.named("invoke_agent helper")
        assert tool.parent_id == agent.span_id


@agl.rollout
async def streams(task: str, llm: agl.LLM) -> tuple[list[str], str]:
    client = client_of(llm)
    helper = AssistantAgent("helper", client, tools=[multiply], reflect_on_tool_use=True, model_client_stream=True)
    words: list[str] = []
    final: Any = None
    async for message in helper.run_stream(task=task):
        if isinstance(message, ModelClientStreamingChunkEvent):
            words.append(message.content)
        final = message
    await client.close()
    return words, final.messages[-1].to_text()


def test_an_assistant_that_streams() -> None:
    for result, answer in zip(run_agent(streams), SAID, strict=True):
        words, final = result.output
        assert "".join(words) == final == answer
        assert len([word for word in words if word]) == len(answer.split())
        assert [exchange.request["stream"] for exchange in result.exchanges] == [True, True]


@agl.rollout
async def structured(task: str, llm: agl.LLM) -> Product:
    client = client_of(llm)
    helper = AssistantAgent("helper", client, output_content_type=Product)
    result = await helper.run(task=task)
    await client.close()
    return result.messages[-1].content


def test_an_output_type_is_parsed() -> None:
    def model(request: Json) -> str:
        assert request["response_format"]["json_schema"]["schema"]["required"] == ["a", "b", "value"]
        found = numbers(request)
        return json.dumps({**found, "value": found["a"] * found["b"]})

    assert [one.output for one in run_agent(structured, model)] == [
        Product(a=6, b=7, value=42),
        Product(a=8, b=9, value=72),
    ]


@agl.rollout
async def team(task: str, llm: agl.LLM) -> list[str]:
    client = client_of(llm)
    writer = AssistantAgent("writer", client, system_message="You write.")
    critic = AssistantAgent("critic", client, system_message="You judge. Say APPROVE if it is good.")
    approved = TextMentionTermination("APPROVE", sources=["critic"])
    chat = RoundRobinGroupChat([writer, critic], termination_condition=approved)
    result = await chat.run(task=task)
    await client.close()
    return [message.to_text() for message in result.messages[1:]]


def draft(request: Json) -> str:
    """A writer who needs two goes, and a critic who sees it."""
    turn = sum(message["role"] == "assistant" for message in request["messages"])
    if "write" in said(request["messages"][0]):
        return ["A first draft.", "A better draft."][turn]
    return ["Try again.", "I APPROVE."][turn]


def test_the_members_of_a_team_are_told_apart() -> None:
    for result in run_agent(team, draft):
        assert result.output == ["A first draft.", "Try again.", "A better draft.", "I APPROVE."]
        assert speakers(result) == ["writer", "critic"] * 2
        assert [len(row.call_ids) for row in result.record.samples] == [2, 2]
        own = agl.TracerTraceToTriplet(agent_match="^writer$").adapt(result.spans)
        replies = [exchange.reply["choices"][0]["token_ids"] for exchange in result.exchanges]
        assert [triplet.response["token_ids"] for triplet in own] == replies[::2]


@agl.rollout
async def swarm(task: str, llm: agl.LLM) -> tuple[str, str]:
    client = client_of(llm)
    front = AssistantAgent("front", client, handoffs=["expert"], system_message="Hand over.")
    expert = AssistantAgent(
        "expert", client, tools=[multiply], reflect_on_tool_use=True, system_message="Multiply. Say DONE at the end."
    )
    result = await Swarm([front, expert], termination_condition=TextMentionTermination("DONE")).run(task=task)
    await client.close()
    return result.messages[-1].source, result.messages[-1].to_text()


def hand_over(request: Json) -> str | Json:
    if "transfer_to_expert" in offered(request):
        return call("transfer_to_expert")
    if said(last(request)).isdigit():
        return f"It is {said(last(request))}. DONE"
    return call("multiply", 1, **numbers(request))


def test_a_handoff_is_captured_on_both_sides() -> None:
    results = run_agent(swarm, hand_over)
    assert [one.output for one in results] == [("expert", "It is 42. DONE"), ("expert", "It is 72. DONE")]
    for one in results:
        assert speakers(one) == ["front", "expert", "expert"]
