"""Microsoft Agent Framework: tools, structured output, streams, sessions, agents as tools; over responses and chat."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import agentlightning as agl
from tests.frameworks import suite
from tests.frameworks.engine import Json
from tests.frameworks.harness import run_agent
from tests.frameworks.suite import STYLES, Maker, Product, address, asking, keeps, multiply, needs

framework = needs("agent_framework", "agent-framework")
clients = needs("agent_framework_openai", "agent-framework")


def over_responses(llm: agl.LLM) -> Any:
    return clients.OpenAIChatClient(model=llm.model, **address(llm))


def over_chat(llm: agl.LLM) -> Any:
    return clients.OpenAIChatCompletionClient(model=llm.model, **address(llm))


DIALECTS = {"responses": over_responses, "chat": over_chat}


def helper_of(client: Any) -> Any:
    return framework.Agent(client, "Use the tool.", name="helper", tools=[multiply])


async def with_tool(task: str, llm: agl.LLM, client_of: Maker) -> str:
    return (await helper_of(client_of(llm)).run(task)).text


test_an_agent_with_a_tool = keeps(suite.TOOL_LOOP, suite.SEVERAL_TOOLS, on=DIALECTS)(with_tool)
test_thoughts_over_responses = keeps(suite.THOUGHTS_KEPT, on={"responses": over_responses})(with_tool)
test_thoughts_over_chat = keeps(suite.THOUGHTS_DROPPED, on={"chat": over_chat})(with_tool)


@keeps(suite.WORDS, on=DIALECTS)
async def test_a_streamed_run(task: str, llm: agl.LLM, client_of: Maker) -> Json:
    stream = helper_of(client_of(llm)).run(task, stream=True)
    pieces = [content async for update in stream for content in update.contents if content.type == "text"]
    words = [piece.text for piece in pieces if piece.merge_mode != "replace"]  # which says the whole once more
    final = await stream.get_final_response()
    return {"words": words, "text": final.text, "used": final.usage_details["total_token_count"]}


@keeps(suite.PARSED, on=DIALECTS)
async def test_structured_output(task: str, llm: agl.LLM, client_of: Maker) -> Product:
    helper = framework.Agent(client_of(llm), "Multiply.")
    return (await helper.run(task, options={"response_format": Product})).value


@keeps(suite.IN_STYLES, on=DIALECTS)
async def test_runs_side_by_side(task: str, llm: agl.LLM, client_of: Maker) -> list[str]:
    one = framework.Agent(client_of(llm), "Be brief.")
    return [done.text for done in await asyncio.gather(*(one.run(f"{task} Answer {style}.") for style in STYLES))]


WAYS = {
    f"{dialect} {way}": (client_of, way == "streamed")
    for dialect, client_of in DIALECTS.items()
    for way in ("whole", "streamed")
}


@keeps(suite.CONVERSATION, on=WAYS)
async def test_a_session(task: str, llm: agl.LLM, way: tuple[Maker, bool]) -> list[str]:
    client_of, streamed = way
    one = helper_of(client_of(llm))
    session = one.create_session()
    answers: list[str] = []
    for question in (task, "And why?"):
        done = one.run(question, session=session, stream=streamed)
        answers.append((await (done.get_final_response() if streamed else done)).text)
    return answers


@keeps(suite.ASKED, on=DIALECTS, model=asking("ask_mathematician", "question"))
async def test_an_agent_as_a_tool_of_another(task: str, llm: agl.LLM, client_of: Maker) -> str:
    expert = helper_of(client_of(llm)).as_tool(name="ask_mathematician", arg_name="question")
    return (await framework.Agent(client_of(llm), "Ask.", name="front", tools=[expert]).run(task)).text


@pytest.mark.parametrize("name", [None, "solver"])
@pytest.mark.parametrize("client_of", DIALECTS.values(), ids=DIALECTS)
def test_a_random_id_is_no_name_of_an_agent(client_of: Maker, name: str | None) -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> str:
        first, other = (framework.Agent(client_of(llm), one, name=one, tools=[multiply]) for one in (name, "other"))
        return f"{(await first.run(task)).text} {(await other.run(task)).text}"

    for result in run_agent(agent, direct=False):
        assert [one for one, _ in result.agents()] == [name or "*"] * 2 + ["other"] * 2
        assert result.agents("^other$") == [("other", "other")] * 2
