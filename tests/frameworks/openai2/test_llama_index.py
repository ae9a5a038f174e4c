"""LlamaIndex: agents with tools, a workflow of agents, streams, structured output; over chat and responses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import BaseModel

import agentlightning as agl
from tests.frameworks.engine import Json, both_ways, call, last, numbers, offered, said, thinking, thoughts
from tests.frameworks.harness import run_agent

pytest.importorskip("llama_index", reason="llama-index is not installed: make test-frameworks")

from llama_index.core.agent.workflow import AgentStream, AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.program import LLMTextCompletionProgram
from llama_index.llms.openai import OpenAI
from llama_index.llms.openai_like import OpenAILikeResponses

SAID = ["It is 42, no doubt.", "It is 72, no doubt."]


class Product(BaseModel):
    """The answer."""

    a: int
    b: int
    value: int


PRODUCTS = [Product(a=6, b=7, value=42), Product(a=8, b=9, value=72)]


def multiply(a: int, b: int) -> int:
    """Return a times b."""
    return a * b


def over_chat(llm: agl.LLM) -> Any:
    return agl.integrations.llama_index_llm(llm)


def over_responses(llm: agl.LLM, **more: Any) -> Any:
    told = {"model": llm.model, "api_base": llm.get_base_url(), "api_key": llm.api_key}
    return OpenAILikeResponses(**told, is_chat_model=True, is_function_calling_model=True, **more)


both = pytest.mark.parametrize("model_of", [over_chat, over_responses], ids=["chat", "responses"])


@both
@pytest.mark.parametrize("streaming", [True, False], ids=["streamed", "plain"])
def test_an_agent_with_a_tool_is_one_row(model_of: Any, streaming: bool) -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> str:
        helper = FunctionAgent(tools=[multiply], llm=model_of(llm), system_prompt="Use the tool.", streaming=streaming)
        return str(await helper.run(task))

    results = run_agent(agent, direct=model_of is over_chat)
    assert [one.output for one in results] == SAID
    assert [len(one.exchanges) for one in results] == [2, 2]
    assert [len(one.record.samples) for one in results] == [1, 1]


@both
def test_agents_drop_the_thoughts_of_earlier_turns(model_of: Any) -> None:
    """So says the guide; a change of the library is welcome, and then a change of the guide."""

    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> str:
        return str(await FunctionAgent(tools=[multiply], llm=model_of(llm)).run(task))

    for one in run_agent(agent, thinking, direct=False):
        assert thoughts(one.exchanges[1].request) == [None]
        assert len(one.record.samples) == 2


def test_what_the_server_remembers_keeps_its_thoughts() -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> list[str]:
        model = over_responses(llm, track_previous_responses=True)
        first = await model.achat([ChatMessage(task)])
        second = await model.achat([ChatMessage(f"And why? {task}")])
        return [str(first.message.content), str(second.message.content)]

    def model(request: Json) -> Json:
        return {"content": f"Answer {len(request['messages'])}.", "reasoning_content": "Thought."}

    for one in run_agent(agent, model, direct=False):
        assert one.output == ["Answer 1.", "Answer 3."]
        assert thoughts(one.exchanges[1].request) == ["Thought."]
        assert len(one.record.samples) == 1


def test_several_tool_calls_at_once_are_one_row() -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> str:
        return str(await FunctionAgent(tools=[multiply], llm=over_chat(llm)).run(task))

    results = run_agent(agent, both_ways)
    assert [one.output for one in results] == ["It is 42 and 42.", "It is 72 and 72."]
    assert [len(one.record.samples) for one in results] == [1, 1]


def test_the_words_of_an_agent_as_they_come() -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> list[str]:
        running = FunctionAgent(tools=[multiply], llm=over_chat(llm)).run(task)
        words = [event.delta async for event in running.stream_events() if isinstance(event, AgentStream)]
        await running
        return [word for word in words if word]

    for one, answer in zip(run_agent(agent), SAID, strict=True):
        assert "".join(one.output) == answer
        assert len(one.output) == len(answer.split())


def test_a_react_agent_whose_tools_are_in_words() -> None:
    def model(request: Json) -> str:
        if "Observation" not in said(last(request)):
            return f"Thought: I multiply.\nAction: multiply\nAction Input: {json.dumps(numbers(request))}"
        return f"Thought: I can answer.\nAnswer: {said(last(request)).split()[-1]}"

    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> str:
        return str(await ReActAgent(tools=[multiply], llm=over_chat(llm)).run(task))

    def of_question(request: Json) -> str:
        question = [message for message in request["messages"] if "times" in said(message)][-1:]
        return model({**request, "messages": [{**question[0], "role": "user"}, *request["messages"]]})

    results = run_agent(agent, of_question)
    assert [one.output for one in results] == ["42", "72"]
    assert [len(one.exchanges) for one in results] == [2, 2]


def test_a_workflow_of_agents_that_hand_over() -> None:
    def model(request: Json) -> str | Json:
        if "multiply" in offered(request):
            results = [said(message).strip() for message in request["messages"] if message["role"] == "tool"]
            return "It is done." if {"42", "72"} & set(results) else call("multiply", 1, **numbers(request))
        return call("handoff", to_agent="mathematician", reason="It is arithmetic.")

    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> str:
        triage = FunctionAgent(
            name="triage",
            description="Hands over.",
            system_prompt="Hand over.",
            llm=over_chat(llm),
            can_handoff_to=["mathematician"],
        )
        mathematician = FunctionAgent(
            name="mathematician",
            description="Multiplies.",
            system_prompt="Use the tool.",
            llm=over_chat(llm),
            tools=[multiply],
            can_handoff_to=[],
        )
        return str(await AgentWorkflow(agents=[triage, mathematician], root_agent="triage").run(task))

    results = run_agent(agent, model)
    assert [len(one.exchanges) for one in results] == [3, 3]
    assert [[len(row.call_ids) for row in one.record.samples] for one in results] == [[1, 2], [1, 2]]


def in_form(request: Json) -> str | Json:
    given = numbers(request)
    wanted = {**given, "value": given["a"] * given["b"]}
    return call(offered(request).pop(), **wanted) if offered(request) else json.dumps(wanted)


@pytest.mark.parametrize("way", ["structured_llm", "tool", "text"])
def test_structured_output(way: str) -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> Product:
        model = over_chat(llm)
        if way == "structured_llm":
            return (await model.as_structured_llm(Product).achat([ChatMessage(task)])).raw
        if way == "tool":
            reply = await model.achat_with_tools([_product_tool()], user_msg=task, tool_required=True)
            (found,) = model.get_tool_calls_from_response(reply)
            return Product(**found.tool_kwargs)
        program = LLMTextCompletionProgram.from_defaults(
            output_cls=Product, prompt_template_str="{task}", llm=model, verbose=False
        )
        return await program.acall(task=task)

    assert [one.output for one in run_agent(agent, in_form)] == PRODUCTS


def _product_tool() -> Any:
    from llama_index.core.tools import FunctionTool

    return FunctionTool.from_defaults(fn=lambda **given: given, name="Product", description="p", fn_schema=Product)


def test_calls_side_by_side_are_each_a_row() -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> list[str]:
        model = over_chat(llm)
        asked = [[ChatMessage(f"You are {name}.", role="system"), ChatMessage(task)] for name in ("Ada", "Emmy")]
        plain = await asyncio.gather(*(model.achat(messages) for messages in asked))

        async def streamed(messages: list[ChatMessage]) -> str:
            return "".join([part.delta or "" async for part in await model.astream_chat(messages)])

        return [str(one.message.content) for one in plain] + list(await asyncio.gather(*map(streamed, asked)))

    def model(request: Json) -> str:
        return f"{said(request['messages'][0]).split()[-1]} {'streams' if request.get('stream') else 'agrees'}."

    for result in run_agent(agent, model, in_order=False):
        assert result.output == ["Ada. agrees.", "Emmy. agrees.", "Ada. streams.", "Emmy. streams."]
        assert len(result.record.samples) == 4


def test_the_helper_sends_the_temperature_of_the_run() -> None:
    sampling = {"temperature": 0.7, "top_p": 0.9}
    told = agl.LLM(endpoint="http://127.0.0.1:1/v1", model="m", sampling_parameters=sampling)
    made = agl.integrations.llama_index_llm(told, context_window=32_000)
    assert (made.temperature, made.additional_kwargs) == (0.7, {"top_p": 0.9})
    assert (made.metadata.context_window, made.metadata.is_function_calling_model) == (32_000, True)
    untold = agl.LLM(endpoint="http://127.0.0.1:1/v1", model="m")
    assert agl.integrations.llama_index_llm(untold).temperature == 1.0
    with pytest.raises(ValueError, match="takes model from the llm of the attempt"):
        agl.integrations.llama_index_llm(untold, model="other")


def test_the_class_for_the_vendor_knows_the_models_of_the_vendor_only() -> None:
    with pytest.raises(ValueError, match="Unknown model 'policy'"):
        _ = OpenAI(model="policy", api_base="http://127.0.0.1:1/v1", api_key="none").metadata
