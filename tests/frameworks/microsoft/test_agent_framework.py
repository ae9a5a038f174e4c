"""Microsoft Agent Framework: tools, structured output, streams, sessions, agents as tools; over responses and chat."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

import agentlightning as agl
from tests.frameworks.engine import Json, both_ways, calculator, call, last, numbers, offered, said
from tests.frameworks.harness import run_agent

framework = pytest.importorskip("agent_framework", reason="agent-framework is not installed: make test-frameworks")
clients = pytest.importorskip("agent_framework_openai", reason="agent-framework is not installed: make test-frameworks")

SAID = ["It is 42, no doubt.", "It is 72, no doubt."]


class Product(BaseModel):
    """An answer that can be parsed."""

    a: int
    b: int
    value: int


PRODUCTS = [Product(a=6, b=7, value=42), Product(a=8, b=9, value=72)]


def over_responses(llm: agl.LLM) -> Any:
    return clients.OpenAIChatClient(model=llm.model, base_url=llm.get_base_url(), api_key=llm.api_key)


def over_chat(llm: agl.LLM) -> Any:
    return clients.OpenAIChatCompletionClient(model=llm.model, base_url=llm.get_base_url(), api_key=llm.api_key)


both = pytest.mark.parametrize("client_of", [over_responses, over_chat], ids=["responses", "chat"])
Maker = Callable[[agl.LLM], Any]


def multiply(a: int, b: int) -> str:
    """Return a times b."""
    return str(a * b)


def helper(client: Any, **settings: Any) -> Any:
    return framework.Agent(client, "Use the tool.", name="helper", tools=[multiply], **settings)


def helper_of(client_of: Maker) -> Any:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> str:
        return (await helper(client_of(llm)).run(task)).text

    return agent


@both
def test_an_agent_with_a_tool_is_one_row(client_of: Maker) -> None:
    results = run_agent(helper_of(client_of), direct=client_of is over_chat)
    assert [one.output for one in results] == SAID
    assert [len(one.exchanges) for one in results] == [2, 2]
    assert [len(one.record.samples) for one in results] == [1, 1]


@both
def test_several_tool_calls_at_once_are_one_row(client_of: Maker) -> None:
    results = run_agent(helper_of(client_of), both_ways, direct=client_of is over_chat)
    assert [one.output for one in results] == ["It is 42 and 42.", "It is 72 and 72."]
    assert [len(one.record.samples) for one in results] == [1, 1]


@both
def test_responses_give_thoughts_back_to_the_model_and_chat_does_not(client_of: Maker) -> None:
    def model(request: Json) -> Json:
        answer = calculator(request)
        return {"reasoning_content": "Let me see.", **({"content": answer} if isinstance(answer, str) else answer)}

    for result in run_agent(helper_of(client_of), model, direct=False):
        (said_before,) = [m for m in result.exchanges[1].request["messages"] if m["role"] == "assistant"]
        assert said_before.get("reasoning_content") == ("Let me see." if client_of is over_responses else None)
        assert len(result.record.samples) == (1 if client_of is over_responses else 2)


@both
def test_a_streamed_run_gives_its_words_and_is_one_row(client_of: Maker) -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> tuple[list[str], str, int]:
        stream = helper(client_of(llm)).run(task, stream=True)
        pieces = [content async for update in stream for content in update.contents if content.type == "text"]
        words = [piece.text for piece in pieces if piece.merge_mode != "replace"]  # which says the whole once more
        final = await stream.get_final_response()
        return words, final.text, final.usage_details["total_token_count"]

    for result, answer in zip(run_agent(agent, direct=client_of is over_chat), SAID, strict=True):
        words, final, used = result.output
        assert "".join(words) == final == answer
        assert len([word for word in words if word]) == len(answer.split())
        assert used == sum(exchange.reply["usage"]["total_tokens"] for exchange in result.exchanges)
        assert len(result.record.samples) == 1


@both
def test_structured_output_is_parsed(client_of: Maker) -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> Product:
        helper = framework.Agent(client_of(llm), "Multiply.")
        return (await helper.run(task, options={"response_format": Product})).value

    def model(request: Json) -> str:
        assert request["response_format"]["json_schema"]["schema"]["required"] == ["a", "b", "value"]
        found = numbers(request)
        return json.dumps({**found, "value": found["a"] * found["b"]})

    assert [one.output for one in run_agent(agent, model, direct=client_of is over_chat)] == PRODUCTS


@both
def test_runs_side_by_side_are_each_a_row(client_of: Maker) -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> list[str]:
        one = framework.Agent(client_of(llm), "Be brief.")
        styles = ("tersely", "in verse", "in French", "at length")
        return [done.text for done in await asyncio.gather(*(one.run(f"{task} Answer {style}.") for style in styles))]

    def model(request: Json) -> str:
        return f"You asked: {said(last(request))}"

    for result in run_agent(agent, model, in_order=False, direct=client_of is over_chat):
        assert [answer.rsplit(" ", 1)[1] for answer in result.output] == ["tersely.", "verse.", "French.", "length."]
        assert len(result.record.samples) == 4


@both
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_session_keeps_the_conversation_in_one_row(client_of: Maker, streamed: bool) -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> list[str]:
        one = helper(client_of(llm))
        session = one.create_session()
        answers: list[str] = []
        for question in (task, "And why?"):
            done = one.run(question, session=session, stream=streamed)
            answers.append((await (done.get_final_response() if streamed else done)).text)
        return answers

    def model(request: Json) -> str | Json:
        return "It is so." if said(last(request)) == "And why?" else calculator(request)

    results = run_agent(agent, model, direct=client_of is over_chat)
    assert [one.output for one in results] == [[answer, "It is so."] for answer in SAID]
    assert [len(one.exchanges) for one in results] == [3, 3]
    assert [len(one.record.samples) for one in results] == [1, 1]


@both
def test_an_agent_as_a_tool_of_another_is_a_row_of_its_own(client_of: Maker) -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> str:
        expert = helper(client_of(llm)).as_tool(name="ask_mathematician", arg_name="question")
        return (await framework.Agent(client_of(llm), "Ask.", name="front", tools=[expert]).run(task)).text

    def model(request: Json) -> str | Json:
        if "ask_mathematician" not in offered(request):
            return calculator(request)
        if last(request)["role"] == "tool":
            return f"The mathematician says: {said(last(request))}"
        return call("ask_mathematician", question=said(last(request)))

    results = run_agent(agent, model, direct=client_of is over_chat)
    assert [one.output for one in results] == [f"The mathematician says: {answer}" for answer in SAID]
    assert [[len(row.call_ids) for row in one.record.samples] for one in results] == [[2, 2], [2, 2]]


@pytest.mark.parametrize("name", [None, "solver"])
@both
def test_a_random_id_is_no_name_of_an_agent(client_of: Maker, name: str | None) -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> str:
        first, other = (framework.Agent(client_of(llm), one, name=one, tools=[multiply]) for one in (name, "other"))
        return f"{(await first.run(task)).text} {(await other.run(task)).text}"

    for result in run_agent(agent, direct=False):
        assert [one for one, _ in result.agents()] == [name or "*"] * 2 + ["other"] * 2
        assert result.agents("^other$") == [("other", "other")] * 2
